"""An average of the parameters over the steps of a training."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import jax.tree_util as jtu
import optax
from jaxtyping import Array, Int32, PyTree

from .. import combine, filter, is_inexact_array
from .._check_numbers import real_number
from ._state import Model, TrainState, check_state


class EMAState(NamedTuple):
    """What `EMA` keeps in the state of the optimiser.

    - `count`: number of updates.
    - `average`: a tree like the parameters.
    """

    count: Int32[Array, ""]
    average: PyTree


# Otherwise JAX would build it again from the parts of a tuple.
@jtu.register_static
class EMA(optax.GradientTransformation):
    """An exponential moving average of the parameters, as a transformation of Optax.

    It stands last in `optax.chain`, and leaves the updates as they are. With `w` the parameters
    after update `t`, and `d` the decay:

        average = average + (1 - d) / (1 - d**t) * (w - average)

    This is the mean of all `w` with weights `d**age`, so that it owes nothing to the initial
    parameters. The average belongs to the optimiser's state: steps update it, refused updates do
    not, checkpoints include it, and it is sharded like the parameters. Put it inside of
    `optax.MultiSteps`, so that it counts updates: `optax.MultiSteps(optax.chain(adam, ema), 4)`.

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

        - `decay`: the weight of the average in each update, such as 0.999.
        - `debias`: with `False` the factor is `1 - d` in each update, and the average starts from
          the initial parameters.

        Averages are in float32, or in the dtype of the parameter if that is wider.

        **Raises:** `TypeError` if `decay` is not a number, `ValueError` unless it is between 0 and
        1.
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
            # 1 - d**t to full precision: float32 rounds d**t itself.
            share = -jnp.expm1(count * math.log(decay)) if debias else jnp.ones(())
            average = jtu.tree_map(
                lambda old, new: old + ((1 - decay) / share).astype(old.dtype) * (new - old),
                state.average,
                jtu.tree_map(_widened, optax.apply_updates(params, updates)),
            )
            return updates, EMAState(count, average)

        return super().__new__(cls, init, update)

    def averaged(self, state: TrainState[Model]) -> TrainState[Model]:
        """The state with the average in the place of its model's parameters.

        It is for evaluation: `fit(..., evaluate=lambda state: evaluate(ema.averaged(state)))`. To
        train on, use `state`. What is not trained, such as frozen arrays, stays.

        **Arguments:**

        - `state`: of a training whose optimiser has one `EMA`. Several, as of `optax.partition`,
          must each average other parameters.

        **Returns:** the state; its arrays have the dtypes of the parameters. It shares arrays with
        `state`, so use it before the next step.

        **Raises:** `TypeError` if `state` is not a `TrainState`; `ValueError` if its optimiser
        keeps no average, or several of one array.
        """
        check_state(state, "EMA.averaged")
        nodes = jtu.tree_leaves(state.optimiser_state, is_leaf=_is_state)
        averages = [node.average for node in nodes if _is_state(node)]
        if not averages:
            raise ValueError(
                "EMA.averaged expected a state whose optimiser keeps an average: make it with "
                "`optax.chain(optimiser, ema)`."
            )

        def chosen(path: Any, own: Array, *candidates: Any) -> Array:
            found = [each for each in candidates if not isinstance(each, optax.MaskedNode)]
            if len(found) > 1:
                raise ValueError(
                    f"EMA.averaged found {len(found)} averages of model{jtu.keystr(path)}, and "
                    "cannot choose: the optimiser is to have one EMA."
                )
            return found[0].astype(own.dtype) if found else own

        parameters = filter(state.model, is_inexact_array)
        averaged = jtu.tree_map_with_path(chosen, parameters, *averages)
        return dataclasses.replace(state, model=combine(averaged, state.model))


def _is_state(node: Any) -> bool:
    return isinstance(node, EMAState)


def _widened(parameter: Any) -> Array:
    """The parameter in float32, or in its own dtype if that is wider; always a new array."""
    return jnp.array(parameter, jnp.promote_types(parameter.dtype, jnp.float32))
