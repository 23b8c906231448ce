"""Guards of a step against numbers that are not finite."""

import dataclasses
import types
import weakref
from collections.abc import Sequence
from typing import Any, TypeVar

import jax.numpy as jnp
import jax.tree_util as jtu
import optax
from jaxtyping import Array, Bool, Float, PyTree

from ..._pytree import filter, is_array, is_inexact_array, tree_at
from ._finite import all_finite, tree_where
from ._state import TrainState

Model = TypeVar("Model", bound=Any)


def skip_overflow(
    old: TrainState[Model], new: TrainState[Model], gradients: PyTree, loss: Float[Array, ""]
) -> tuple[TrainState[Model], Float[Array, ""]]:
    """`new` with its loss scale adjusted, or `old` so far as gradients count that overflowed.

    The step counts in either case, and the next one has another key. A state without a loss scale
    is left as it is.

    **Arguments:**

    - `old`: the state that the step got.
    - `new`: the state after the update.
    - `gradients`: unscaled.
    - `loss`: shape `()`.

    **Returns:** the state, and the loss by which to judge it. That is NaN where no scale makes the
    gradients finite, which is as bad as a loss that is not.
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


def keep_if_finite(
    old: TrainState[Model], new: TrainState[Model], loss: Float[Array, ""]
) -> TrainState[Model]:
    """`new`, or `old` marked as halted if the loss, or an array of `new`, is NaN or infinite.

    It runs inside the jitted step, so that the last good state is exact however late the host
    looks. Call it in a step of your own for `fit` to find that state.

    What counts are the arrays of the model that are not frozen, those of its state, and those of
    the optimiser's state; single numbers of the last only in the place of a parameter: others are
    infinite on purpose, such as the best loss before there was one.

    **Arguments:**

    - `old`: the state that the step got. If it is halted it is returned.
    - `new`: the state after the update.
    - `loss`: shape `()`.
    """
    is_good = ~old.is_halted & jnp.isfinite(loss) & all_finite(_kept(new))
    chosen = tree_where(is_good, new, old)
    return tree_at(lambda state: state.is_halted, chosen, ~is_good)


def halt_if_not_finite(
    old: TrainState[Model], new: TrainState[Model], loss: Float[Array, ""]
) -> TrainState[Model]:
    """`new`, marked as halted where `keep_if_finite` would give `old`.

    Of a large parameter, or a large array of the optimiser's, it looks at a few numbers: for
    somebody who has a copy of `old`, and looks at all of them later. What is not finite there stays
    so until then, as a sum or a running mean does.

    **Arguments:** those of `keep_if_finite`.
    """
    looked_at = [each if each.size <= SMALL else jnp.ravel(each)[:128] for each in _kept(new)]
    is_good = ~old.is_halted & jnp.isfinite(loss) & _are_finite(looked_at)
    is_good &= all_finite(new.model_state)
    return tree_at(lambda state: state.is_halted, new, ~is_good)


def is_kept_finite(state: TrainState) -> Bool[Array, ""]:
    """Whether that is finite which `keep_if_finite` looks at, of a state on one device."""
    return _are_finite(_kept(state))


SMALL = 2**12
"""Numbers of an array that a CPU copies in less time than it takes to begin an operation."""


def _are_finite(arrays: Sequence[Array]) -> Bool[Array, ""]:
    """`all_finite` of arrays on one device, with one operation for all small ones of a dtype."""
    is_finite = all_finite([each for each in arrays if each.size > SMALL])
    small: dict[Any, list[Array]] = {}
    for each in arrays:
        if each.size <= SMALL:
            small.setdefault(each.dtype, []).append(jnp.ravel(each))
    for joined in map(jnp.concatenate, small.values()):
        is_finite &= jnp.isfinite(joined).all()
    return is_finite


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


_UNGUARDED: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def register_unguarded(function: Any, step: Any) -> None:
    """Says what is to a function, one that `keep_if_finite` guards, the step without the guard."""
    _UNGUARDED[function] = step


def unguarded(step: Any) -> Any:
    """The step that marks a state as halted and keeps no other; `None` where there is none.

    It is found by the function itself: `functools.wraps` would copy an attribute to a function that
    does more.
    """
    function = getattr(step, "__wrapped__", None)
    return _UNGUARDED.get(function) if isinstance(function, types.FunctionType) else None
