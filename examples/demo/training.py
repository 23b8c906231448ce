"""The demo's data sets, and two networks for each: likelihood, settings and training.

The settings were chosen on validation parts of the training data, never on test data. Both networks
of a data set have the same architecture. `N` is the number of examples, `D` the number of features.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.scipy.stats import norm
from jaxtyping import Array, Float, PRNGKeyArray, PyTree
from sklearn import datasets

import eqxlike as eqx
from eqxlike import bayes, nn, train

# --- Real data: scikit-learn's bundled diabetes and digits, split and standardised ---


TEST_FRACTION = 0.3
VALIDATION_FRACTION = 0.25
"""The fraction of the training part that is used for validation.

Validation chooses the number of steps of the plain network and the penalties of the baselines. The
plain network and the baselines are then trained on the whole training part.
"""

Name = Literal["diabetes", "digits"]


class Examples(NamedTuple):
    """Features `x` of shape (N, D) and targets `y` of shape (N,), or one row of each."""

    x: Any
    y: Any


@dataclasses.dataclass(frozen=True)
class Data:
    """A data set, ready to train on: standardised, in 32 bits.

    - `name`: the name of the data set.
    - `train`: the training part.
    - `test`: the test part, which is not used to fit or choose anything.
    - `centre`, `scale`: mean and standard deviation of the target before it was standardised; 0 and
      1 for class labels.
    """

    name: Name
    train: Examples
    test: Examples
    centre: float = 0.0
    scale: float = 1.0

    @property
    def is_regression(self) -> bool:
        """Returns True if the target is a number, and False if it is a class."""
        return self.name == "diabetes"

    def validation_split(self) -> tuple[Examples, Examples]:
        """Splits the training part into one part to fit, and one for validation."""
        x, y = self.train
        size = round(VALIDATION_FRACTION * len(y))
        return Examples(x[size:], y[size:]), Examples(x[:size], y[:size])


def load(name: Name) -> Examples:
    """Loads a data set from scikit-learn, in its original units."""
    if name == "diabetes":
        return Examples(*datasets.load_diabetes(return_X_y=True, scaled=False))
    return Examples(*datasets.load_digits(return_X_y=True))


def prepare(name: Name, whole: Examples, *, seed: int) -> Data:
    """Splits and standardises a data set.

    `seed` determines the split. Means and scales come from the training part only. All pixels of
    the digits share one scale, so that pixels at the rim, which are nearly always blank, are not
    magnified.
    """
    order = np.random.default_rng(seed).permutation(len(whole.y))
    size = round(TEST_FRACTION * len(order))
    test, train = (Examples(whole.x[part], whole.y[part]) for part in (order[:size], order[size:]))
    mean, spread = train.x.mean(axis=0), train.x.std(axis=0)
    centre, scale, dtype = train.y.mean(), train.y.std(), np.float32
    if name == "digits":
        spread, centre, scale, dtype = np.sqrt(np.mean(spread**2)), 0, 1, np.int32

    def scaled(part: Examples) -> Examples:
        x, y = (part.x - mean) / spread, (part.y - centre) / scale
        return Examples(x.astype(np.float32), y.astype(dtype))

    return Data(name, scaled(train), scaled(test), float(centre), float(scale))


# --- The networks ---


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Architecture and training of the networks for one data set.

    - `width_size`: units in each hidden layer.
    - `depth`: number of hidden layers.
    - `steps`: training steps of the Bayesian network, and maximum steps of the plain network.
    - `batch_size`: examples in a minibatch, for the Bayesian network.
    - `learning_rate`: initial rate of Adam for the Bayesian network, before a cosine decay.
    - `prior_scale`: scale of the prior on the weights, see `nn.BayesianLinear`.
    - `wide_prior_scale`: scale of the prior for the methods of `--method`, which do not temper the
      posterior by `kl_weight`.
    - `kl_weight`: weight of the KL term in the ELBO. At 1 the ELBO is a lower bound of the
      evidence; below 1 the posterior is tempered, and narrower than the exact posterior.
    - `num_samples`: number of networks drawn from the posterior for a prediction.
    - `plain_batch_size`: examples in a minibatch, for the plain network.
    - `plain_learning_rate`: rate of AdamW for the plain network.
    - `weight_decay`: decay of AdamW, on weights and not on biases.
    - `rounds`: rounds of the dispatch table; 0 for none.
    """

    width_size: int
    depth: int = 1
    steps: int
    batch_size: int
    learning_rate: float = 1e-2
    prior_scale: float = 1.0
    wide_prior_scale: float = 1.0
    kl_weight: float = 1.0
    num_samples: int
    plain_batch_size: int
    plain_learning_rate: float = 3e-3
    weight_decay: float
    rounds: int = 25


