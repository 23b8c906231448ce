"""A training step made from a loss and an optimiser."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import optax
from jaxtyping import Array, Float, PRNGKeyArray

from .._pytree import apply_updates, filter, is_inexact_array, tree_at, tree_pformat
from .._transforms import filter_jit, filter_value_and_grad
from ._finite import all_finite, tree_where
from ._state import TrainState


def keep_if_finite(old: TrainState, new: TrainState, loss: Float[Array, ""]) -> TrainState:
    """`new`, or `old` marked as halted if the loss, or an array of the model of `new` or of its
    state, is NaN or infinite.

    It runs inside the jitted step, so that the last good state is exact however late the host
    looks. Call it in a step of your own for `fit` to find that state.

    **Arguments:**

    - `old`: the state that the step got. If it is halted it is returned.
    - `new`: the state after the update.
    - `loss`: shape `()`.
    """
    is_good = ~old.is_halted & jnp.isfinite(loss) & all_finite((new.model, new.model_state))
    chosen = tree_where(is_good, new, old)
    return tree_at(lambda state: state.is_halted, chosen, ~is_good)


def make_step(
    loss: Callable[..., Any],
    optimiser: optax.GradientTransformation,
    *,
    has_aux: bool = False,
    check_finite: bool = True,
) -> Callable[..., tuple]:
    """A jitted training step.

    **Arguments:**

    - `loss`: `loss(model, batch, key)` of shape `()`, or `(loss, aux)` if `has_aux`. The key is
      fresh in each step. For a `TrainState` with a `model_state` it is `loss(model, model_state,
      batch, key)`, and returns `(loss, model_state)`, or `(loss, (model_state, aux))`.
    - `optimiser`: the one that `TrainState.create` got. It sees the model's floating-point and
      complex arrays, and the loss as the extra argument `value`.
    - `has_aux`: whether the loss returns something beside.
    - `check_finite`: refuse an update that would make the loss or a parameter NaN or infinite; see
      `TrainState.is_halted`. It goes over the state once more, which shows where a step does little
      else. Without it `fit` still stops at a loss that is not finite, but has no good state left.

    If the state has a loss scale, the loss is scaled for its gradients, which the optimiser sees
    unscaled. Where one of them is not finite the step leaves model and optimiser state exactly as
    they are and lowers the scale, but counts, and the next one has another key. What no scale can
    help halts as it does without: a loss that is not finite itself, and gradients that are not at
    the smallest scale.

    **Returns:** `step(state, batch)` which gives `(state, loss)`, or `(state, loss, aux)`. The
    state that it gets is donated: use the one it returns.

    >>> import jax, jax.numpy as jnp, optax
    >>> from eqxlike import nn
    >>> optimiser = optax.sgd(0.1)
    >>> state = TrainState.create(
    ...     nn.Linear(2, 1, key=jax.random.key(0)), optimiser, key=jax.random.key(1)
    ... )
    >>> step = make_step(lambda model, x, key: jnp.mean(jax.vmap(model)(x) ** 2), optimiser)
    >>> for _ in range(3):
    ...     state, loss = step(state, jnp.ones((4, 2)))
    >>> int(state.step), loss.shape
    (3, ())
    """
    extended = optax.with_extra_args_support(optimiser)

    def evaluate(model: Any, model_state: Any, batch: Any, key: Array) -> tuple[Any, Any]:
        """The loss, and beside it the new state of the model and what else it returns."""
        if model_state is None:
            value, aux = loss(model, batch, key) if has_aux else (loss(model, batch, key), None)
            return value, (None, aux)
        # A copy: a `nn.State` that is set is used up, and the old one may be needed again.
        copied = jax.tree_util.tree_map(lambda leaf: leaf, model_state)
        return _with_model_state(loss(model, copied, batch, key), model_state, has_aux)

    def differentiate(state: TrainState, batch: Any, key: PRNGKeyArray) -> tuple[Any, Any, Any]:
        """The loss, what comes beside it, and its gradients."""
        arguments = state.model, state.model_state, batch, key
        loss_scale = state.loss_scale
        if loss_scale is None:
            (value, beside), gradients = filter_value_and_grad(evaluate, has_aux=True)(*arguments)
            return value, beside, gradients

        def scaled_loss(*arguments: Any) -> tuple[Any, Any]:
            value, beside = evaluate(*arguments)
            return loss_scale.scale_loss(value), (value, beside)

        (_, (value, beside)), gradients = filter_value_and_grad(scaled_loss, has_aux=True)(
            *arguments
        )
        return value, beside, loss_scale.unscale(gradients)

    def step(state: TrainState, batch: Any) -> tuple:
        next_key, loss_key = jr.split(state.key)
        value, (model_state, aux), gradients = differentiate(state, batch, loss_key)
        parameters = filter(state.model, is_inexact_array)
        # Optax counts on promotion (Adam raises a float to an integer count), also where the user
        # wants the model's own arithmetic strict.
        with jax.numpy_dtype_promotion("standard"):
            updates, optimiser_state = extended.update(
                gradients, state.optimiser_state, parameters, value=value
            )
        model, loss_scale = apply_updates(state.model, updates), state.loss_scale
        checked = value
        if loss_scale is not None:
            is_finite = all_finite(gradients)
            model, optimiser_state, model_state = tree_where(
                is_finite,
                (model, optimiser_state, model_state),
                (state.model, state.optimiser_state, state.model_state),
            )
            # What no scale makes finite is as bad as a loss that is not.
            checked = jnp.where(is_finite | ~loss_scale.is_smallest, value, jnp.nan)
            loss_scale = loss_scale.adjust(is_finite)
        updated = TrainState(
            model,
            optimiser_state,
            state.step + 1,
            next_key,
            state.is_halted,
            loss_scale,
            model_state,
        )
        if check_finite:
            updated = keep_if_finite(state, updated, checked)
        return (updated, value, aux) if has_aux else (updated, value)

    return filter_jit(step, donate=("state",))


def _with_model_state(returned: Any, old: Any, has_aux: bool) -> tuple[Any, tuple[Any, Any]]:
    """What a loss returned, as `(loss, (model_state, aux))`. Raises `TypeError` for anything else,
    and for a state of another form than the model had before.
    """
    form = "(loss, (model_state, aux))" if has_aux else "(loss, model_state)"
    expected = f"The TrainState has a model_state: the loss is to return {form}"
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise TypeError(f"{expected}, got {tree_pformat(returned)}.")
    value, beside = returned
    if has_aux and (not isinstance(beside, tuple) or len(beside) != 2):
        raise TypeError(f"{expected}, got {tree_pformat(returned)}.")
    new, aux = beside if has_aux else (beside, None)
    if tree_pformat(new) != tree_pformat(old):
        raise TypeError(
            f"{expected}, of the form that it got, {tree_pformat(old)}; got {tree_pformat(new)}."
        )
    return value, (new, aux)
