"""Classes under jaxtyping's decorator, which checks the arguments of their `__init__`."""

import dataclasses
import functools
import inspect
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, jaxtyped

from tests.beside_equinox import error_of
from tests.module.programs.registry import program


def check(function):
    """As a type checker: arguments against the annotations of arrays."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def checked(*args, **kwargs):
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            annotation = signature.parameters[name].annotation
            if hasattr(annotation, "dtypes") and not isinstance(value, annotation):
                raise TypeError(f"{name} is not of type {annotation}")
        return function(*args, **kwargs)

    return checked


typed = jaxtyped(typechecker=check)


@program
def typed_classes(eqx):
    called = []

    @typed
    class Base(eqx.Module):
        x: Float[Array, " size"]

        def __check_init__(self):
            called.append(type(self).__name__)

    @typed
    class Model(Base):
        y: Float[Array, " size"]

    @typed
    @dataclasses.dataclass
    class Explicit(eqx.Module):
        x: Float[Array, "2"]
        name: str = eqx.field(static=True, default="a")

    two, three = jnp.ones(2), jnp.ones(3)
    models = Base(two), Model(two, two), Explicit(two)
    return (
        [each.x.shape for each in models],
        [error_of(Model, two, three)],
        called,
        (error_of(Explicit, three)),
    )


@program
def typed_class_takes_what_a_converter_takes(eqx):
    @typed
    class Model(eqx.Module):
        x: Float[Array, ""] = eqx.field(converter=jnp.asarray)

    class Sub(Model):
        y: int

    return Model(2.0).x.shape, Sub(2.0, 3).x.shape


@program
def typed_class_with_an_init(eqx):
    @typed
    class Model(eqx.Module):
        x: Any

        def __init__(self, x: Float[Array, "2"]):
            self.x = x

    returned = eqx.filter_jit(Model)(jnp.ones(2))
    return Model(jnp.ones(2)).x.shape, returned.x.shape, error_of(Model, jnp.ones(3))
