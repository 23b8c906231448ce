"""Guards of a step against numbers that are not finite.

In the step `keep_if_finite` keeps the old state, and marks it as halted. `Run.read` notices that
each time it reads the losses, through `Stepper.judge`. Where `fit` may repeat steps, it runs them
with `halt_if_not_finite` instead, and `Undo` goes back to the last good state. `fit` returns
`stopped="diverged"` and the last good state, which is not halted.
"""

import dataclasses
import functools
import operator
import types
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import optax
from jaxtyping import Array, Bool, Float, PyTree

from .._dtypes import is_key
from .._pytree import filter, is_array, is_inexact_array, tree_at
from ._state import Model, TrainState, Tree


def keep_if_finite(
    old: TrainState[Model], new: TrainState[Model], loss: Float[Array, ""]
) -> TrainState[Model]:
    """`new`, or `old` marked as halted if the loss, or an array of `new`, is NaN or infinite.

    It runs inside the jitted step, so that the last good state is exact however late the host reads
    the losses. Call it in a step of your own for `fit` to find that state.

    It checks the arrays of the model that are not frozen, those of its state, and those of the
    optimiser's state. Scalars in the optimiser's state are skipped unless they belong to a
    parameter: some are infinite on purpose, such as the best loss before there was one.

    **Arguments:**

    - `old`: the state that the step got. If it is halted it is returned.
    - `new`: the state after the update.
    - `loss`: shape `()`. It is ignored if the optimiser skipped the update.
    """
    is_good = ~old.is_halted & _may_be_loss(loss, new) & all_finite(_kept(new))
    chosen = tree_where(is_good, new, old)
    return tree_at(lambda state: state.is_halted, chosen, ~is_good)


def skip_if_not_finite(
    old: TrainState[Model], new: TrainState[Model], loss: Float[Array, ""]
) -> TrainState[Model]:
    """`new`, or where `keep_if_finite` would return `old`: `old`, one step later and marked as
    halted. The next step continues from it.

    **Arguments:** as `keep_if_finite`.
    """
    is_good = _may_be_loss(loss, new) & all_finite(_kept(new))
    chosen = tree_where(is_good, new, dataclasses.replace(old, step=new.step))
    return tree_at(lambda state: state.is_halted, chosen, ~is_good)


def skip_overflow(
    old: TrainState[Model], new: TrainState[Model], gradients: PyTree, loss: Float[Array, ""]
) -> tuple[TrainState[Model], Float[Array, ""]]:
    """`new` with its loss scale adjusted; model and optimiser of `old` if gradients overflowed.

    The step counts in either case, and the next one has another key. A state without a loss scale
    is left as it is.

    **Arguments:**

    - `old`: the state that the step got.
    - `new`: the state after the update.
    - `gradients`: unscaled.
    - `loss`: shape `()`.

    **Returns:** the state, and the loss by which to judge it: NaN where no scale makes the
    gradients finite.
    """
    loss_scale = old.loss_scale
    if loss_scale is None:
        return new, loss
    is_finite = all_finite(gradients)
    model, optimiser_state, model_state = tree_where(
        is_finite,
        (new.model, new.optimiser_state, new.model_state),
        (old.model, old.optimiser_state, old.model_state),
    )
    skipped = dataclasses.replace(
        new,
        model=model,
        optimiser_state=optimiser_state,
        model_state=model_state,
        loss_scale=loss_scale.adjust(is_finite),
    )
    return skipped, jnp.where(is_finite | ~loss_scale.is_smallest, loss, jnp.nan)


