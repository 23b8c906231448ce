"""Compiles one or many steps per call as functions of the arrays of a state.

A call with a `TrainState` would flatten the state and build a new state each time. Between two
calls nobody needs the `TrainState`, so its arrays are passed from one call to the next as a list.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jaxtyping import Array, Bool, Int32, PyTree

from .. import (
    combine,
    filter_jit,
    is_array,
    is_array_like,
    partition,
    tree_pformat,
)
from .._dtypes import is_key
from ..extend import (
    Structure,
    are_concrete_arrays,
    find_difference,
    find_static_difference,
    flatten,
    same_shape_and_dtype,
)
from ._batch_iterator import Stack, stack_device_arrays
from ._guards import was_refused
from ._state import TrainState

# --- A state as a list of plain arrays and a hashable structure ---


Leaves = list[Array]
Aux = dict[str, Array]
"""The numbers in the auxiliary output of a loss, by name."""


class StateStructure(NamedTuple):
    """The structure of a state. States of equal structure share a compiled program.

    - `structure`: the state without its arrays.
    - `impls`: for each array, the implementation of the PRNG key, or `None` if it is not a key.
      Keys are passed as arrays of bits. This is faster, because JAX builds a Python object for each
      array of keys that a call returns.
    """

    structure: Structure
    impls: tuple[Any, ...]

    def merge(self, leaves: Leaves) -> Any:
        """Builds the state from its arrays."""
        arrays = tuple(
            leaf if impl is None else jr.wrap_key_data(leaf, impl=impl)
            for leaf, impl in zip(leaves, self.impls, strict=True)
        )
        return self.structure.rebuilder(cache=are_concrete_arrays(arrays))(arrays)


def flatten_state(state: Any) -> tuple[Leaves, StateStructure]:
    """The arrays of a state, where keys are arrays of bits, and the structure of the state."""
    leaves, structure = flatten(state, by_identity=True)
    impls = tuple(jr.key_impl(leaf) if is_key(leaf) else None for leaf in leaves)
    plain = [
        leaf if impl is None else jr.key_data(leaf)
        for leaf, impl in zip(leaves, impls, strict=True)
    ]
    return plain, StateStructure(structure, impls)


class StateChanged(TypeError):
    """Raised if a step returns a state that differs from the old state in more than its arrays."""


# Cached, so that the next run with the same step reuses the compiled program.
@functools.lru_cache(maxsize=8)
def single_step(
    step: Structure, state_structure: StateStructure, donates: bool
) -> Callable[[Leaves, Leaves, Any], tuple[Leaves, Any, Bool[Array, ""], Aux]]:
    """Compiles a step as a function of the arrays of a state.

    **Arguments:**

    - `step`, `state_structure`: structures of the step and of the state.
    - `donates`: whether the arrays of the state are donated.

    **Returns:** a function of the step's arrays, the state's arrays, and a batch. It returns four
    values: the new arrays of the state, the loss, a boolean that is true if the update was refused
    or skipped, and the aux. It raises `StateChanged` if the structure of the state changes.
    """

    def single(own: Leaves, leaves: Leaves, batch: Any) -> tuple[Leaves, Any, Array, Aux]:
        state = state_structure.merge(leaves)
        run = step.rebuilder(cache=False)(tuple(own))
        # With `jax_debug_nans`, JAX runs the program again, operation by operation, to find a NaN.
        # The second run needs the arguments, so the first must not donate them.
        new, loss, aux = read_returned((run if donates else run.__wrapped__)(state, batch))
        return _leaves_of(new, state, state_structure), loss, was_refused(new), aux

    return filter_jit(single, donate=("leaves",) if donates else ())


@functools.lru_cache(maxsize=8)
def many_steps(
    step: Structure, state_structure: StateStructure, donates: bool, steps_per_call: int
) -> Callable[[Leaves, Leaves, Stack], tuple[Leaves, Array, Array, Aux]]:
    """Compiles a loop over up to `steps_per_call` compatible batches, with one step for each batch.

    **Arguments:**

    - `step`, `state_structure`, `donates`: see `single_step`.

    **Returns:** a function of the step's arrays, the state's arrays, and batches. It returns four
    values: the new arrays of the state, the losses, booleans that are true if an update was refused
    or skipped, and the aux. The last three are arrays of shape `(steps_per_call,)`; ignore entries
    beyond the number of batches. The function raises `StateChanged` if the structure of the state
    changes, and `TypeError` if a shape or dtype of the state changes.
    """

    def many(
        own: Leaves, leaves: Leaves, batches: PyTree, count: Int32[Array, ""] | np.int32
    ) -> tuple[Leaves, Array, Array, Aux]:
        arrays, others = partition(stack_device_arrays(batches), is_array)

        def one(leaves: Leaves, index: Array) -> tuple[Leaves, Array, tuple[Array, Array, Aux]]:
            batch = jtu.tree_map(
                lambda each: lax.dynamic_index_in_dim(each, index, 0, False), arrays
            )
            state = state_structure.merge(leaves)
            run = step.rebuilder(cache=False)(tuple(own))
            new, loss, aux = read_returned(run(state, combine(batch, others)))
            leaves = _leaves_of(new, state, state_structure)
            if difference := find_difference(state, new, same_shape_and_dtype):
                explained = difference.explain("state", "the next state")
                raise TypeError(
                    "With steps_per_call above 1, a step must keep the shapes and dtypes of "
                    f"arrays: {explained}. Pass `steps_per_call=1`."
                )
            # With `check_finite="skip"`, a refused step still increments `step`, and the loop must
            # continue.
            is_halted = new.is_halted & (new.step == state.step)
            return leaves, is_halted, (jnp.asarray(loss), was_refused(new), aux)

        # The trace is needed to know the structure of the aux. The loop runs the traced program, so
        # that the step is traced only once.
        first = jnp.zeros_like(count)
        traced, shapes = jax.make_jaxpr(one, return_shape=True)(leaves, first)
        run_one, treedef = jaxpr_as_fun(traced), jtu.tree_structure(shapes)

        def is_unfinished(carry: Any) -> Array:
            index, _, is_halted, _ = carry
            # Stop at a halted state, because further steps would not change it.
            return (index < count) & ~is_halted

        def body(carry: Any) -> Any:
            index, leaves, _, results = carry
            leaves, is_halted, found = treedef.unflatten(run_one(*leaves, index))
            results = jtu.tree_map(
                lambda row, each: row.at[index].set(jnp.asarray(each).astype(row.dtype)),
                results,
                found,
            )
            return index + 1, leaves, is_halted, results

        # The widest float dtype can hold losses of any dtype.
        wide = jax.dtypes.canonicalize_dtype(float)
        rows = jtu.tree_map(
            lambda each: jnp.zeros(steps_per_call, bool if each.dtype == bool else wide), shapes[2]
        )
        # The count is an argument. So the same program can make fewer steps, when the batches end
        # or a log is due.
        carry = first, leaves, jnp.zeros((), bool), rows
        _, leaves, _, (losses, were_refused, aux) = lax.while_loop(is_unfinished, body, carry)
        return leaves, losses, were_refused, aux

    compiled = filter_jit(many, donate=("leaves",) if donates else ())

    def call(own: Leaves, leaves: Leaves, batches: Stack) -> tuple[Leaves, Array, Array, Aux]:
        return compiled(own, leaves, batches.whole(), np.int32(batches.count))

    return call


def read_returned(returned: Any) -> tuple[TrainState, Any, Aux]:
    """Reads the output of a step.

    **Returns:** the state, the loss, and the aux. If the step returns a dict after the loss, the
    aux has copies of the real numbers in this dict. Otherwise the aux is empty.

    **Raises:** `TypeError` if the output does not start with a state and a loss.
    """
    match returned:
        case [TrainState() as state, loss, *others]:
            _check_loss(loss)
            aux = others[0] if others and isinstance(others[0], Mapping) else {}
            # Copy the numbers, because an entry may be an array of the state, and the next step
            # overwrites the state.
            numbers = {
                name: value
                for name, value in aux.items()
                if is_array_like(value) and jnp.shape(value) == () and not is_key(value)
                if not jnp.iscomplexobj(value)
            }
            return state, loss, jtu.tree_map(jnp.copy, numbers)
    raise TypeError(
        "fit expected the step to return `(state, loss)`, with the next TrainState, like a step of "
        f"make_step; got {tree_pformat(returned)}."
    )


def _check_loss(loss: Any) -> None:
    if isinstance(loss, int | float):
        return
    if not is_array(loss):
        raise TypeError(f"fit expected the step to return a number as loss, got {loss!r}.")
    is_real = any(jnp.issubdtype(loss.dtype, kind) for kind in (jnp.floating, jnp.integer))
    if loss.shape != () or not is_real:
        raise TypeError(
            "fit expected the step to return a real loss of shape (), got "
            f"{loss.dtype} of shape {loss.shape}."
        )


def _leaves_of(state: Any, before: Any, state_structure: StateStructure) -> Leaves:
    leaves, own = flatten_state(state)
    if own != state_structure:
        difference = find_static_difference(before, state)
        explained = "" if difference is None else difference.explain("the state", "the next one")
        raise StateChanged(
            "With steps_per_call above 1, a step may change only the arrays of a state: "
            f"{explained}. Pass `steps_per_call=1`."
        )
    return leaves
