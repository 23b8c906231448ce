"""The demo's data sets, its two networks for each with their likelihood, and their training.

The settings were chosen by the validation part of training parts, never by a test part. The two
networks of a data set have the same architecture. `N` is the number of examples, `D` the number of
features.
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
from jaxtyping import Array, Float, PRNGKeyArray, PyTree, Shaped

from .. import train
from .._module import Module
from .._transforms import filter_jit
from ..bayes import negative_elbo, predict_samples
from ..nn import MLP, BayesianMLP

# --- Real data: scikit-learn's bundled diabetes and digits, split and standardised ---


TEST_FRACTION = 0.3
VALIDATION_FRACTION = 0.25
"""The share of the training part by which the plain network and the baselines choose how far to
train and how much to regularise; they are then trained on the whole training part.
"""

Name = Literal["diabetes", "digits"]


@dataclasses.dataclass(frozen=True)
class Part:
    """Examples: `x` of shape (N, D), `y` of shape (N,), floats or class labels."""

    x: Shaped[np.ndarray, "N D"]
    y: Shaped[np.ndarray, " N"]

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: slice) -> "Part":
        return Part(self.x[index], self.y[index])


@dataclasses.dataclass(frozen=True)
class Scaling:
    """The affine map that gives the training part mean 0 and unit scale."""

    mean: Float[np.ndarray, "*D"]
    scale: Float[np.ndarray, "*D"]

    def __call__(self, values: Shaped[np.ndarray, "N *D"]) -> Float[np.ndarray, "N *D"]:
        return ((values - self.mean) / self.scale).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Data:
    """A data set, ready to train on: standardised, in 32 bits.

    - `name`: the name of the data set.
    - `train`: the training part.
    - `test`: the test part: nothing is fitted to it or chosen by it.
    - `x_scaling`: the scaling of the features.
    - `y_scaling`: the scaling of the target; None for class labels.
    """

    name: Name
    train: Part
    test: Part
    x_scaling: Scaling
    y_scaling: Scaling | None

    @property
    def is_regression(self) -> bool:
        """Whether the target is a number rather than a class."""
        return self.y_scaling is not None

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return int(self.train.y.max()) + 1

    def validation_split(self) -> tuple[Part, Part]:
        """The training part in two: to fit to, and to choose by."""
        size = round(VALIDATION_FRACTION * len(self.train))
        return self.train[size:], self.train[:size]


def load(name: Name) -> Part:
    """A data set as scikit-learn has it, in its own units."""
    from sklearn import datasets

    if name == "diabetes":
        x, y = datasets.load_diabetes(return_X_y=True, scaled=False)
    else:
        x, y = datasets.load_digits(return_X_y=True)
    return Part(np.asarray(x), np.asarray(y))


def prepare(name: Name, whole: Part, *, seed: int) -> Data:
    """Splits and standardises a data set.

    `seed` decides the shuffle and so the split. Means and scales are those of the training part
    alone. The pixels of the digits share a unit and so one scale: pixels at the rim, which are
    hardly ever inked, are not blown up to the size of the others.
    """
    order = np.random.default_rng(seed).permutation(len(whole))
    size = round(TEST_FRACTION * len(whole))
    test, train = (Part(whole.x[part], whole.y[part]) for part in (order[:size], order[size:]))
    is_regression = name == "diabetes"
    spread = np.std(train.x, axis=0)
    if not is_regression:
        spread = np.full_like(spread, np.sqrt(np.mean(spread**2)))
    x_scaling = Scaling(np.mean(train.x, axis=0), spread)
    y_scaling = Scaling(train.y.mean(0), train.y.std(0)) if is_regression else None

    def scaled(part: Part) -> Part:
        y = part.y.astype(np.int32) if y_scaling is None else y_scaling(part.y)
        return Part(x_scaling(part.x), y)

    return Data(name, scaled(train), scaled(test), x_scaling, y_scaling)


# --- The networks ---


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Architecture and training of the networks for one data set.

    - `width_size`: units in each hidden layer.
    - `depth`: number of hidden layers.
    - `steps`: training steps of the Bayesian network, and the most that the plain one may take.
    - `batch_size`: examples in a minibatch, for the Bayesian network.
    - `learning_rate`: rate of Adam for the Bayesian network, where a cosine decay starts.
    - `prior_scale`: scale of the prior on the weights, see `nn.BayesianLinear`.
    - `wide_prior_scale`: that for the methods of `--method`, which find the whole posterior and not
      one tempered by `kl_weight`.
    - `kl_weight`: weight of the KL in the ELBO. At 1 the ELBO bounds the evidence; below, the
      posterior is tempered, narrower than the model and the data say.
    - `num_samples`: networks drawn from the posterior for a prediction.
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
        weight_decay=1.0,
    ),
    # At a KL weight of 1 the ELBO gives up fitting nine thousand weights to thirteen hundred
    # images: validation NLL 0.08 to 0.1 for any prior scale, against 0.06 here. The posterior that
    # predicts best is a cold one, as Wenzel et al. (2020) found for larger networks, "How Good is
    # the Bayes Posterior in Deep Neural Networks Really?"
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
    - `steps`: the training steps, instead of its own number.
    - `is_quick`: whether to shorten whatever takes time.
    """
    changed = {}
    if is_quick:
        # The columns of the table take as long to compile as all else: one data set has it.
        changed = {"steps": QUICK_STEPS, "rounds": 5 if name == "diabetes" else 0}
    if steps is not None:
        changed["steps"] = steps
    return dataclasses.replace(SETTINGS[name], **changed)


