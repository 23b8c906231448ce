"""Training of the demo's two networks."""

import math
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from .. import train
from .._transforms import filter_jit
from ..bayes import negative_elbo
from ._data import Data, Part
from ._models import Example, Model, Settings, bayesian_model, plain_model

Step = Callable[[train.TrainState, Example], tuple[train.TrainState, Array]]

VALIDATIONS = 40
"""A plain network is evaluated on the validation part this many times."""

MOVES, LINES = 50, 5
"""A training reports this many times: by a progress bar on a terminal, by lines elsewhere."""


class Training(NamedTuple):
    """A training and its result.

    - `result`: the result of `train.fit`: the state after the last good step, the losses, why it
      stopped.
    - `step`: the training step.
    - `planned`: the number of steps that were planned.
    """

    result: train.FitResult
    step: Step
    planned: int

    @property
    def model(self) -> Model:
        """The trained model."""
        return self.result.state.model


def train_bayesian(data: Data, settings: Settings, *, seed: int) -> Training:
    """Trains a Bayesian network on the minibatch ELBO.

    It needs no validation part: the KL to the prior keeps it from overfitting.
    """

    def loss(model: Model, batch: Example, key: PRNGKeyArray) -> Float[Array, ""]:
        return negative_elbo(
            model,
            lambda model, example, key: model.log_likelihood(example, key),
            batch,
            num_data=len(data.train),
            key=key,
            kl_weight=settings.kl_weight,
            per_example=True,
        )

    model_key, state_key = jax.random.split(jax.random.key(seed))
    model = bayesian_model(data, settings, key=model_key)
    optimiser = optax.adam(optax.cosine_decay_schedule(settings.learning_rate, settings.steps))
    state = train.TrainState.create(model, optimiser, key=state_key)
    step = train.make_step(loss, optimiser)
    batches = _batches(data.train, settings.batch_size, seed)
    result = _fit(state, step, batches, settings.steps, f"{data.name}, Bayesian")
    return Training(result, step, settings.steps)


def train_plain(data: Data, settings: Settings, *, seed: int) -> Training:
    """Trains a plain network with weight decay, for as long as a validation part says.

    It is trained on one part of the training part first, with the other to tell after how many
    steps its loss on unseen data was least, and then for that number of steps on the whole training
    part: no data is lost to the choice.
    """

    def new_state() -> train.TrainState:
        model_key, state_key = jax.random.split(jax.random.key(seed))
        model = plain_model(data, settings, key=model_key)
        return train.TrainState.create(model, optimiser, key=state_key)

    optimiser = optax.adamw(
        settings.plain_learning_rate, weight_decay=settings.weight_decay, mask=_is_weight
    )
    step = train.make_step(_mean_nll, optimiser)
    label = f"{data.name}, plain MLP"
    result, best = _choose_steps(new_state(), step, data, settings, seed, label)
    if result.stopped != "finished":
        return Training(result, step, settings.steps)
    batches = _batches(data.train, settings.plain_batch_size, seed)
    return Training(_fit(new_state(), step, batches, best, label), step, best)


def _fit(
    state: train.TrainState, step: Step, batches: Iterator[Example], steps: int, label: str
) -> train.FitResult:
    with train.progress(steps, label=label) as on_log:
        return train.fit(
            state, step, batches, num_steps=steps, log_every=_log_every(steps), on_log=on_log
        )


def _log_every(steps: int) -> int:
    return max(1, steps // (MOVES if sys.stderr.isatty() else LINES))


def _choose_steps(
    state: train.TrainState, step: Step, data: Data, settings: Settings, seed: int, label: str
) -> tuple[train.FitResult, int]:
    """Trains, watching the validation part; returns the result and the best number of steps."""
    fit_part, validation = data.validation_split()
    held_out = Example(validation.x, validation.y)
    batches = _batches(fit_part, settings.plain_batch_size, seed)
    steps, every = settings.steps, max(1, settings.steps // VALIDATIONS)
    best, least = steps, math.inf
    made, history = 0, ()
    with train.progress(steps, label=f"{label}, how long to train") as on_log:
        while True:
            result = train.fit(state, step, batches, num_steps=min(every, steps - made))
            state, history = result.state, history + result.history
            made = len(history)
            if result.stopped == "interrupted":
                message = f"Interrupted after {made} of {steps} steps, choosing how many to take."
                return result._replace(history=history, message=message), best
            if result.stopped == "diverged":
                return result._replace(history=history), best
            nll = float(_validation_nll(state.model, held_out, state.key))
            if nll < least:
                best, least = made, nll
            if made % _log_every(steps) < every:
                on_log(made, nll)
            if made == steps:
                return result._replace(history=history), best


@filter_jit
def _validation_nll(model: Model, examples: Example, key: PRNGKeyArray) -> Float[Array, ""]:
    return _mean_nll(model, examples, key)


def _mean_nll(model: Model, examples: Example, key: PRNGKeyArray) -> Float[Array, ""]:
    """The mean negative log likelihood; the loss of a plain network, which ignores the key."""
    keys = jax.random.split(key, examples.y.shape[0])
    return -jnp.mean(jax.vmap(model.log_likelihood)(examples, keys))


def _is_weight(parameters: PyTree) -> PyTree:
    """Whether each parameter decays: the matrices do, biases and the noise do not."""
    return jax.tree_util.tree_map(lambda leaf: jnp.ndim(leaf) == 2, parameters)


def _batches(part: Part, batch_size: int, seed: int) -> Iterator[Example]:
    return train.minibatches(Example(part.x, part.y), min(batch_size, len(part)), seed=seed)
