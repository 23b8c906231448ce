"""Functions and types that Equinox does not have, with the comments of `program.py`."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PRNGKeyArray

import eqxlike as eqx
from eqxlike import bayes, nn, train


def wants_text(text: str) -> None: ...


key = jax.random.key(0)
x = jnp.ones(3)
model = nn.Linear(3, 3, key=key)


# Functions of `filter_jit` and `filter_pmap` have `.lower`.


@eqx.filter_jit(donate=("model",))
def predict(model: nn.Linear, x: Array, steps: int = 1) -> Array:
    return model(x)


def transform(known: Callable[..., Array], unknown) -> None:
    reveal_type(eqx.filter_jit(known).lower(1, 2))  # Lowered
    reveal_type(eqx.filter_jit(eqx.filter_vmap(unknown)).lower(1, 2))  # Lowered
    reveal_type(eqx.filter_jit(known)(1, 2))  # Array


reveal_type(predict)  # Lowerable[(model: Linear, x: Array, steps: int = 1) -> Array]
reveal_type(predict.lower(model, x).compile())  # Compiled
reveal_type(eqx.filter_pmap(model).lower(x))  # Lowered


# Signatures that are `Any` in Equinox.

reveal_type(eqx.filter_jacrev(predict))  # (model: Linear, x: Array, steps: int = 1) -> Unknown
reveal_type(eqx.filter_checkpoint(prevent_cse=False)(predict)(model, x))  # Array
reveal_type(eqx.filter_closure_convert(predict, model, x).consts)  # list[Array]
eqx.filter_hessian(predict)(model)  # mistake
eqx.filter_jit(predict, inline=True, keep_unused=True)
eqx.filter_jit(predict, donate=["model", "x"])
eqx.filter_vmap(predict, spmd_axis_name="batch")


# Operations on a whole model.

reveal_type(nn.freeze(model, lambda model: model.weight))  # Linear
reveal_type(nn.unfreeze(model))  # Linear
reveal_type(nn.delete_init_state(model))  # Linear
nn.freeze(model, lambda model: model.wieght)  # mistake


# Training.


class Batch(NamedTuple):
    x: Array
    y: Array


def loss(model: nn.Linear, batch: Batch, key: PRNGKeyArray) -> Array:
    return jnp.mean((jax.vmap(model)(batch.x) - batch.y) ** 2)


def loss_and_outputs(
    model: nn.Linear, batch: Batch, key: PRNGKeyArray
) -> tuple[Array, list[Array]]:
    return loss(model, batch, key), [jax.vmap(model)(batch.x)]


def stateful_loss(
    model: nn.Linear, state: nn.State, batch: Batch, key: PRNGKeyArray
) -> tuple[Array, nn.State]:
    return loss(model, batch, key), state


optimiser = optax.adam(1e-3)
batch = Batch(x, x)
state = train.TrainState.create(model, optimiser, key=key)
step = train.make_step(loss, optimiser)
step_with_outputs = train.make_step(loss_and_outputs, optimiser, has_aux=True)
stateful_step = train.make_step(stateful_loss, optimiser)
result = train.fit(state, step, [batch], num_steps=1)

reveal_type(state)  # TrainState[Linear]
reveal_type(step(state, batch))  # tuple[TrainState[Linear], Array]
reveal_type(step_with_outputs(state, batch))  # tuple[TrainState[Linear], Array, list[Array]]
reveal_type(result.state.model)  # Linear
reveal_type(result.history)  # tuple[float, ...]
reveal_type(train.keep_if_finite(state, state, x))  # TrainState[Linear]
reveal_type(train.minibatches(batch, 2, seed=0))  # Minibatches[Batch]
untyped_step = train.make_step(lambda model, batch, key: jnp.mean(model(batch)), optimiser)
untyped_step(state, batch)
train.make_step(loss)  # mistake
train.make_step(loss_and_outputs, optimiser)  # mistake
train.make_step(loss, optimiser, has_aux=True)  # mistake
step(state, x)  # mistake
train.fit(state, step, [x], num_steps=1)  # mistake


# Bayesian networks.

bayesian = nn.BayesianMLP(3, 3, width_size=8, depth=1, key=key)


def log_likelihood(model: nn.BayesianMLP, example: Batch, key: PRNGKeyArray) -> Array:
    return jnp.sum(model(example.x, key=key) - example.y)


reveal_type(bayes.negative_elbo(bayesian, log_likelihood, batch, num_data=3, key=key))  # Array
reveal_type(bayes.predict_samples(bayesian, x, key=key, num_samples=2))  # Array
reveal_type(bayes.CategoricalMixture(x).entropy)  # Array
bayes.negative_elbo(
    bayesian, lambda model, example, key: model(example.x).sum(), batch, num_data=3, key=key
)
bayes.negative_elbo(model, log_likelihood, batch, num_data=3, key=key)  # mistake
bayes.negative_elbo(bayesian, log_likelihood, x, num_data=3, key=key)  # mistake
