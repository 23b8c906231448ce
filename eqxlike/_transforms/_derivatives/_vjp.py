"""Reverse-mode derivatives of functions of any arguments."""

from collections.abc import Callable
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..._module import Module, field
from ..._partition import UNTRACED, Rest, split
from ..._pytree import is_array_or_traced_reference, is_inexact_array
from .._signatures import Aux, Output, Params
from .._wrapping import check_callable, value_and_aux
from ._tangents import tangents_of


class Pullback(Module):
    """The function that `filter_vjp` returns, from a cotangent of the output to gradients.

    It is a pytree, whose leaves are what the forward pass left for the backward pass.
    """

    _vjp: Callable[[list[Any]], tuple[list[Any]]]
    _primals: Rest = field(static=True)
    _output: Rest = field(static=True)
    _types: tuple[jax.ShapeDtypeStruct, ...] = field(static=True)

    def __call__(self, cotangent: PyTree, /) -> tuple[PyTree, ...]:
        differentiable = (each if _is_inexact(each) else None for each in self._types)
        types = self._output.leaves_into(None, differentiable)
        found = tangents_of(types, self._output.treedef, cotangent, "cotangent", "output")
        cotangents = [
            _zero(struct) if each is None else each
            for each, struct in zip(self._output.take(found), self._types, strict=True)
        ]
        (gradients,) = self._vjp(cotangents)
        return self._primals.merge_into(None, gradients)


def _is_inexact(struct: jax.ShapeDtypeStruct) -> bool:
    return jnp.issubdtype(struct.dtype, jnp.inexact)


def _zero(struct: jax.ShapeDtypeStruct) -> Any:
    """The cotangent that JAX expects where there is none."""
    if _is_inexact(struct):
        return jnp.zeros(struct.shape, struct.dtype)
    return np.zeros(struct.shape, jax.dtypes.float0)


@overload
def filter_vjp(
    fun: Callable[Params, Output], *primals: Params.args, **no_keywords: Params.kwargs
) -> tuple[Output, Pullback]: ...
@overload
def filter_vjp(
    fun: Callable[..., Output], *primals: PyTree, has_aux: Literal[False]
) -> tuple[Output, Pullback]: ...
@overload
def filter_vjp(
    fun: Callable[..., tuple[Output, Aux]], *primals: PyTree, has_aux: Literal[True]
) -> tuple[Output, Pullback, Aux]: ...
def filter_vjp(fun: Callable[..., Any], *primals: PyTree, has_aux: bool = False) -> Any:
    """The value of a function and its vector-Jacobian product, for arguments of any type.

    **Arguments:**

    - `fun`: a function of any arguments that returns any pytree.
    - `*primals`: its arguments; their floating-point and complex arrays are differentiated.
    - `has_aux`: whether `fun` returns `(value, aux)`, with `aux` any pytree that is not
      differentiated.

    **Returns:** `(value, pullback)`, or `(value, pullback, aux)`. `pullback` takes a cotangent, a
    tree with the structure of the value. Beside a floating-point or complex array it has an array
    of that shape and dtype, or `None` for a zero; beside everything else `None`. `pullback` returns
    the tuple of the gradients in the arguments, with `None` for every leaf that is not a
    floating-point or complex array. It is a pytree, and may be passed into and out of
    transformations.

    **Raises:** `TypeError` if `has_aux` is true and `fun` returns no pair. `pullback` raises,
    naming the path: `ValueError` if the structure or a shape differs; `TypeError` for another
    dtype, or a cotangent beside what is not differentiable.

    !!! example

        >>> import eqxlike as eqx, jax.numpy as jnp
        >>> def scale(x, factor, label):
        ...     return factor * x, label
        >>> value, pullback = eqx.filter_vjp(scale, jnp.array(3.0), jnp.array(2.0), "doubled")
        >>> print(*value)
        6.0 doubled
        >>> print(*pullback((jnp.array(1.0), None)))
        2.0 3.0 None
    """
    check_callable(fun, "filter_vjp")
    arrays, rest = split(primals, is_inexact_array)
    # Leaves that are no arrays cannot pass through JAX.
    value_rest: Rest = UNTRACED
    aux_rest: Rest = UNTRACED

    def of_arrays(arrays: list[Any]) -> tuple[list[Any], list[Any]]:
        nonlocal value_rest, aux_rest
        value, aux = value_and_aux(fun(*rest.merge(arrays)), has_aux, fun)
        value_arrays, value_rest = split(value, is_array_or_traced_reference)
        aux_arrays, aux_rest = split(aux, is_array_or_traced_reference)
        return value_arrays, aux_arrays

    value_arrays, vjp, aux_arrays = jax.vjp(of_arrays, arrays, has_aux=True)
    types = tuple(
        # A NumPy array may have a dtype that is none of JAX's.
        jax.ShapeDtypeStruct(each.shape, jnp.result_type(each))
        for each in value_arrays
    )
    value, pullback = value_rest.merge(value_arrays), Pullback(vjp, rest, value_rest, types)
    return (value, pullback, aux_rest.merge(aux_arrays)) if has_aux else (value, pullback)
