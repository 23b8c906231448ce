"""A step, once or many times in a call, compiled on the arrays of its state as a flat list.

A call that takes a state and returns one opens and builds a tree each time. In a loop nobody looks
at it: arrays go from one call to the next as they are.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, PyTree

from ..._dtypes import is_key
from ..._partition import Structure, are_concrete_arrays, find_static_difference, flatten
from ..._pytree import (
    combine,
    find_difference,
    is_array,
    partition,
    same_shape_and_dtype,
    tree_pformat,
)
from ..._transforms import filter_jit
from .._guards import was_refused
from .._state import TrainState
from ._stack import Stack, Together

# --- A state as a list of plain arrays, and the form from which it is built again ---


Leaves = list[Array]


class Form(NamedTuple):
    """What a state is beside its numbers.

    Two are equal if a program for one serves for the other.

    - `structure`: the state without its arrays.
    - `impls`: for each array `None`, or for keys the implementation of their bits. JAX builds an
      object in Python for each array of keys that a call returns, and none for their bits.
    """

    structure: Structure
    impls: tuple[Any, ...]

    def merge(self, leaves: Leaves) -> Any:
        """The state with these arrays."""
        arrays = tuple(
            leaf if impl is None else jr.wrap_key_data(leaf, impl=impl)
            for leaf, impl in zip(leaves, self.impls, strict=True)
        )
        return self.structure.rebuilder(cache=are_concrete_arrays(arrays))(arrays)


def take_apart(state: Any) -> tuple[Leaves, Form]:
    """The arrays of a state, keys as their bits, and its form."""
    leaves, structure = flatten(state, by_identity=True)
    impls = tuple(jr.key_impl(leaf) if is_key(leaf) else None for leaf in leaves)
    plain = [
        leaf if impl is None else jr.key_data(leaf)
        for leaf, impl in zip(leaves, impls, strict=True)
    ]
    return plain, Form(structure, impls)


class StateChanged(TypeError):
    """The step returned a state that differs in more than its arrays."""


# A run asks once. The next run with the same step finds what is compiled.
@functools.lru_cache(maxsize=8)
def single_step(
    step: Structure, form: Form, donates: bool
) -> Callable[[Leaves, Leaves, Any], tuple[Leaves, Any, Bool[Array, ""]]]:
    """A step on the arrays of a state.

    **Arguments:**

    - `step`, `form`: what step and state are beside their arrays.
    - `donates`: whether the arrays of the state are donated.

    **Returns:** a function of the arrays of the step, the arrays of the state, and a batch. It
    returns the next arrays, the loss, and whether the update was refused or skipped. It raises
    `StateChanged` if more than arrays changes.
    """

    def single(own: Leaves, leaves: Leaves, batch: Any) -> tuple[Leaves, Any, Array]:
        state = form.merge(leaves)
        run = step.rebuilder(cache=False)(tuple(own))
        # JAX may run the program again, operation by operation: the step must not donate then.
        new, loss = state_and_loss((run if donates else run.__wrapped__)(state, batch))
        return _leaves_of(new, state, form), loss, was_refused(new)

    return filter_jit(single, donate=("leaves",) if donates else ())


@functools.lru_cache(maxsize=8)
def many_steps(
    step: Structure, form: Form, donates: bool, steps_per_call: int
) -> Callable[
    [Leaves, Leaves, Stack],
    tuple[Leaves, Float[Array, " steps_per_call"], Bool[Array, " steps_per_call"]],
]:
    """A step on each of up to `steps_per_call` batches that are alike, in one call.

    **Arguments:**

    - `step`, `form`, `donates`: see `single_step`.

    **Returns:** a function of the arrays of the step, the arrays of the state, and batches. It
    returns the next arrays, the losses, and whether each update was refused or skipped; entries
    beyond the number of batches have no meaning. It raises `StateChanged` if more than arrays
    changes, and `TypeError` if their shapes or dtypes change.
    """

    def many(
        own: Leaves, leaves: Leaves, batches: PyTree, count: Int32[Array, ""] | np.int32
    ) -> tuple[Leaves, Array, Array]:
        batches = jtu.tree_map(_stacked_inside, batches, is_leaf=_is_together)
        arrays, others = partition(batches, is_array)

        def goes_on(carry: Any) -> Array:
            index, *_, is_halted = carry
            # Further steps would leave a halted state as it is.
            return (index < count) & ~is_halted

        def body(carry: Any) -> Any:
            index, leaves, losses, were_refused, _ = carry
            batch = jtu.tree_map(
                lambda each: lax.dynamic_index_in_dim(each, index, 0, False), arrays
            )
            state = form.merge(leaves)
            run = step.rebuilder(cache=False)(tuple(own))
            new, loss = state_and_loss(run(state, combine(batch, others)))
            leaves = _leaves_of(new, state, form)
            _check_arrays(state, new)
            losses = losses.at[index].set(jnp.asarray(loss).astype(losses.dtype))
            were_refused = were_refused.at[index].set(was_refused(new))
            # A skipped step still increments `step`.
            is_halted = new.is_halted & (new.step == state.step)
            return index + 1, leaves, losses, were_refused, is_halted

        # Wide enough for a loss of any precision.
        losses = jnp.zeros(steps_per_call, jax.dtypes.canonicalize_dtype(float))
        # The count is an argument, so that one program serves for the last batches too, and for
        # steps after which something else is due.
        were_refused, is_halted = jnp.zeros(steps_per_call, bool), jnp.zeros((), bool)
        carry = jnp.zeros_like(count), leaves, losses, were_refused, is_halted
        _, leaves, losses, were_refused, _ = lax.while_loop(goes_on, body, carry)
        return leaves, losses, were_refused

    compiled = filter_jit(many, donate=("leaves",) if donates else ())

    def call(own: Leaves, leaves: Leaves, batches: Stack) -> tuple[Leaves, Array, Array]:
        return compiled(own, leaves, batches.whole(), np.int32(batches.count))

    return call


def state_and_loss(returned: Any) -> tuple[TrainState, Any]:
    """What a step returned, without what comes beside.

    **Raises:** `TypeError` for something else.
    """
    match returned:
        case [TrainState() as state, loss, *_]:
            _check_loss(loss)
            return state, loss
    raise TypeError(
        "fit expected the step to return the next TrainState and the loss, `(state, loss)`, as one "
        f"of make_step does; got {tree_pformat(returned)}."
    )


def _check_loss(loss: Any) -> None:
    if isinstance(loss, int | float):
        return
    if not is_array(loss):
        raise TypeError(f"fit expected the step to return a number as loss; got {loss!r}.")
    is_real = any(jnp.issubdtype(loss.dtype, kind) for kind in (jnp.floating, jnp.integer))
    if loss.shape != () or not is_real:
        raise TypeError(
            "fit expected the step to return a real loss of shape (); got "
            f"{loss.dtype} of shape {loss.shape}."
        )


def _check_arrays(state: Any, new: Any) -> None:
    """Raises `TypeError` for arrays of other shapes or dtypes than they had before."""
    if difference := find_difference(state, new, same_shape_and_dtype):
        raise TypeError(
            "Many steps in one call expect arrays to keep their shapes and dtypes: "
            f"{difference.explain('state', 'the next state')}. Give `steps_per_call=1`."
        )


def _leaves_of(state: Any, before: Any, form: Form) -> Leaves:
    leaves, own = take_apart(state)
    if own != form:
        difference = find_static_difference(before, state)
        explained = "" if difference is None else difference.explain("the state", "the next one")
        raise StateChanged(
            f"Many steps in one call can change the arrays of a state only: {explained}. Give "
            "`steps_per_call=1`."
        )
    return leaves


def _is_together(node: Any) -> bool:
    return isinstance(node, Together)


def _stacked_inside(node: Any) -> Any:
    return jnp.stack(node.arrays) if _is_together(node) else node
