"""A value that transformations take as it is."""

from typing import Generic, TypeVar

from .._module import Module, field

Value = TypeVar("Value")


class Static(Module, Generic[Value]):
    """A Module with nothing but a static field, to hand a value through a filtered transformation.

    **Arguments:**

    - `value`: as for any static field: no array, and compared by value.

    !!! example

        >>> import eqxlike as eqx, jax.numpy as jnp
        >>> squared, name = eqx.filter_jit(lambda x: (x**2, Static("square")))(jnp.ones(()))
        >>> name.value
        'square'
    """

    value: Value = field(static=True)
