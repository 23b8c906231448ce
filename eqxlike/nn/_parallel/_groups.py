"""Branches that are equal but for the values of their arrays, stored and called as one."""

from collections.abc import Callable
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PRNGKeyArray

from ..._partition import find_static_difference
from ..._pytree import is_array, is_reference, same_shape_and_dtype
from ..._transforms import filter_vmap
from .._common import as_data, key_for, stack_layers
from .._linear import FusedLinear
from .._stateful import has_place_in_a_state, is_stateful, with_array_states

Places = tuple[int, ...]
"""The indices of the branches of a group."""


class FusedBranches(FusedLinear):
    """Linear branches of different sizes, which `nn.fuse` made one product."""


def group_branches(
    branches: tuple[Callable, ...],
) -> tuple[tuple[Any, ...], tuple[Places, ...]]:
    """The groups of equal branches, each stacked if it has several; and their places."""
    found: list[dict[int, Any]] = []
    for place, branch in enumerate(branches):
        for members in found:
            first = next(iter(members.values()))
            candidate = with_array_states(branch, first)
            if _can_stack(first, candidate):
                members[place] = candidate
                break
        else:
            found.append({place: with_array_states(branch)})
    groups = [
        stack_layers([*members.values()]) if len(members) > 1 else branches[min(members)]
        for members in found
    ]
    return tuple(groups), tuple(map(tuple, found))


def _can_stack(first: Any, second: Any) -> bool:
    if find_static_difference(first, second):
        return False
    # The values that such a branch finds in the state are not stacked.
    if has_place_in_a_state(first):
        return False
    leaves = zip(jtu.tree_leaves(first), jtu.tree_leaves(second), strict=True)
    return all(_can_stack_leaves(*each) for each in leaves)


def _can_stack_leaves(first: Any, second: Any) -> bool:
    if not is_array(first):
        return not is_reference(first)
    return bool(same_shape_and_dtype(first, second)) and _is_weak(first) == _is_weak(second)


def _is_weak(array: Any) -> bool:
    return getattr(jax.typeof(array), "weak_type", False)


def call_group(
    group: Any, places: Places, args: tuple[Any, ...], state: Any, keys: PRNGKeyArray | None
) -> tuple[Any, Any]:
    """The outputs of the branches of a group, stacked if they are several; and the state. Those of
    `FusedBranches` are a tuple.

    **Arguments:**

    - `keys`: one for each branch of the model, or `None`.
    """
    has_state = is_stateful(group)
    data, key_of = as_data(keys)

    def call(branch: Any, state: Any, data: Any) -> tuple[Any, Any]:
        if has_state:
            return branch(*args, state=state, key=key_of(data))
        return branch(*args, **key_for(branch, key_of(data))), state

    if isinstance(group, FusedBranches):
        return group(*args), state
    if len(places) == 1:
        return call(group, state, None if data is None else data[places[0]])
    own_state = state.substate(group) if has_state else None
    own_data = None if data is None else data[np.array(places)]
    output, new_state = filter_vmap(call, axis_size=len(places))(group, own_state, own_data)
    return output, state.update(new_state) if has_state else state
