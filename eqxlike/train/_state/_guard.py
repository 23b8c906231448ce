"""Guards of a step against numbers that are not finite."""

import dataclasses
from typing import Any, TypeVar

import jax.numpy as jnp
import jax.tree_util as jtu
import optax
from jaxtyping import Array, Float, PyTree

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
    parameters = filter(new.model, is_inexact_array)
    kept = parameters, new.model_state, _statistics(new.optimiser_state, parameters)
    is_good = ~old.is_halted & jnp.isfinite(loss) & all_finite(kept)
    chosen = tree_where(is_good, new, old)
    return tree_at(lambda state: state.is_halted, chosen, ~is_good)


def _statistics(optimiser_state: optax.OptState, parameters: PyTree) -> list[Any]:
    """The parts of an optimiser's state for each parameter, such as moments, and other arrays."""
    structure = jtu.tree_structure(parameters)

    def is_of_parameters(node: Any) -> bool:
        return jtu.tree_structure(node) == structure

    parts = jtu.tree_leaves(optimiser_state, is_leaf=is_of_parameters)
    return [part for part in parts if not is_array(part) or part.ndim > 0]
