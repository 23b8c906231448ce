"""`make_step`: a jitted training step. It computes

    value, gradients = jax.value_and_grad(loss)(model, batch, key)
    updates, optimiser_state = optimiser.update(gradients, optimiser_state, model)
    model = optax.apply_updates(model, updates)

with a fresh key for each step, a check for NaN, a loss scale, and sharding. `EMA` averages the
parameters in the optimiser's state.
"""

import dataclasses
import functools
import inspect
import math
import re
import warnings
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar, overload

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int32, PRNGKeyArray, PyTree

from .. import (
    apply_updates,
    combine,
    filter,
    filter_jit,
    filter_value_and_grad,
    is_array,
    is_inexact_array,
    tree_pformat,
)
from .._check_numbers import real_number
from .._dtypes import is_key
from .._traceback import stacklevel_of_user
from ..extend import find_difference, flag_frozen, listed
from ._checks import check_arrays, check_callable
from ._guards import CheckFinite, has_skipped, register_step, tree_where, update_if_finite
from ._sharding import Sharding, check_sharding, evaluate_sharded, shard
from ._state import (
    DynamicLossScale,
    Evaluate,
    Evaluation,
    TrainState,
    WithSlow,
    check_optimiser,
    check_state,
    evaluator,
    initial_state,
    nodes_of,
)

Model = TypeVar("Model", bound=Any)
ModelState = TypeVar("ModelState", bound=Any)
Batch = TypeVar("Batch", bound=Any)
Aux = TypeVar("Aux")

Step = Callable[[TrainState[Model], Batch], tuple[TrainState[Model], Float[Array, ""]]]
StepWithAux = Callable[[TrainState[Model], Batch], tuple[TrainState[Model], Float[Array, ""], Aux]]


