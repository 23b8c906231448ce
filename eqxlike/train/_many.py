"""Many steps in one call: a loop that is compiled, over batches that are stacked."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, PyTree

from .._pytree import combine, find_difference, is_array, partition
from .._transforms import filter_jit
from ._state import TrainState


class Together(NamedTuple):
    """Arrays of many batches that are on a device already: they are stacked inside of the call."""

    arrays: tuple[Array, ...]


def many_steps(
    step: Any, state: TrainState, batches: Sequence[Any], most: int
) -> tuple[TrainState, Float[Array, " most"], Bool[Array, " most"]]:
    """A step on each of at most `most` batches that are alike, in one call, which gets the state.

    **Returns:** the state, and the loss of each step and whether the state was halted after it;
    what stands there beyond the number of batches means nothing.

    **Raises:** `TypeError` for a step that returns no real number as loss, or that changes more of
    the state than its arrays.
    """
    return _many_steps(step, state, stacked(batches, most), np.int32(len(batches)), most)


def _loop(
    step: Any, state: TrainState, batches: PyTree, count: Int32[Array, ""] | np.int32, most: int
) -> tuple[TrainState, Float[Array, " most"], Bool[Array, " most"]]:
    """As many steps as `count` says.

    It is an argument, so that one program serves for the last batches too, and for steps after
    which something else is due. The loop ends early at a state that is halted: further steps would
    leave it as it is.
    """
    batches = jtu.tree_map(_stacked_inside, batches, is_leaf=_is_together)
    arrays, others = partition(batches, is_array)
    changing, fixed = partition(state, is_array)

    def goes_on(carry: Any) -> Array:
        index, changing, _, _ = carry
        return (index < count) & ~changing.is_halted

    def body(carry: Any) -> Any:
        index, changing, losses, were_halted = carry
        batch = jtu.tree_map(lambda each: lax.dynamic_index_in_dim(each, index, 0, False), arrays)
        new, loss, *_ = step(combine(changing, fixed), combine(batch, others))
        changing, new_fixed = partition(new, is_array)
        _check_fixed(fixed, new_fixed)
        losses = losses.at[index].set(_as_loss(loss, losses.dtype))
        return index + 1, changing, losses, were_halted.at[index].set(new.is_halted)

    # Wide enough for a loss of any precision.
    losses = jnp.zeros(most, jax.dtypes.canonicalize_dtype(float))
    carry = jnp.zeros_like(count), changing, losses, jnp.ones(most, bool)
    _, changing, losses, were_halted = lax.while_loop(goes_on, body, carry)
    return combine(changing, fixed), losses, were_halted


_many_steps = filter_jit(_loop, donate=("state",))


def stacked(batches: Sequence[Any], length: int) -> PyTree:
    """Batches of one form as one, whose arrays have a leading axis; the last fills it up."""

    def of_leaves(*leaves: Any) -> Any:
        first = leaves[0]
        if isinstance(first, np.ndarray):
            # Rows beyond the last batch are never read.
            array = np.empty((length, *first.shape), first.dtype)
            for row, leaf in enumerate(leaves):
                array[row] = leaf
            return array
        if isinstance(first, jax.Array):
            return Together((*leaves, *[leaves[-1]] * (length - len(leaves))))
        return first

    return jtu.tree_map(of_leaves, *batches)


def are_alike(batch: Any, other: Any) -> bool:
    """Whether two batches can be stacked: the same structure, shapes, dtypes and other leaves."""
    leaves, treedef = jtu.tree_flatten(batch)
    others, other_treedef = jtu.tree_flatten(other)
    return treedef == other_treedef and all(map(_are_alike, leaves, others))


def _are_alike(leaf: Any, other: Any) -> bool:
    if type(leaf) is not type(other):
        return False
    if isinstance(leaf, np.ndarray | jax.Array):
        return leaf.shape == other.shape and leaf.dtype == other.dtype
    return leaf is other or bool(leaf == other)


def _is_together(node: Any) -> bool:
    return isinstance(node, Together)


def _stacked_inside(node: Any) -> Any:
    return jnp.stack(node.arrays) if _is_together(node) else node


def _check_fixed(fixed: PyTree, new: PyTree) -> None:
    if difference := find_difference(fixed, new, _are_equal_leaves):
        explained = difference.explain("the state before", "the state after")
        raise TypeError(
            f"Many steps in one call can change the arrays of a state only: {explained}. Give "
            "`steps_per_call=1`."
        )


def _are_equal_leaves(leaf: Any, other: Any) -> bool | None:
    if not jtu.all_leaves([leaf, other]):
        return None
    return leaf is other or (type(leaf) is type(other) and bool(leaf == other))


def _as_loss(loss: Any, dtype: Any) -> Array:
    loss = jnp.asarray(loss)
    if loss.shape != () or not jnp.issubdtype(loss.dtype, jnp.floating):
        raise TypeError(
            "Many steps in one call expect the step to return a real loss of shape (); got "
            f"{loss.dtype} of shape {loss.shape}."
        )
    return loss.astype(dtype)