class Example(NamedTuple):
    """Features `x` of shape (D,) and the target `y` of shape (); or a batch of them."""

    x: Any
    y: Any


class Model(Module):
    """A network with the likelihood of its data.

    Of a number it is `y ~ N(network(x), exp(log_noise)^2)`: the noise is learnt, one number for all
    inputs. Of a class, where `log_noise` is None, it is `y ~ Categorical(softmax(network(x)))`.

    >>> import eqxlike as eqx, jax, jax.numpy as jnp
    >>> network = MLP(2, "scalar", width_size=8, depth=1, key=jax.random.key(0))
    >>> model = Model(network, jnp.zeros(()))
    >>> example = Example(jnp.ones(2), jnp.array(0.0))
    >>> eqx.filter_jit(model.log_likelihood)(example, jax.random.key(1)).shape
    ()
    """

    network: BayesianMLP | MLP
    log_noise: Float[Array, ""] | None

    def log_likelihood(self, example: Example, key: PRNGKeyArray) -> Float[Array, ""]:
        output = self.network(example.x, key=key)
        if self.log_noise is None:
            return jax.nn.log_softmax(output)[example.y]
        return norm.logpdf(example.y, output, jnp.exp(self.log_noise))


def sizes_of(data: Data, settings: Settings) -> tuple[int, int | Literal["scalar"], int, int]:
    """The sizes of the networks: input, output, width and depth."""
    out_size = "scalar" if data.is_regression else data.num_classes
    return data.train.x.shape[1], out_size, settings.width_size, settings.depth


@filter_jit
def network_outputs(
    network: BayesianMLP | MLP, x: Float[Array, "N D"], key: PRNGKeyArray, num_samples: int
) -> Float[Array, "S N ..."]:
    """The outputs of `num_samples` networks drawn from the posterior.

    A plain network is its own only draw: ask it for one.
    """
    return predict_samples(network, x, key=key, num_samples=num_samples)


# --- Training ---


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
        options: Any = {"num_data": len(data.train), "kl_weight": settings.kl_weight}
        return negative_elbo(
            model, Model.log_likelihood, batch, key=key, per_example=True, **options
        )

    model_key, state_key = jax.random.split(jax.random.key(seed))
    sizes = sizes_of(data, settings)
    network = BayesianMLP(*sizes, jax.nn.silu, prior_scale=settings.prior_scale, key=model_key)
    optimiser = optax.adam(optax.cosine_decay_schedule(settings.learning_rate, settings.steps))
    state = _first_state(data, network, optimiser, state_key)
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
        network = MLP(*sizes_of(data, settings), jax.nn.silu, key=model_key)
        return _first_state(data, network, optimiser, state_key)

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


def _first_state(
    data: Data,
    network: BayesianMLP | MLP,
    optimiser: optax.GradientTransformation,
    key: PRNGKeyArray,
) -> train.TrainState:
    # The target is standardised, and at first all of it is noise: exp(0).
    log_noise = jnp.zeros(()) if data.is_regression else None
    return train.TrainState.create(Model(network, log_noise), optimiser, key=key)


def _fit(
    state: train.TrainState,
    step: Step,
    batches: Iterator[Example],
    steps: int,
    label: str,
    **options: Any,
) -> train.FitResult:
    log_every = max(1, steps // (MOVES if sys.stderr.isatty() else LINES))
    with train.progress(steps, label=label) as on_log:
        return train.fit(
            state, step, batches, num_steps=steps, log_every=log_every, on_log=on_log, **options
        )


def _choose_steps(
    state: train.TrainState, step: Step, data: Data, settings: Settings, seed: int, label: str
) -> tuple[train.FitResult, int]:
    """Trains, watching the validation part; returns the result and the best number of steps."""
    fit_part, validation = data.validation_split()
    held_out, mean_nll = Example(validation.x, validation.y), filter_jit(_mean_nll)
    watch = train.EarlyStopping("nll", patience=settings.steps, restore_best=False)
    result = _fit(
        state,
        step,
        _batches(fit_part, settings.plain_batch_size, seed),
        settings.steps,
        f"{label}, how long to train",
        evaluate=lambda state: {"nll": mean_nll(state.model, held_out, state.key)},
        evaluate_every=max(1, settings.steps // VALIDATIONS),
        callbacks=[watch],
    )
    return result, watch.best_step or settings.steps


def _mean_nll(model: Model, examples: Example, key: PRNGKeyArray) -> Float[Array, ""]:
    """The mean negative log likelihood; the loss of a plain network, which ignores the key."""
    keys = jax.random.split(key, examples.y.shape[0])
    return -jnp.mean(jax.vmap(model.log_likelihood)(examples, keys))


def _is_weight(parameters: PyTree) -> PyTree:
    """Whether each parameter decays: the matrices do, biases and the noise do not."""
    return jax.tree_util.tree_map(lambda leaf: jnp.ndim(leaf) == 2, parameters)


def _batches(part: Part, batch_size: int, seed: int) -> Iterator[Example]:
    return train.minibatches(Example(part.x, part.y), min(batch_size, len(part)), seed=seed)
