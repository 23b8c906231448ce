"""A step, once or many times in a call, compiled on the arrays of its state as a flat list.

A call that takes a state and returns one opens and builds a tree each time. In a loop nobody looks
at it: arrays go from one call to the next as they are.
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
from jaxtyping import Array, Bool, Float, Int32, PyTree

from ... import combine, filter_jit, is_array, is_array_like, partition, tree_pformat
from ..._dtypes import is_key
from ...extend import (
    Structure,
    are_concrete_arrays,
    find_difference,
    find_static_difference,
    flatten,
    same_shape_and_dtype,
)
from .._guards import was_refused
from .._state import TrainState
from ._stack import Stack, Together

# --- A state as a list of plain arrays, and the form from which it is built again ---


Leaves = list[Array]
Aux = dict[str, Array]
"""What a loss returns beside its value, as far as it is numbers."""


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
) -> Callable[[Leaves, Leaves, Any], tuple[Leaves, Any, Bool[Array, ""], Aux]]:
    """A step on the arrays of a state.

    **Arguments:**

    - `step`, `form`: what step and state are beside their arrays.
    - `donates`: whether the arrays of the state are donated.

    **Returns:** a function of the arrays of the step, the arrays of the state, and a batch. It
    returns the next arrays, the loss, whether the update was refused or skipped, and the aux.
    It raises `StateChanged` if more than arrays changes.
    """

    def single(own: Leaves, leaves: Leaves, batch: Any) -> tuple[Leaves, Any, Array, Aux]:
        state = form.merge(leaves)
        run = step.rebuilder(cache=False)(tuple(own))
        # JAX may run the program again, operation by operation: the step must not donate then.
        new, loss, aux = read_returned((run if donates else run.__wrapped__)(state, batch))
        return _leaves_of(new, state, form), loss, was_refused(new), aux

    return filter_jit(single, donate=("leaves",) if donates else ())


@functools.lru_cache(maxsize=8)
def many_steps(
    step: Structure, form: Form, donates: bool, steps_per_call: int
) -> Callable[
    [Leaves, Leaves, Stack],
    tuple[Leaves, Float[Array, " steps_per_call"], Bool[Array, " steps_per_call"], Aux],
]:
    """A step on each of up to `steps_per_call` batches that are alike, in one call.

    **Arguments:**

    - `step`, `form`, `donates`: see `single_step`.

    **Returns:** a function of the arrays of the step, the arrays of the state, and batches. It
    returns the next arrays, the losses, whether each update was refused or skipped, and the aux;
    entries beyond the number of batches have no meaning. It raises `StateChanged` if more than
    arrays changes, and `TypeError` if their shapes or dtypes change.
    """

    def many(
        own: Leaves, leaves: Leaves, batches: PyTree, count: Int32[Array, ""] | np.int32
    ) -> tuple[Leaves, Array, Array, Aux]:
        batches = jtu.tree_map(_stacked_inside, batches, is_leaf=_is_together)
        arrays, others = partition(batches, is_array)

        def one(leaves: Leaves, index: Array) -> tuple[Leaves, Array, tuple[Array, Array, Aux]]:
            batch = jtu.tree_map(
                lambda each: lax.dynamic_index_in_dim(each, index, 0, False), arrays
            )
            state = form.merge(leaves)
            run = step.rebuilder(cache=False)(tuple(own))
            new, loss, aux = read_returned(run(state, combine(batch, others)))
            leaves = _leaves_of(new, state, form)
            _check_arrays(state, new)
            # A skipped step still increments `step`.
            is_halted = new.is_halted & (new.step == state.step)
            return leaves, is_halted, (jnp.asarray(loss), was_refused(new), aux)

        # Only a trace shows which aux there is, and the step is to be traced once.
        first = jnp.zeros_like(count)
        traced, shapes = jax.make_jaxpr(one, return_shape=True)(leaves, first)
        run_one, treedef = jaxpr_as_fun(traced), jtu.tree_structure(shapes)

        def goes_on(carry: Any) -> Array:
            index, _, is_halted, _ = carry
            # Further steps would leave a halted state as it is.
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

        # Wide enough for a loss of any precision.
        wide = jax.dtypes.canonicalize_dtype(float)
        rows = jtu.tree_map(
            lambda each: jnp.zeros(steps_per_call, bool if each.dtype == bool else wide), shapes[2]
        )
        # The count is an argument, so that one program serves for the last batches too, and for
        # steps after which something else is due.
        carry = first, leaves, jnp.zeros((), bool), rows
        _, leaves, _, (losses, were_refused, aux) = lax.while_loop(goes_on, body, carry)
        return leaves, losses, were_refused, aux

    compiled = filter_jit(many, donate=("leaves",) if donates else ())

    def call(own: Leaves, leaves: Leaves, batches: Stack) -> tuple[Leaves, Array, Array, Aux]:
        return compiled(own, leaves, batches.whole(), np.int32(batches.count))

    return call


def read_returned(returned: Any) -> tuple[TrainState, Any, Aux]:
    """The state and the loss that a step returned, and its aux: copies of the real numbers among
    the entries of a dict that comes after the loss.

    **Raises:** `TypeError` for something else.
    """
    match returned:
        case [TrainState() as state, loss, *others]:
            _check_loss(loss)
            aux = others[0] if others and isinstance(others[0], Mapping) else {}
            # The next step may overwrite an array of the state.
            numbers = {name: value for name, value in aux.items() if _is_real(value)}
            return state, loss, jtu.tree_map(jnp.copy, numbers)
    raise TypeError(
        "fit expected the step to return the next TrainState and the loss, `(state, loss)`, as one "
        f"of make_step does; got {tree_pformat(returned)}."
    )


def _is_real(value: Any) -> bool:
    """Whether an entry of an aux is one number that can be averaged."""
    is_number = is_array_like(value) and jnp.shape(value) == () and not is_key(value)
    return is_number and not jnp.iscomplexobj(value)


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