def all_finite(tree: PyTree) -> Bool[Array, ""]:
    """Whether all floating-point and complex arrays of a pytree are finite.

    **Arguments:**

    - `tree`: any pytree, such as a model or its gradients.

    **Returns:** shape `()`; true if there is no such array.

    >>> import jax.numpy as jnp
    >>> bool(all_finite({"weight": jnp.ones(3), "bias": jnp.array([0.0, jnp.inf])}))
    False
    """
    # A number times 0 is 0 or NaN. A maximum will not do: on a CPU, XLA's maximum of a large array
    # skips NaN (JAX 0.10.2 to 0.12.0.1). `isfinite(leaf).all()` takes twice as long.
    sums: dict[Any, list[Array]] = {}
    for leaf in jax.tree_util.tree_leaves(tree):
        if is_inexact_array(leaf):
            sums.setdefault(leaf.dtype, []).append(jnp.sum(0 * leaf))
    is_finite = jnp.ones((), bool)
    for stacked in map(jnp.stack, sums.values()):
        is_finite = is_finite & jnp.isfinite(stacked).all()
    return is_finite


def tree_where(condition: Bool[Array, ""], tree: Tree, other: Tree) -> Tree:
    """`tree` if `condition` holds, else `other`: `jnp.where` for each of their arrays.

    **Arguments:**

    - `condition`: shape `()`.
    - `tree`, `other`: of the same structure, shapes and dtypes, as a model before and after a step.

    **Returns:** one of the two. Leaves that are not arrays are those of `tree`. Typed PRNG keys may
    be chosen from `other` though they were used, as those of the state before a step are.

    **Raises:** `ValueError` for two structures.

    >>> import jax.numpy as jnp
    >>> print(tree_where(jnp.array(False), {"weight": jnp.ones(2)}, {"weight": jnp.zeros(2)}))
    {'weight': Array([0., 0.], dtype=float32)}
    """

    def choose(leaf: Any, other_leaf: Any) -> Any:
        if not is_array(other_leaf):
            return leaf
        if is_key(other_leaf):
            # `jax.debug_key_reuse` counts a choice as a use. The other key may have been used
            # before, and the chosen one is to be used again: both are cloned.
            chosen = jnp.where(condition, leaf, jax.random.clone(other_leaf))
            return jax.random.clone(chosen)
        return jnp.where(condition, leaf, other_leaf)

    return jax.tree_util.tree_map(choose, tree, other)


def has_skipped(optimiser_state: optax.OptState) -> Bool[Array, ""] | None:
    """Whether an optimiser skipped its last update because it was not finite; `None` if it never
    skips.
    """
    flags: list[Any] = []
    for node in jtu.tree_leaves(optimiser_state, is_leaf=_may_skip):
        if isinstance(node, optax.ApplyIfFiniteState):
            flags.append(~node.last_finite)
        elif _may_skip(node):
            flags.append(node.skip_state["should_skip"])
    return functools.reduce(operator.or_, flags) if flags else None


def _may_skip(node: Any) -> bool:
    if isinstance(node, optax.MultiStepsState):
        # The state of `optax.skip_not_finite` has no class of its own.
        skip_state: Any = node.skip_state
        return isinstance(skip_state, dict) and "num_not_finite" in skip_state
    return isinstance(node, optax.ApplyIfFiniteState)


def _may_be_loss(loss: Float[Array, ""], new: TrainState) -> Bool[Array, ""]:
    is_skipped = has_skipped(new.optimiser_state)
    return jnp.isfinite(loss) if is_skipped is None else jnp.isfinite(loss) | is_skipped


def was_refused(state: TrainState) -> Bool[Array, ""]:
    """Whether the last update was refused or skipped, in a new buffer."""
    is_skipped = has_skipped(state.optimiser_state)
    if is_skipped is None:
        return jnp.copy(state.is_halted)
    # After too many skips in a row `apply_if_finite` applies the update.
    return state.is_halted | (is_skipped & all_finite(_kept(state)))


def _kept(state: TrainState) -> list[Array]:
    parameters = filter(state.model, is_inexact_array)
    kept = parameters, state.model_state, _statistics(state.optimiser_state, parameters)
    return [leaf for leaf in jtu.tree_leaves(kept) if is_inexact_array(leaf)]


