"""`EMA`: an exponential moving average of the parameters."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import jax.tree_util as jtu
import optax
from jaxtyping import Array, Int32, PyTree

from .. import combine, filter, is_inexact_array
from .._check_numbers import real_number
from ._state import Model, TrainState, check_state, nodes_of


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
