"""Gradients by a mode of `eqxlike.ad` that the caller selects."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array

from ..._partition import Rest
from ..._pytree import describe_node, is_array_like
from ._tangents import path_of, varying_like

Arrays = list[Array]
OfArrays = Callable[[Arrays], tuple[Any, Arrays]]


class DifferentiationMode(Protocol):
    """Protocol of a differentiation mode, with the only method that `filter_grad` calls.

    The base class of modes is `eqxlike.ad.Mode`.
    """

    def value_and_grad(
        self, function: OfArrays, arrays: Arrays, /
    ) -> tuple[tuple[Any, Arrays], Arrays]: ...


class CannotDifferentiate(ValueError):
    """Raised by a mode that cannot differentiate with respect to one of the arrays.

    `place` is the index of the array. In the message, `why` follows the index. A caller that knows
    the path of the array raises `at(path)` instead; there, `why` follows the path.
    """

    def __init__(self, place: int, why: str):
        super().__init__(f"Differentiated array {place} {why}")
        self.place = place
        self.why = why

    def at(self, path: str) -> ValueError:
        """The same error, with the path of the array instead of its index."""
        return ValueError(f"The array at {path} {self.why}")


def check_mode(mode: Any, transform: str) -> None:
    """Raises `TypeError` unless `mode` is a mode."""
    if isinstance(mode, type) or not callable(getattr(mode, "value_and_grad", None)):
        hint = f": call it, `{mode.__name__}()`" if isinstance(mode, type) else ""
        raise TypeError(
            f"`{transform}` expects a mode of eqxlike.ad as `mode`, such as `ad.Reverse()`; "
            f"got {mode!r}{hint}."
        )


def value_and_grad_by(
    mode: DifferentiationMode,
    function: OfArrays,
    arrays: Arrays,
    rest: Rest,
    options: Mapping[str, Any],
    name: str,
) -> tuple[tuple[Any, Arrays], Arrays]:
    """Computes `jax.value_and_grad(function, has_aux=True, **options)(arrays)` by `mode`.

    **Arguments:**

    - `rest`: the first argument of the user's function, without `arrays`. Error messages show the
      paths of the arrays in this argument.
    - `name`: the name of the function in error messages.
    """
    is_holomorphic = bool(options.get("holomorphic", False))
    for place, array in enumerate(arrays if is_holomorphic else ()):
        if not jnp.iscomplexobj(array):
            raise TypeError(
                f"With `holomorphic=True`, every differentiated array of {name} must be complex; "
                f"{path_of_taken(rest, place)} is {describe_node(array)}."
            )

    def of_real_value(arrays: Arrays) -> tuple[Array, Arrays]:
        value, aux = function(arrays)
        value = checked_value(value, is_holomorphic, name)
        # In JAX's convention, the derivative of a holomorphic function equals the gradient
        # of its real part.
        return jnp.real(value), [value, *aux]

    arrays = list(map(jnp.asarray, arrays))
    if arrays:
        try:
            found = mode.value_and_grad(of_real_value, arrays)
        except CannotDifferentiate as error:
            raise error.at(path_of_taken(rest, error.place)) from None
        try:
            (_, (value, *aux)), gradients = found
        except (TypeError, ValueError):
            raise TypeError(
                f"`value_and_grad` of {mode!r} must return `((value, aux), gradient)`, where `aux` "
                f"and `gradient` are lists of arrays; it returned {describe_node(found)}."
            ) from None
        if len(gradients) != len(arrays):
            raise ValueError(
                f"{mode!r} differentiated {name} with respect to {len(arrays)} arrays, but "
                f"returned {len(gradients)} gradients: `value_and_grad` must return one each."
            )
        gradients = list(map(varying_like, gradients, arrays))
    else:
        (_, (value, *aux)), gradients = of_real_value([]), []
    return (value, aux), gradients


def path_of_taken(rest: Rest, place: int) -> str:
    """The path of a differentiated array. `place` is its index among the differentiated arrays."""
    places = rest.take(range(rest.treedef.num_leaves))
    return f"args[0]{jtu.keystr(path_of(places[place], rest.treedef))}"


def checked_value(value: Any, is_holomorphic: bool, name: str) -> Array:
    """Returns `value` as an array. Raises `TypeError` unless `value` is a differentiable scalar."""
    if not is_array_like(value):
        what, hint = describe_node(value), "return only the scalar, or pass `has_aux=True`"
    else:
        shape, dtype = jnp.shape(value), jnp.result_type(value)
        what = f"an array of shape {shape} and dtype {dtype}"
        is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
        if shape:
            hint = "sum or average it, or take `ad.jacobian` of the function"
        elif not jnp.issubdtype(dtype, jnp.inexact):
            hint = "return a floating-point number: integers and booleans have no derivative"
        elif is_complex and not is_holomorphic:
            hint = "take its real part or modulus, or pass `holomorphic=True`"
        elif is_holomorphic and not is_complex:
            hint = "leave out `holomorphic=True`"
        else:
            return jnp.asarray(value)
    wanted = "complex" if is_holomorphic else "real floating-point"
    raise TypeError(
        "Gradient only defined for scalar-output functions: the value of "
        f"{name} must be a {wanted} scalar, but is {what}. To fix this, {hint}."
    )
