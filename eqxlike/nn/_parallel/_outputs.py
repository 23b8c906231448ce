"""What the branches return, and how it is joined."""

import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array

from ..._pytree import describe_node, find_difference, is_array, is_array_like
from .._common import layer_at


class Outputs(NamedTuple):
    """What the branches of a group return: stacked, if they are several."""

    places: tuple[int, ...]
    value: Any

    @property
    def is_stacked(self) -> bool:
        return len(self.places) > 1

    @property
    def form(self) -> Any:
        """What one of the branches returns, with shapes in the place of arrays and numbers."""

        def form_of(leaf: Any) -> Any:
            if not is_array_like(leaf):
                return leaf
            shape = jnp.shape(leaf)[1:] if self.is_stacked else jnp.shape(leaf)
            return jax.ShapeDtypeStruct(shape, jnp.result_type(leaf))

        return jtu.tree_map(form_of, self.value)

    def each(self) -> list[Any]:
        """The outputs by themselves."""
        if not self.is_stacked:
            return [self.value]
        return [layer_at(self.value, index) for index in range(len(self.places))]

    def sum(self) -> Any:
        """The sum of the outputs."""

        def sum_of(leaf: Any) -> Any:
            if not is_array(leaf):
                return len(self.places) * leaf
            # Without a dtype, small integers are summed as larger ones.
            return jnp.sum(leaf, axis=0, dtype=leaf.dtype)

        return jtu.tree_map(sum_of, self.value) if self.is_stacked else self.value


def in_order(groups: Sequence[Outputs]) -> tuple[Any, ...]:
    """The outputs of all branches, in the order of the branches."""
    by_place = {
        place: output
        for outputs in groups
        for place, output in zip(outputs.places, outputs.each(), strict=True)
    }
    return tuple(by_place[place] for place in sorted(by_place))


def add(groups: Sequence[Outputs]) -> Any:
    """The sum of the outputs of all branches, leaf by leaf."""
    return functools.reduce(
        functools.partial(jtu.tree_map, operator.add), [outputs.sum() for outputs in groups]
    )


def concatenate(groups: Sequence[Outputs], axis: int) -> Any:
    """The outputs of all branches, one after another along `axis`, leaf by leaf."""
    if len(groups) == 1 and groups[0].is_stacked:
        return jtu.tree_map(functools.partial(_merge, axis=axis), groups[0].value)
    return jtu.tree_map(lambda *each: jnp.concatenate(each, axis), *in_order(groups))


def _merge(stacked: Array, axis: int) -> Array:
    """The arrays that are stacked along the first axis, concatenated along `axis` of each."""
    number, *shape = stacked.shape
    axis %= len(shape)
    shape[axis] *= number
    return jnp.moveaxis(stacked, 0, axis).reshape(shape)


def explain_misfit(groups: Sequence[Outputs], axis: int | None) -> str | None:
    """The end of a sentence on what cannot be concatenated along `axis`, or summed if `None`."""
    forms = [(outputs.places[0], outputs.form) for outputs in groups]
    for place, form in forms:
        for path, leaf in jtu.tree_leaves_with_path(form):
            if problem := _explain_leaf(leaf, axis):
                return (
                    f"what branches[{place}] returns: outputs[{place}]{jtu.keystr(path)} is "
                    f"{describe_node(leaf)}, {problem}"
                )
    fits = functools.partial(_fits, axis=axis)
    (first_place, first), *others = forms
    for place, form in others:
        if difference := find_difference(first, form, fits):
            return (
                f"what branches[{first_place}] and branches[{place}] return: "
                f"{difference.explain(f'outputs[{first_place}]', f'outputs[{place}]')}"
            )
    return None


def _explain_leaf(leaf: Any, axis: int | None) -> str | None:
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return "and no array"
    if axis is not None and not -leaf.ndim <= axis < leaf.ndim:
        return f"which has no axis {axis}"
    return None


def _fits(first: Any, second: Any, axis: int | None) -> bool | None:
    """For `find_difference`: whether two outputs have one shape, but for `axis`."""
    if not isinstance(first, jax.ShapeDtypeStruct) or not isinstance(second, jax.ShapeDtypeStruct):
        return None
    shapes = [list(leaf.shape) for leaf in (first, second)]
    if axis is not None and first.ndim == second.ndim:
        for shape in shapes:
            shape[axis] = 0
    return shapes[0] == shapes[1]
