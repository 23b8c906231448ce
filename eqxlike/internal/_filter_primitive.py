"""Primitives of any trees: what JAX binds are the arrays, and the rest is a parameter.

A primitive returns arrays alone. What else its rule returned, and the structure of it all, is noted
in the parameter `output`, which `filter_primitive_bind` makes and reads again.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import AbstractValue
from jax.extend.core import Primitive
from jax.interpreters import ad
from jaxtyping import PyTree

from .._partition import UNTRACED, Rest, split
from .._pytree import is_array


class _Output:
    """What a primitive returned beside arrays. Compared by identity, as parameters must be."""

    __slots__ = ("rest",)

    def __init__(self) -> None:
        self.rest: Rest = UNTRACED

    def take(self, tree: PyTree) -> list[Any]:
        """The arrays of what a rule returned, or what stands for them where shapes are traced."""
        arrays, self.rest = split(tree, _is_array_or_aval)
        return arrays


def _as_array(value: Any) -> Any:
    """JAX hands numbers on as they are, of Python's types or its own derived from them."""
    return jnp.asarray(value) if isinstance(value, bool | int | float | complex) else value


def _is_array_or_aval(leaf: Any) -> bool:
    return is_array(leaf) or isinstance(leaf, AbstractValue)


def filter_primitive_bind(prim: Primitive, *args: PyTree) -> PyTree:
    """Calls a primitive whose rules are wrapped in the functions beside this one.

    **Arguments:**

    - `prim`: a primitive with `multiple_results`.
    - `*args`: any pytrees. JAX sees the arrays; Python numbers are static, as all else.

    **Returns:** what the rules of the primitive return, which may be any pytree.
    """
    arrays, inputs = split(args)
    output = _Output()
    arrays = prim.bind(*arrays, inputs=inputs, output=output)
    return output.rest.merge(arrays)


def filter_primitive_def(rule: Callable[..., PyTree]) -> Callable[..., list[Any]]:
    """For `def_impl` and `def_abstract_eval`: a function of any trees that returns any tree.

    Where shapes are traced it gets, and returns, a `jax.core.ShapedArray` for each array.
    """

    @functools.wraps(rule)
    def of_arrays(*arrays: Any, inputs: Rest, output: _Output) -> list[Any]:
        return output.take(rule(*inputs.merge(map(_as_array, arrays))))

    return of_arrays


def filter_primitive_jvp(rule: Callable[[Any, Any], tuple[PyTree, PyTree]]) -> Callable[..., Any]:
    """For the forward-mode rule: from primals and tangents to those of the output.

    Tangents have the structure of the primals, with `None` for a zero and beside what is no array;
    so have those that the rule returns.
    """

    @functools.wraps(rule)
    def of_arrays(primals: Any, tangents: Any, *, inputs: Rest, output: _Output) -> Any:
        along = [None if _is_zero(tangent) else tangent for tangent in tangents]
        value, tangent = rule(inputs.merge(map(_as_array, primals)), inputs.merge_into(None, along))
        values = output.take(value)
        return values, list(
            map(_filled_tangent, values, _beside(output.rest, tangent, "tangent", "output"))
        )

    return of_arrays


def filter_primitive_transpose(
    rule: Any = None, *, materialise_zeros: bool = False
) -> Callable[..., Any]:
    """For the transpose: from inputs and cotangents of the output to those of the inputs.

    The linear inputs are `jax.interpreters.ad.UndefinedPrimal`. Cotangents have the structure of
    the output, with `None` for a zero and beside what is no array; those that the rule returns have
    that of the inputs, with `None` beside what is not linear.

    **Arguments:**

    - `rule`: `rule(inputs, cotangents)`. Without it this is a decorator.
    - `materialise_zeros`: whether the rule gets arrays of zeros in place of `None`.
    """
    if rule is None:
        return functools.partial(filter_primitive_transpose, materialise_zeros=materialise_zeros)

    @functools.wraps(rule)
    def of_arrays(cotangents: Any, *arrays: Any, inputs: Rest, output: _Output) -> list[Any]:
        if materialise_zeros:
            cotangents = map(ad.instantiate_zeros, cotangents)
        along = [None if type(each) is ad.Zero else each for each in cotangents]
        found = rule(inputs.merge(map(_as_array, arrays)), output.rest.merge_into(None, along))
        return [
            each if ad.is_undefined_primal(array) else None
            for each, array in zip(
                _beside(inputs, found, "cotangents", "inputs"), arrays, strict=True
            )
        ]

    return of_arrays


def filter_primitive_batching(
    rule: Callable[[Any, Any], tuple[PyTree, PyTree]],
) -> Callable[..., Any]:
    """For the batching rule: from inputs and their batch axes to the output and its batch axes.

    Axes have the structure of the inputs and of the output, with `None` for what is not batched and
    beside what is no array.
    """

    @functools.wraps(rule)
    def of_arrays(arrays: Any, axes: Any, *, inputs: Rest, output: _Output) -> Any:
        value, out_axes = rule(inputs.merge(map(_as_array, arrays)), inputs.merge_into(None, axes))
        values = output.take(value)
        return values, _beside(output.rest, out_axes, "batch axes", "output")

    return of_arrays


def _beside(rest: Rest, tree: PyTree, what: str, of: str) -> list[Any]:
    """The leaves of `tree` that stand beside arrays, of which `None` is one."""
    try:
        return rest.take(rest.treedef.flatten_up_to(tree))
    except ValueError as error:
        raise ValueError(
            f"The rule of a primitive returned {what} of another structure than the {of}: {error}"
        ) from None


def _is_zero(tangent: Any) -> bool:
    return type(tangent) is ad.Zero or getattr(tangent, "dtype", None) == jax.dtypes.float0


def _filled_tangent(value: Any, tangent: Any) -> Any:
    return ad.Zero(jax.typeof(value).to_tangent_aval()) if tangent is None else tangent
