"""A step, once or many times in a call, compiled on the arrays of its state as a flat list.

A call that takes a state and returns one opens and builds a tree each time. In a loop nobody looks
at it: arrays go from one call to the next as they are.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, PyTree

from .._partition import Rest, find_static_difference, split
from .._pytree import combine, is_array, partition
from .._transforms import filter_jit

Leaves = list[Array]


class StateChanged(TypeError):
    """The step returned a state that differs in more than its arrays."""


class Together(NamedTuple):
    """Arrays of many batches that are on a device already: they are stacked inside of the call."""

    arrays: tuple[Array, ...]


# A run asks once. The next run with the same step finds what is compiled.
@functools.lru_cache(maxsize=8)
def single_step(
    step: Rest, rest: Rest
) -> Callable[[Leaves, Leaves, Any], tuple[Leaves, Any, Bool[Array, ""]]]:
    """A step on the arrays of a state.

    **Arguments:**

    - `step`, `rest`: what step and state are beside their arrays.

    **Returns:** from the arrays of the step, those of the state, which are donated, and a batch to
    the next arrays, the loss, and whether the state is halted. It raises `StateChanged` where more
    than arrays changes.
    """

    def single(own: Leaves, leaves: Leaves, batch: Any) -> tuple[Leaves, Any, Array]:
        state = rest.merge(leaves)
        new, loss, *_ = step.merge(own)(state, batch)
        # A buffer of its own: the next call takes those of the state.
        return _leaves_of(new, state, rest), loss, jnp.copy(new.is_halted)

    return filter_jit(single, donate=("leaves",))


@functools.lru_cache(maxsize=8)
def many_steps(
    step: Rest, rest: Rest, most: int
) -> Callable[
    [Leaves, Leaves, Sequence[Any]],
    tuple[Leaves, Float[Array, " most"], Bool[Array, " most"]],
]:
    """A step on each of at most `most` batches that are alike, in one call.

    **Arguments:**

    - `step`, `rest`: what step and state are beside their arrays.

    **Returns:** from the arrays of the step, those of the state, which are donated, and batches to
    the next arrays, the losses, and whether the state was halted after each; what stands there
    beyond the number of batches means nothing. It raises `StateChanged` where more than arrays
    changes, and `TypeError` for a loss that is no real number.
    """

    def many(
        own: Leaves, leaves: Leaves, batches: PyTree, count: Int32[Array, ""] | np.int32
    ) -> tuple[Leaves, Array, Array]:
        batches = jtu.tree_map(_stacked_inside, batches, is_leaf=_is_together)
        arrays, others = partition(batches, is_array)

        def goes_on(carry: Any) -> Array:
            index, _, _, were_halted = carry
            # Further steps would leave a halted state as it is.
            return (index < count) & ~were_halted[index - 1]

        def body(carry: Any) -> Any:
            index, leaves, losses, were_halted = carry
            batch = jtu.tree_map(
                lambda each: lax.dynamic_index_in_dim(each, index, 0, False), arrays
            )
            state = rest.merge(leaves)
            new, loss, *_ = step.merge(own)(state, combine(batch, others))
            losses = losses.at[index].set(_as_loss(loss, losses.dtype))
            were_halted = were_halted.at[index].set(new.is_halted)
            return index + 1, _leaves_of(new, state, rest), losses, were_halted

        # Wide enough for a loss of any precision.
        losses = jnp.zeros(most, jax.dtypes.canonicalize_dtype(float))
        # The count is an argument, so that one program serves for the last batches too, and for
        # steps after which something else is due.
        carry = jnp.zeros_like(count), leaves, losses, jnp.zeros(most, bool)
        _, leaves, losses, were_halted = lax.while_loop(goes_on, body, carry)
        return leaves, losses, were_halted

    compiled = filter_jit(many, donate=("leaves",))

    def call(own: Leaves, leaves: Leaves, batches: Sequence[Any]) -> tuple[Leaves, Array, Array]:
        return compiled(own, leaves, stacked(batches, most), np.int32(len(batches)))

    return call


def _leaves_of(state: Any, before: Any, rest: Rest) -> Leaves:
    leaves, own = split(state)
    if own != rest:
        difference = find_static_difference(before, state)
        explained = "" if difference is None else difference.explain("the state", "the next one")
        raise StateChanged(
            f"Many steps in one call can change the arrays of a state only: {explained}. Give "
            "`steps_per_call=1`."
        )
    return leaves


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


def _as_loss(loss: Any, dtype: Any) -> Array:
    loss = jnp.asarray(loss)
    if loss.shape != () or not jnp.issubdtype(loss.dtype, jnp.floating):
        raise TypeError(
            "Many steps in one call expect the step to return a real loss of shape (); got "
            f"{loss.dtype} of shape {loss.shape}."
        )
    return loss.astype(dtype)