@overload
def make_step(
    loss: Callable[[Model, Batch, PRNGKeyArray], ArrayLike]
    | Callable[[Model, ModelState, Batch, PRNGKeyArray], tuple[ArrayLike, ModelState]],
    optimiser: optax.GradientTransformation,
    *,
    has_aux: Literal[False] = False,
    check_finite: CheckFinite = True,
    sharding: Sharding | None = None,
) -> Step[Model, Batch]: ...
@overload
def make_step(
    loss: Callable[[Model, Batch, PRNGKeyArray], tuple[ArrayLike, Aux]]
    | Callable[[Model, ModelState, Batch, PRNGKeyArray], tuple[ArrayLike, tuple[ModelState, Aux]]],
    optimiser: optax.GradientTransformation,
    *,
    has_aux: Literal[True],
    check_finite: CheckFinite = True,
    sharding: Sharding | None = None,
) -> StepWithAux[Model, Batch, Aux]: ...
def make_step(
    loss: Callable[..., Any],
    optimiser: optax.GradientTransformation,
    *,
    has_aux: bool = False,
    check_finite: CheckFinite = True,
    sharding: Sharding | None = None,
) -> Any:
    """Makes a jitted training step from a loss and an optimiser.

    **Arguments:**

    - `loss`: a function `loss(model, batch, key)` that returns a number of shape `()`, or `(loss,
      aux)` with `has_aux`. Each step passes a fresh key. If the `TrainState` has a `model_state`,
      the function is `loss(model, model_state, batch, key)`. Then it returns `(loss, model_state)`,
      or `(loss, (model_state, aux))` with `has_aux`.
    - `optimiser`: the optimiser passed to `TrainState.create`. It gets the model's floating-point
      and complex arrays as parameters. The gradient of a complex array is the conjugate of JAX's
      gradient, because the negative of the conjugate is the direction of steepest descent. With
      `optax.lookahead` the model has the fast parameters, and `state.optimiser_state.slow` has the
      slow parameters. The step also passes the extra arguments of Optax that the optimiser accepts:
        - `value`: the loss.
        - `grad`: JAX's gradients.
        - `value_fn` and `obj_fn`: a function that takes the parameters and returns the loss, for
          the same batch, key and `model_state`. It is traced only if the optimiser calls it.
        - `grad_fn`: a function that takes the parameters and returns the gradients, for the same
          batch, key and `model_state`. It is traced only if the optimiser calls it.
    - `has_aux`: whether the loss returns an `aux` too. If `aux` is a dict, the logs of `fit` show
      the means of its real numbers of shape `()`; see `Run.aux`.
    - `check_finite`: how the step reacts to NaN and infinity.
        - `True` refuses the update if the loss, a gradient or the new `model_state` is not finite.
          The state keeps its values, and its `is_halted` is set; see `TrainState.is_halted`. A
          gradient counts as infinite if its norm is above the square root of the largest number of
          its dtype (1.8e19 in float32), because Adam squares gradients. This limit does not apply
          to float16. The check reduces the gradients once and does not copy the state. All
          gradients must be computed before the first parameter is updated. If an optimiser makes
          NaN from finite gradients, `fit` sees the NaN only when it reads the losses.
        - `"skip"` refuses the same updates, but the next step continues.
        - `"state"` checks the new parameters and the new optimiser state. So it also catches an
          optimiser that makes NaN from finite gradients. The check needs a copy of the state.
          Optimisers that skip updates themselves also need this copy.
        - `False` checks nothing. `fit` stops at a loss that is not finite, but has no good state to
          return.
    - `sharding`: the sharding of the batches and of the state. Place the first state with
      `train.shard`; the step keeps the sharding of the state. The loss is the same as on one
      device.

    If the state has a loss scale, the gradients are computed from the scaled loss. They are divided
    by the scale before the optimiser gets them. If a gradient is not finite, the step leaves the
    model and the optimiser state unchanged and lowers the scale. Such a step counts too, so the
    next step has another key. Training still halts if the loss itself is not finite, or if
    gradients are not finite at the smallest scale.

    **Returns:** a function `step(state, batch)` that returns `(state, loss)`, or `(state, loss,
    aux)` with `has_aux`. The step donates its argument `state`, so use only the returned state.

    **Raises:** `TypeError` if `loss`, `optimiser` or `sharding` has the wrong type. The step raises
    `TypeError` if `state` is not a `TrainState`, or if the output of the loss is not as described
    above. The step raises `ValueError` if the state was made with another optimiser, if the model
    has nothing to train, or if `sharding` cannot split the state or the batch.

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
    check_callable(loss, "loss(model, batch, key)", "make_step(loss, optimiser)")
    check_optimiser(optimiser, "make_step")
    if check_finite not in (True, False, "skip", "state"):
        raise ValueError(
            'make_step expected check_finite to be True, False, "skip" or "state"; got '
            f"{check_finite!r}."
        )
    evaluate = evaluator(loss, has_aux)
    if sharding is not None:
        check_sharding(sharding, "make_step")
        evaluate = evaluate_sharded(evaluate, sharding)

    def step(state: TrainState, batch: Any) -> tuple:
        check_state(state, "The step")
        check_arrays(batch)
        _check_trainable(state.model, is_state_kept=state.model_state is not None)
        parameters = filter(state.model, is_inexact_array)
        _check_optimiser_state(optimiser, parameters, state.optimiser_state)
        loss_key = jr.fold_in(state.key, state.step)
        inputs = state.model, state.model_state, batch, loss_key
        differentiate = functools.partial(_differentiate, evaluate, state.loss_scale)
        evaluation, gradients = differentiate(*inputs)
        extra = {"value": evaluation.loss, "grad": gradients}
        extra |= _functions(evaluate, differentiate, inputs)
        # For a complex parameter, JAX's gradient is the conjugate of the direction of ascent. So
        # conjugate the gradient.
        gradients = jtu.tree_map(jnp.conj, gradients)
        update = functools.partial(
            _update, optimiser, state, parameters, evaluation, gradients, extra
        )
        is_sharded = sharding is not None
        updated = update_if_finite(state, update, gradients, evaluation, check_finite, is_sharded)
        if sharding is not None:
            updated = shard(updated, sharding)
        returned = updated, evaluation.loss, evaluation.aux
        return returned if has_aux else returned[:2]

    # Retrace reports show the name of the user's loss.
    vars(step).update(__signature__=inspect.signature(step), __wrapped__=loss)
    step.__qualname__ = f"make_step({getattr(loss, '__name__', type(loss).__name__)})"
    register_step(step, check_finite)
    return filter_jit(step, donate=("state",))


def _check_trainable(model: PyTree, *, is_state_kept: bool) -> None:
    """Checks that a model has an array to train.

    With `is_state_kept=True` this function only warns, because steps still change `model_state`.

    **Raises:** `ValueError` if the model has no array to train. `TypeError` for
    `optax.LookaheadParams`.
    """
    if isinstance(model, optax.LookaheadParams):
        raise TypeError(
            "make_step expected the state of a model, got the state of optax.LookaheadParams. Pass "
            "the model to TrainState.create: `state.optimiser_state.slow` has the slow parameters."
        )
    if jtu.tree_leaves(filter(model, is_inexact_array)):
        return
    leaves = zip(jtu.tree_leaves_with_path(model), flag_frozen(model), strict=True)
    reasons = [
        f"model{jtu.keystr(path)} is "
        + ("frozen" if is_frozen else str(getattr(leaf, "dtype", f"the number {leaf!r}")))
        for (path, leaf), is_frozen in leaves
        if is_array(leaf) or type(leaf) in (int, float, complex)
    ]
    found = listed(reasons) or f"the model, {tree_pformat(model)}, has no arrays"
    message = (
        f"make_step has nothing to train: {found}. It trains the floating-point and complex arrays "
        "that are not frozen."
    )
    if not is_state_kept:
        raise ValueError(message)
    warnings.warn(f"{message} It changes only the model_state.", stacklevel=stacklevel_of_user())


def _check_optimiser_state(
    optimiser: optax.GradientTransformation, parameters: PyTree, state: optax.OptState
) -> None:
    """Raises `ValueError` if `state` and `optimiser.init(parameters)` differ in structure or
    shapes.
    """
    try:
        expected = jax.eval_shape(lambda tree: initial_state(optimiser, tree), parameters)
    except TypeError:
        # `init` cannot be traced, because it reads numbers, or because its state has leaves that
        # are not arrays. If the state does not fit, the update will raise an error.
        return

    def have_one_shape(leaf: Any, other: Any) -> bool | None:
        return jnp.shape(leaf) == jnp.shape(other) if jtu.all_leaves([leaf, other]) else None

    if difference := find_difference(state, expected, have_one_shape):
        explained = difference.explain("state.optimiser_state", "optimiser.init(model)")
        raise ValueError(
            f"make_step expected the state of its optimiser, {_type_names(expected)}, but the "
            f"TrainState has {_type_names(state)}: {explained}. Pass the same optimiser to "
            "make_step and TrainState.create. If the model was changed since, for example by "
            "`nn.freeze`, create the state again."
        )


def _type_names(state: optax.OptState) -> str:
    """The class names in the state of an optimiser, such as `(ScaleByAdamState, EmptyState)`."""
    if type(state) is tuple:
        return f"({', '.join(map(_type_names, state))})"
    return type(state).__name__


def _differentiate(
    evaluate: Evaluate, loss_scale: DynamicLossScale | None, *inputs: Any
) -> tuple[Evaluation, PyTree]:
    """Computes the output of the loss and its gradients.

    If there is a loss scale, the gradients are computed from the scaled loss, then unscaled.
    """

    def scaled_loss(*arguments: Any) -> tuple[Any, Evaluation]:
        evaluation = evaluate(*arguments)
        loss = evaluation.loss
        return loss if loss_scale is None else loss_scale.scale_loss(loss), evaluation

    value_and_gradients = filter_value_and_grad(scaled_loss, has_aux=True)
    (_, evaluation), gradients = value_and_gradients(*inputs)
    if loss_scale is not None:
        gradients = loss_scale.unscale(gradients)
    return evaluation._replace(loss=jnp.asarray(evaluation.loss)), gradients


def _functions(
    evaluate: Evaluate, differentiate: Callable[..., Any], inputs: tuple[Any, ...]
) -> dict[str, Callable[..., Any]]:
    """The functions `value_fn`, `grad_fn` and `obj_fn`, which line searches of Optax need."""
    model = inputs[0]

    def with_values(values: PyTree) -> tuple[Any, ...]:
        # `optax.partition` masks parameters that belong to other optimisers. Use the model's
        # arrays for them.
        shown = jtu.tree_map(
            lambda value, own: own if _is_masked(value) else value,
            values,
            filter(model, is_inexact_array),
            is_leaf=_is_masked,
        )
        # The key is reused on purpose. It is cloned, so that `jax.debug_key_reuse` accepts it.
        again = jtu.tree_map(lambda leaf: jr.clone(leaf) if is_key(leaf) else leaf, inputs[1:])
        return combine(shown, model), *again

    # `value_fn` accepts `grad_fn` and `obj_fn`, because a line search checks that `value_fn`
    # accepts all extra arguments.
    def value_fn(values: PyTree, grad_fn: Any = None, obj_fn: Any = None) -> Array:
        return jnp.asarray(evaluate(*with_values(values)).loss)

    def grad_fn(values: PyTree, _: Any = None) -> PyTree:
        return jtu.tree_map(jnp.conj, differentiate(*with_values(values))[1])

    return {"value_fn": value_fn, "grad_fn": grad_fn, "obj_fn": value_fn}


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)


def _update(
    optimiser: optax.GradientTransformation,
    state: TrainState,
    parameters: PyTree,
    evaluation: Evaluation,
    gradients: PyTree,
    extra: dict[str, Any],
) -> TrainState:
    """The state after one more step."""
    own = state.optimiser_state
    slow = own.slow if isinstance(own, WithSlow) else None
    if slow is not None:
        own, parameters = own.optimiser_state, optax.LookaheadParams(fast=parameters, slow=slow)
    # Optax relies on dtype promotion: for example, Adam raises a float to an integer count. So
    # allow promotion here, even if the user has set it to strict for the model.
    with jax.numpy_dtype_promotion("standard"):
        updates, own = _call_update(optimiser.update, gradients, own, parameters, **extra)
    model_state, is_skipped = evaluation.model_state, has_skipped(own)
    if is_skipped is not None:
        model_state = tree_where(~is_skipped, model_state, state.model_state)
    if slow is not None:
        own, updates = WithSlow(own, apply_updates(slow, updates.slow)), updates.fast
    return dataclasses.replace(
        state,
        model=apply_updates(state.model, updates),
        optimiser_state=own,
        step=state.step + 1,
        model_state=model_state,
    )


def _call_update(
    update: Callable[..., Any], *inputs: Any, **extra: Any
) -> tuple[PyTree, optax.OptState]:
    """Calls `update` with all arguments in `extra` that the optimiser accepts.

    Only a call shows which arguments it accepts, because a nested optimiser may reject some. So
    `update` is called again, without the argument that was rejected, until it succeeds.

    **Returns:** the updates and the next optimiser state.
    """
    while True:
        try:
            return update(*inputs, **extra)
        except TypeError as error:
            refused = re.search(r"got an unexpected keyword argument '(\w+)'", str(error))
            if refused is None or extra.pop(refused[1], None) is None:
                error.add_note(
                    f"The optimiser with state {_type_names(inputs[1])} raised this. make_step "
                    f"called it with ({', '.join(['gradients', 'state', 'parameters', *extra])})."
                )
                raise


# --- Averaged parameters ---


class EMAState(NamedTuple):
    """The Optax state of `EMA`.

    - `count`: number of updates.
    - `average`: the average of the parameters, a pytree like the parameters.
    """

    count: Int32[Array, ""]
    average: PyTree


# `optax.GradientTransformation` is a tuple. JAX would flatten an `EMA` as a tuple, and could not
# build the `EMA` from the elements again. So this class is registered as static.
@jtu.register_static
class EMA(optax.GradientTransformation):
    """An exponential moving average of the parameters, as an Optax transformation.

    Put it last in `optax.chain`; it does not change the updates. Let `w` be the parameters after
    update `t`, and `d` the decay. Each update computes

        average = average + (1 - d) / (1 - d**t) * (w - average)

    So `average` is a weighted mean of all `w`. A `w` from `k` updates ago has weight `d**k`. The
    initial parameters do not count.

    The average is part of the optimiser's state. So a step updates the average, unless the update
    is refused. Checkpoints include the average. The average is sharded like the parameters. With
    `optax.MultiSteps`, put the `EMA` inside, so that it counts updates and not gradients:
    `optax.MultiSteps(optax.chain(adam, ema), 4)`.

    >>> import jax, jax.numpy as jnp, optax
    >>> from eqxlike import nn, train
    >>> ema = train.EMA(0.99)
    >>> optimiser = optax.chain(optax.adam(1e-3), ema)
    >>> state = train.TrainState.create(
    ...     nn.Linear(2, 1, key=jax.random.key(0)), optimiser, key=jax.random.key(1)
    ... )
    >>> step = train.make_step(lambda model, x, key: jnp.mean(jax.vmap(model)(x) ** 2), optimiser)
    >>> state, _ = step(state, jnp.ones((4, 2)))
    >>> ema.averaged(state).model(jnp.ones(2)).shape
    (1,)
    """

    def __new__(cls, decay: float, *, debias: bool = True) -> "EMA":
        """**Arguments:**

        - `decay`: weight of the old average in each update, such as 0.999.
        - `debias`: whether to use the factor `(1 - d) / (1 - d**t)`. If `False`, the factor is
          `1 - d`, and the average starts at the initial parameters.

        Averages have dtype float32, or the dtype of the parameter if that is wider.

        **Raises:** `TypeError` if `decay` is not a number. `ValueError` unless `0 < decay < 1`.
        """
        decay = real_number(decay, "decay")
        if not 0 < decay < 1:
            raise ValueError(f"decay must be between 0 and 1, got {decay!r}.")

        def init(params: PyTree) -> EMAState:
            return EMAState(jnp.zeros((), jnp.int32), jtu.tree_map(_widened, params))

        def update(updates: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, EMAState]:
            if params is None:
                raise ValueError("EMA needs the parameters: `update(gradients, state, params)`.")
            count = jnp.asarray(optax.safe_increment(state.count))
            # `expm1` computes 1 - d**t to full precision. In float32, d**t may round to one.
            share = -jnp.expm1(count * math.log(decay)) if debias else jnp.ones(())
            average = jtu.tree_map(
                lambda old, new: old + ((1 - decay) / share).astype(old.dtype) * (new - old),
                state.average,
                jtu.tree_map(_widened, optax.apply_updates(params, updates)),
            )
            return updates, EMAState(count, average)

        return super().__new__(cls, init, update)

    def averaged(self, state: TrainState[Model]) -> TrainState[Model]:
        """Replaces the model's parameters by their average.

        Use the result for evaluation, as in `fit(..., evaluate=lambda state:
        evaluate(ema.averaged(state)))`. Continue training with `state`, not with the result. Arrays
        that are not trained, such as frozen arrays, are unchanged.

        **Arguments:**

        - `state`: a state whose optimiser has an `EMA`. The optimiser may have several `EMA`s that
          average different parameters, as in `optax.partition`.

        **Returns:** a `TrainState` with the averaged model. The averages are cast to the dtypes of
        the parameters. The result shares arrays with `state`, so use it before the next step.

        **Raises:** `TypeError` if `state` is not a `TrainState`. `ValueError` if its optimiser has
        no `EMA`, or averages one array several times.
        """
        check_state(state, "EMA.averaged")
        averages = [node.average for node in nodes_of(EMAState, state.optimiser_state)]
        if not averages:
            raise ValueError(
                "EMA.averaged expected a state whose optimiser has an `EMA`: create the optimiser "
                "with `optax.chain(optimiser, ema)`."
            )

        def chosen(path: Any, own: Array, *candidates: Any) -> Array:
            found = [each for each in candidates if not isinstance(each, optax.MaskedNode)]
            if len(found) > 1:
                raise ValueError(
                    f"EMA.averaged found {len(found)} averages of model{jtu.keystr(path)}: use one "
                    "EMA in the optimiser."
                )
            return found[0].astype(own.dtype) if found else own

        parameters = filter(state.model, is_inexact_array)
        averaged = jtu.tree_map_with_path(chosen, parameters, *averages)
        return dataclasses.replace(state, model=combine(averaged, state.model))


def _widened(parameter: Any) -> Array:
    """Copies a parameter to a new array of dtype float32, or of its own dtype if that is wider."""
    return jnp.array(parameter, jnp.promote_types(parameter.dtype, jnp.float32))
