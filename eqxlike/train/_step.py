"""A jitted training step: gradients of the loss, and the optimiser's update.

    value, gradients = jax.value_and_grad(loss)(model, batch, key)
    updates, optimiser_state = optimiser.update(gradients, optimiser_state, model)
    model = optax.apply_updates(model, updates)

and besides: a key for each step, a guard against NaN, a loss scale, several devices.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, Literal, TypeVar, overload

import jax
import jax.numpy as jnp
import jax.random as jr
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from .._pytree import apply_updates, filter, is_inexact_array
from .._transforms import filter_jit, filter_value_and_grad
from ._as_arrays import check_arrays
from ._checks import check_callable, check_optimiser, check_optimiser_state
from ._guards import halt_if_not_finite, keep_if_finite, register_unguarded, skip_overflow
from ._sharding import Sharding, check_sharding, evaluate_sharded, shard
from ._state import Evaluate, Evaluation, TrainState, check_state, evaluator

Model = TypeVar("Model", bound=Any)
ModelState = TypeVar("ModelState", bound=Any)
Batch = TypeVar("Batch", bound=Any)
Aux = TypeVar("Aux")

Step = Callable[[TrainState[Model], Batch], tuple[TrainState[Model], Float[Array, ""]]]
StepWithAux = Callable[[TrainState[Model], Batch], tuple[TrainState[Model], Float[Array, ""], Aux]]


@overload
def make_step(
    loss: Callable[[Model, Batch, PRNGKeyArray], ArrayLike],
    optimiser: optax.GradientTransformation,
    *,
    has_aux: Literal[False] = False,
    check_finite: bool = True,
    sharding: Sharding | None = None,
) -> Step[Model, Batch]: ...
@overload
def make_step(
    loss: Callable[[Model, ModelState, Batch, PRNGKeyArray], tuple[ArrayLike, ModelState]],
    optimiser: optax.GradientTransformation,
    *,
    has_aux: Literal[False] = False,
    check_finite: bool = True,
    sharding: Sharding | None = None,
) -> Step[Model, Batch]: ...
@overload
def make_step(
    loss: Callable[[Model, Batch, PRNGKeyArray], tuple[ArrayLike, Aux]],
    optimiser: optax.GradientTransformation,
    *,
    has_aux: Literal[True],
    check_finite: bool = True,
    sharding: Sharding | None = None,
) -> StepWithAux[Model, Batch, Aux]: ...
@overload
def make_step(
    loss: Callable[
        [Model, ModelState, Batch, PRNGKeyArray], tuple[ArrayLike, tuple[ModelState, Aux]]
    ],
    optimiser: optax.GradientTransformation,
    *,
    has_aux: Literal[True],
    check_finite: bool = True,
    sharding: Sharding | None = None,
) -> StepWithAux[Model, Batch, Aux]: ...
def make_step(
    loss: Callable[..., Any],
    optimiser: optax.GradientTransformation,
    *,
    has_aux: bool = False,
    check_finite: bool = True,
    sharding: Sharding | None = None,
) -> Any:
    """A jitted training step.

    **Arguments:**

    - `loss`: `loss(model, batch, key)` of shape `()`, or `(loss, aux)` if `has_aux`. The key is
      fresh in each step. For a `TrainState` with a `model_state` it is `loss(model, model_state,
      batch, key)`, and returns `(loss, model_state)`, or `(loss, (model_state, aux))`.
    - `optimiser`: the one that `TrainState.create` got. It sees the model's floating-point and
      complex arrays, and the loss as the extra argument `value`. For complex arrays it gets the
      conjugates of JAX's gradients, along which the loss falls.
    - `has_aux`: whether the loss returns an `aux` too.
    - `check_finite`: refuse an update that would make the loss, a parameter, or what the model and
      the optimiser keep NaN or infinite; see `keep_if_finite` and `TrainState.is_halted`. A step
      that is called by itself then keeps the old arrays until the new ones are judged, and writes
      none in place; `fit` has a cheaper way (`_guards`). With `check_finite=False` `fit` still
      stops at a loss that is not finite, but has no good state left.
    - `sharding`: that of the states, placed by `train.shard`, and of the batches. The returned
      state has the sharding of the given one. The loss has the value that one device would compute.

    If the state has a loss scale, the loss is scaled for its gradients, which the optimiser sees
    unscaled. Where one of them is not finite the step leaves model and optimiser state exactly as
    they are and lowers the scale; it counts as a step, and the next one has another key. Training
    still halts if the loss itself is not finite, or if gradients are not finite at the smallest
    scale.

    **Returns:** `step(state, batch)` which gives `(state, loss)`, or `(state, loss, aux)`. The
    state that it gets is donated: use the one it returns.

    **Raises:** `TypeError` if `loss`, `optimiser` or `sharding` has another type. When called,
    `TypeError` for what is not a `TrainState`, and for a loss that returns something else;
    `ValueError` if the state was made with another optimiser, or does not divide as `sharding`
    says, nor does the batch.

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
    check_callable(loss, "loss(model, batch, key)", "make_step")
    check_optimiser(optimiser, "make_step")
    evaluate = evaluator(loss, has_aux)
    if sharding is not None:
        check_sharding(sharding, "make_step")
        evaluate = evaluate_sharded(evaluate, sharding)

    def guarded_by(guard: Callable[..., TrainState] | None) -> Any:
        def step(state: TrainState, batch: Any) -> tuple:
            check_state(state, "The step")
            check_arrays(batch)
            parameters = filter(state.model, is_inexact_array)
            check_optimiser_state(optimiser, parameters, state.optimiser_state)
            loss_key = jr.fold_in(state.key, state.step)
            evaluation, gradients = _differentiate(evaluate, state, batch, loss_key)
            updated = _update(optimiser, state, parameters, evaluation, gradients)
            updated, loss_to_judge = skip_overflow(state, updated, gradients, evaluation.loss)
            if guard is not None:
                updated = guard(state, updated, loss_to_judge)
            if sharding is not None:
                updated = shard(updated, sharding)
            returned = updated, evaluation.loss, evaluation.aux
            return returned if has_aux else returned[:2]

        # Reports on its traces name the loss, by which a user knows it.
        vars(step).update(__signature__=inspect.signature(step), __wrapped__=loss)
        step.__qualname__ = f"make_step({getattr(loss, '__name__', type(loss).__name__)})"
        return filter_jit(step, donate=("state",))

    step = guarded_by(keep_if_finite if check_finite else None)
    if check_finite:
        # Where `fit` keeps a copy to go back to, it runs this step, which checks less (`_guards`).
        register_unguarded(step.__wrapped__, guarded_by(halt_if_not_finite))
    return step