SETTINGS: dict[Name, Settings] = {
    "diabetes": Settings(
        width_size=8,
        steps=2000,
        batch_size=64,
        num_samples=200,
        plain_batch_size=64,
        weight_decay=1,
    ),
    # With a KL weight of 1, nine thousand weights underfit thirteen hundred images: the validation
    # NLL is 0.08 to 0.1 for any prior scale, compared with 0.06 here. A cold posterior predicts
    # best, as Wenzel et al. (2020) found for larger networks, "How Good is the Bayes Posterior in
    # Deep Neural Networks Really?"
    "digits": Settings(
        width_size=128,
        steps=3000,
        batch_size=256,
        wide_prior_scale=8.0,
        kl_weight=0.002,
        num_samples=100,
        plain_batch_size=128,
        weight_decay=0.3,
    ),
}

QUICK_STEPS = 200


def settings_for(name: Name, *, steps: int | None, is_quick: bool) -> Settings:
    """The settings of a data set.

    **Arguments:**

    - `name`: the name of the data set.
    - `steps`: replaces the number of training steps.
    - `is_quick`: whether to use shorter settings.
    """
    changed = {}
    if is_quick:
        # The dispatch table takes as long to compile as everything else, so only one data set has a
        # dispatch table.
        changed = {"steps": QUICK_STEPS, "rounds": 5 if name == "diabetes" else 0}
    if steps is not None:
        changed["steps"] = steps
    return dataclasses.replace(SETTINGS[name], **changed)


Network = nn.BayesianMLP | nn.MLP


class Model(eqx.Module):
    """A network with the likelihood of its data.

    For regression, the likelihood is `y ~ N(network(x), exp(log_noise)^2)`, with one learnt noise
    for all inputs. For classification, `log_noise` is None and `y ~
    Categorical(softmax(network(x)))`.
    """

    network: Network
    log_noise: Float[Array, ""] | None

    def log_likelihood(self, example: Examples, key: PRNGKeyArray) -> Float[Array, ""]:
        output = self.network(example.x, key=key)
        if self.log_noise is None:
            return jax.nn.log_softmax(output)[example.y]
        return norm.logpdf(example.y, output, jnp.exp(self.log_noise))


def sizes_of(data: Data, settings: Settings) -> tuple[int, Any, int, int]:
    """The sizes of the networks: input, output, width and depth."""
    out_size = "scalar" if data.is_regression else int(data.train.y.max()) + 1
    return data.train.x.shape[1], out_size, settings.width_size, settings.depth


@eqx.filter_jit
def network_outputs(
    network: Network, x: Float[Array, "N D"], key: PRNGKeyArray, num_samples: int
) -> Float[Array, "S N ..."]:
    """The outputs of `num_samples` networks drawn from the posterior.

    For a plain network, `num_samples` must be 1.
    """
    return bayes.predict_samples(network, x, key=key, num_samples=num_samples)


# --- Training ---


VALIDATIONS = 40
"""The number of evaluations of a plain network on the validation part."""

MOVES, LINES = 50, 5
"""The number of progress reports: `MOVES` on a terminal with a bar, otherwise `LINES` lines."""


class Training(NamedTuple):
    """A training and its result.

    - `result`: the result of `train.fit`: the state after the last good step, the losses, and why
      training stopped.
    - `step`: the training step.
    - `planned`: the number of steps that were planned.
    """

    result: train.FitResult
    step: Callable[..., Any]
    planned: int