def _statistics(optimiser_state: optax.OptState, parameters: PyTree) -> list[Any]:
    """The parts of an optimiser's state for each parameter, such as moments, and other arrays."""
    structure = jtu.tree_structure(parameters)

    def is_of_parameters(node: Any) -> bool:
        return jtu.tree_structure(node) == structure

    parts = jtu.tree_leaves(optimiser_state, is_leaf=is_of_parameters)
    return [part for part in parts if not is_array(part) or part.ndim > 0]


# --- Steps without their guard, which `fit` runs, and how it finds the last good state ---


def halt_if_not_finite(
    old: TrainState[Model], new: TrainState[Model], loss: Float[Array, ""]
) -> TrainState[Model]:
    """`new`, marked as halted where `keep_if_finite` would return `old`.

    Of a large parameter, and of a large running mean of the optimiser, it checks only a few
    numbers: one that is not finite stays so. The caller keeps a copy of `old` and checks all
    numbers later.

    **Arguments:** those of `keep_if_finite`.
    """
    lasting = {
        id(leaf)
        for leaf in jtu.tree_leaves((filter(new.model, is_array), _means(new.optimiser_state)))
    }
    looked_at = [
        jnp.ravel(array)[:128] if array.size > SMALL and id(array) in lasting else array
        for array in _kept(new)
    ]
    is_good = ~old.is_halted & _may_be_loss(loss, new) & _are_finite(looked_at)
    is_good &= all_finite(new.model_state)
    return tree_at(lambda state: state.is_halted, new, ~is_good)


def _means(optimiser_state: optax.OptState) -> list[Any]:
    nodes = jtu.tree_leaves(optimiser_state, is_leaf=lambda node: isinstance(node, _OF_MEANS))
    return [node for node in nodes if isinstance(node, _OF_MEANS)]


_OF_MEANS = (
    optax.ScaleByAdamState,
    optax.ScaleByAmsgradState,
    optax.ScaleByBeliefState,
    optax.ScaleByLionState,
    optax.ScaleByRmsState,
    optax.ScaleByRStdDevState,
    optax.EmaState,
)
"""States of Optax in which each number is a mean of all gradients so far."""


def is_kept_finite(state: TrainState) -> Bool[Array, ""]:
    """Whether the arrays that `keep_if_finite` checks are finite, for a state on one device."""
    return _are_finite(_kept(state))


SMALL = 2**12
"""A CPU copies an array of at most this size in less time than starting an operation takes."""


def _are_finite(arrays: Sequence[Array]) -> Bool[Array, ""]:
    """`all_finite` of arrays on one device, with one operation for all small ones of a dtype."""
    is_finite = all_finite([each for each in arrays if each.size > SMALL])
    for joined in ravel_by_dtype(each for each in arrays if each.size <= SMALL).values():
        is_finite &= jnp.isfinite(joined).all()
    return is_finite


def ravel_by_dtype(arrays: Iterable[Array]) -> dict[str, Array]:
    """All numbers of the arrays of each dtype in one array, in their order."""
    raveled: dict[str, list[Array]] = {}
    for each in arrays:
        raveled.setdefault(each.dtype.name, []).append(jnp.ravel(each))
    return {name: jnp.concatenate(those) for name, those in raveled.items()}


_UNGUARDED: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def register_unguarded(function: Any, step: Any) -> None:
    """Registers `step` as the form without a guard of `function`, which `keep_if_finite` guards."""
    _UNGUARDED[function] = step


_SKIPPING: weakref.WeakSet[Any] = weakref.WeakSet()


def register_skipping(function: Any) -> None:
    """Registers the function of a step that `skip_if_not_finite` guards."""
    _SKIPPING.add(function)


def may_skip(state: TrainState) -> bool:
    """Whether a step may skip updates of `state`, even a step inside another function."""
    return bool(_SKIPPING) or has_skipped(state.optimiser_state) is not None


def unguarded(step: Any) -> Any:
    """The registered step that only marks a state as halted; `None` where there is none.

    The key is the function itself: `functools.wraps` would copy an attribute to a function that
    does more.
    """
    function = getattr(step, "__wrapped__", None)
    return _UNGUARDED.get(function) if isinstance(function, types.FunctionType) else None