def _differentiate(
    evaluate: Evaluate, state: TrainState, batch: Any, key: PRNGKeyArray
) -> tuple[Evaluation, PyTree]:
    """The evaluation of the loss, and its gradients, which are computed scaled if need be."""
    loss_scale = state.loss_scale

    def scaled_loss(*arguments: Any) -> tuple[Any, Evaluation]:
        evaluation = evaluate(*arguments)
        loss = evaluation.loss
        return loss if loss_scale is None else loss_scale.scale_loss(loss), evaluation

    value_and_gradients = filter_value_and_grad(scaled_loss, has_aux=True)
    (_, evaluation), gradients = value_and_gradients(state.model, state.model_state, batch, key)
    # For a complex parameter JAX gives the conjugate of the direction in which the loss grows.
    gradients = jax.tree_util.tree_map(jnp.conj, gradients)
    if loss_scale is not None:
        gradients = loss_scale.unscale(gradients)
    return evaluation._replace(loss=jnp.asarray(evaluation.loss)), gradients


def _update(
    optimiser: optax.GradientTransformation,
    state: TrainState,
    parameters: PyTree,
    evaluation: Evaluation,
    gradients: PyTree,
) -> TrainState:
    """The state after one more step."""
    # Optax relies on promotion (Adam raises a float to an integer count), even where the user has
    # made it strict for the model's own arithmetic.
    with jax.numpy_dtype_promotion("standard"):
        updates, optimiser_state = optax.with_extra_args_support(optimiser).update(
            gradients, state.optimiser_state, parameters, value=evaluation.loss
        )
    return dataclasses.replace(
        state,
        model=apply_updates(state.model, updates),
        optimiser_state=optimiser_state,
        step=state.step + 1,
        model_state=evaluation.model_state,
    )