def train_bayesian(data: Data, settings: Settings, *, seed: int) -> Training:
    """Trains a Bayesian network on the minibatch ELBO.

    Training needs no validation part, because the KL to the prior prevents overfitting.
    """

    def loss(model: Model, batch: Examples, key: PRNGKeyArray) -> Float[Array, ""]:
        return bayes.negative_elbo(model, Model.log_likelihood, batch, key=key, **options)

    options: Any = {"num_data": len(data.train.y), "kl_weight": settings.kl_weight}
    options["per_example"] = True
    optimiser = optax.adam(optax.cosine_decay_schedule(settings.learning_rate, settings.steps))
    prior: Any = {"prior_scale": settings.prior_scale}
    state = _first_state(data, settings, nn.BayesianMLP, optimiser, seed, **prior)
    batches = _batches(data.train, settings.batch_size, seed)
    step = train.make_step(loss, optimiser)
    return _fit(state, step, batches, settings.steps, f"{data.name}, Bayesian")


def train_plain(data: Data, settings: Settings, *, seed: int) -> Training:
    """Trains a plain network with weight decay and early stopping.

    First, one part of the training data is used to train, and the rest to find the number of steps
    with the lowest validation loss. Then the network is trained for this number of steps on all
    training data.
    """
    optimiser = optax.adamw(
        settings.plain_learning_rate, weight_decay=settings.weight_decay, mask=_is_weight
    )
    step, mean_nll = train.make_step(_mean_nll, optimiser), eqx.filter_jit(_mean_nll)
    fit_part, validation = data.validation_split()
    watch = train.EarlyStopping("nll", mode="min", patience=settings.steps, restore_best=False)
    chosen = _fit(
        _first_state(data, settings, nn.MLP, optimiser, seed),
        step,
        _batches(fit_part, settings.plain_batch_size, seed),
        settings.steps,
        f"{data.name}, plain MLP, how long to train",
        evaluate=lambda state: {"nll": mean_nll(state.model, validation, state.key)},
        evaluate_every=max(1, settings.steps // VALIDATIONS),
        callbacks=[watch],
    )
    if chosen.result.stopped != "finished":
        return chosen
    state = _first_state(data, settings, nn.MLP, optimiser, seed)
    batches = _batches(data.train, settings.plain_batch_size, seed)
    return _fit(state, step, batches, watch.best_step or settings.steps, f"{data.name}, plain MLP")


def _first_state(
    data: Data, settings: Settings, kind: type[Network], optimiser: Any, seed: int, **options: Any
) -> train.TrainState:
    model_key, state_key = jax.random.split(jax.random.key(seed))
    network = kind(*sizes_of(data, settings), jax.nn.silu, key=model_key, **options)
    # The target is standardised, so the noise starts at exp(0) = 1.
    log_noise = jnp.zeros(()) if data.is_regression else None
    return train.TrainState.create(Model(network, log_noise), optimiser, key=state_key)


def _fit(
    state: train.TrainState, step: Any, batches: Any, steps: int, label: str, **options: Any
) -> Training:
    options["log_every"] = max(1, steps // (MOVES if sys.stderr.isatty() else LINES))
    with train.progress(steps, label=label) as on_log:
        result = train.fit(state, step, batches, num_steps=steps, on_log=on_log, **options)
    return Training(result, step, steps)


def _mean_nll(model: Model, examples: Examples, key: PRNGKeyArray) -> Float[Array, ""]:
    """The mean negative log likelihood, the loss of a plain network. The key is not used."""
    keys = jax.random.split(key, examples.y.shape[0])
    return -jnp.mean(jax.vmap(model.log_likelihood)(examples, keys))


def _is_weight(parameters: PyTree) -> PyTree:
    """Whether weight decay applies to each parameter: to matrices, not to biases or the noise."""
    return jax.tree.map(lambda leaf: jnp.ndim(leaf) == 2, parameters)


def _batches(part: Examples, batch_size: int, seed: int) -> Iterator[Examples]:
    return train.minibatches(part, min(batch_size, len(part.y)), seed=seed)
