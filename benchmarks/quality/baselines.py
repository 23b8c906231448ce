"""The network that all methods fit, its prior and its likelihood; and baselines for the methods:
the plain network, and scikit-learn's models.
"""

import functools
import importlib
import itertools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import numpyro.distributions as dist
import optax
from jax.typing import ArrayLike

from benchmarks.quality.data import TEST_PART, DataSet, Prediction, Split, scores, split_at
from eqxlike import bayes, combine, filter_jit, is_inexact_array, nn, partition

WIDTH = 50
DROPOUT = 0.1
PRIOR_SCALES = (0.5, 1.0, 2.0, 4.0, 8.0)
"""The scales of the prior to choose from. Standardised targets are about 1, and the logits of
confident classes are larger.
"""

NUM_PARTS = 3
"""The number of folds of the training part that choose the scale of the prior."""


def network(data: DataSet, key: jax.Array) -> nn.Sequential:
    """A network with a hidden layer of 50 units and ReLU. Only MC dropout drops units.

    It returns a number, the logit of the second of two classes, or a logit for each class.
    """
    hidden_key, output_key = jr.split(key)
    num_classes = data.num_classes or 1
    return nn.Sequential(
        [
            nn.Linear(data.x.shape[1], WIDTH, key=hidden_key),
            nn.Lambda(jax.nn.relu),
            nn.Dropout(DROPOUT),
            nn.Linear(WIDTH, num_classes if num_classes > 2 else "scalar", key=output_key),
        ]
    )


def likelihood(data: DataSet) -> bayes.Likelihood:
    """The likelihood of standardised targets or of classes."""
    if data.is_regression:
        return bayes.Gaussian(scale=dist.Gamma(2.0, 4.0))
    return bayes.Bernoulli() if data.num_classes == 2 else bayes.Categorical()


def prior(data: DataSet, scale: float) -> bayes.Prior:
    """A normal prior. Biases have this scale. Weights have this scale divided by the square root of
    the number of inputs of the layer.

    Functions drawn from the prior vary about as much for any number of features.
    """
    # The scales are arrays, so that all scales share one program.
    features, hidden, biases = jnp.asarray(
        [scale / math.sqrt(data.x.shape[1]), scale / math.sqrt(WIDTH), scale], jnp.float32
    )
    return bayes.prior_by_path(
        {
            "layers[0].weight": dist.Normal(0.0, features),
            "layers[3].weight": dist.Normal(0.0, hidden),
            "**": dist.Normal(0.0, biases),
        }
    )


@functools.cache
def prior_scale(split: Split) -> float:
    """The scale for which `bayes.MAP` best predicts held-out folds of the training part.

    The test part is not used. All methods use this scale.
    """
    held_out = [split.train[index::NUM_PARTS] for index in range(NUM_PARTS)]
    parts = [
        split_at(split.data, held, np.setdiff1d(split.train, held, assume_unique=True))
        for held in held_out
    ]

    def nll(scale: float) -> float:
        return float(np.mean([_nll_of_map(part, scale) for part in parts]))

    return min(PRIOR_SCALES, key=nll)


def _nll_of_map(split: Split, scale: float) -> float:
    network_key, infer_key, predict_key = jr.split(jr.key(0), 3)
    given = target(split, network_key, scale)
    posterior = bayes.infer(given, bayes.MAP(), key=infer_key, progress=False)
    prediction = bayes.predict(posterior, split.x_test, key=predict_key, num_samples=1)
    return scores(prediction, split).nll


def target(split: Split, key: jax.Array, scale: float) -> bayes.Posterior:
    """The posterior of the network given the training part, with a prior of this scale."""
    data = split.data
    given = network(data, key), prior(data, scale), likelihood(data)
    return bayes.Posterior(*given, (split.x, split.y))


# --- predictions ---

Predict = Callable[[Split, jax.Array], Prediction]

STEPS = 2000
LEARNING_RATE = 3e-3

MOST_FOR_KERNEL = 200
"""The number of examples that a Gaussian process uses to fit the parameters of its kernel."""

MOST_FOR_CLASSES = 1000
"""The maximum number of examples for Gaussian process classification, whose cost is cubic."""

VARIANCES = (3.0, 30.0, 300.0)
LENGTHS = (0.5, 1.0, 2.0, 4.0)
"""Kernel lengths of classifiers to choose from, as multiples of the root of the features."""


def of_normals(means: ArrayLike, scales: ArrayLike) -> bayes.Mixture:
    """A prediction with a normal distribution for each input."""
    loc = jnp.asarray(means, jnp.float32)[None]
    scale = jnp.broadcast_to(jnp.asarray(scales, jnp.float32), loc.shape)
    return bayes.Mixture(dist.Normal(loc, scale))


def of_probabilities(probabilities: np.ndarray) -> bayes.CategoricalMixture:
    """A prediction with the class probabilities, shape `(N, C)`."""
    return bayes.CategoricalMixture(jnp.log(jnp.asarray(probabilities, jnp.float32))[None])


def _residual_scale(means: np.ndarray, y: np.ndarray) -> float:
    """The maximum-likelihood standard deviation of the noise on the training part."""
    return float(np.sqrt(np.mean((y - means) ** 2)))


# --- the network, trained without a prior ---


def plain_network(split: Split, key: jax.Array, steps: int = STEPS) -> Prediction:
    """The prediction of the network trained with Adam for maximum likelihood."""
    model = nn.inference_mode(network(split.data, key))
    return _prediction(_trained(model, likelihood(split.data), split.x, split.y, steps)[0], split)


def stopped_early(split: Split, key: jax.Array, steps: int = STEPS) -> Prediction:
    """As `plain_network`, with the number of steps that is best on a held-out tenth."""
    model = nn.inference_mode(network(split.data, key))
    of, num_held = likelihood(split.data), round(TEST_PART * len(split.x))
    x, y, x_held, y_held = (
        each[part]
        for part in (slice(num_held, None), slice(num_held))
        for each in (split.x, split.y)
    )
    _, losses = _trained(model, of, x, y, steps, (x_held, y_held))
    best = np.argmin(losses)
    return _prediction(_trained(model, of, split.x, split.y, best)[0], split)


def _prediction(model: nn.Sequential, split: Split) -> Prediction:
    outputs = jax.vmap(model)(jnp.asarray(split.x_test))
    if split.data.is_regression:
        means = jax.vmap(model)(jnp.asarray(split.x))
        return of_normals(outputs, _residual_scale(np.asarray(means), split.y))
    if split.data.num_classes == 2:
        outputs = jnp.stack([jnp.zeros_like(outputs), outputs], axis=-1)
    return bayes.CategoricalMixture(outputs[None])


def _trained(
    model: nn.Sequential,
    of: bayes.Likelihood,
    x: np.ndarray,
    y: np.ndarray,
    steps: int | np.integer,
    held_out: tuple[np.ndarray, np.ndarray] | None = None,
) -> tuple[nn.Sequential, np.ndarray]:
    """The model after this many steps, and the loss on held-out examples before each step."""
    train, held = jtu.tree_map(jnp.asarray, ((x, y), held_out or (x, y)))
    num_losses = 1 if held_out is None else int(steps)
    model, losses = _descend(model, of, train, held, jnp.asarray(steps), num_losses)
    return model, np.asarray(losses)


@filter_jit
def _descend(
    model: nn.Sequential,
    of: bayes.Likelihood,
    train: tuple[jax.Array, jax.Array],
    held_out: tuple[jax.Array, jax.Array],
    steps: jax.Array,
    num_losses: int,
) -> tuple[nn.Sequential, jax.Array]:
    arrays, rest = partition(model, is_inexact_array)
    optimiser = optax.adam(LEARNING_RATE)

    def loss(arrays: nn.Sequential, data: tuple[jax.Array, jax.Array]) -> jax.Array:
        outputs = jax.vmap(combine(arrays, rest))(data[0])
        # For normal noise of any scale, maximum likelihood is least squares.
        known = {"scale": jnp.ones(())} if isinstance(of, bayes.Gaussian) else {}
        return -jnp.mean(
            jax.vmap(lambda output, y: of.log_prob(output, known, y))(outputs, data[1])
        )

    def step(index: jax.Array, carry: tuple) -> tuple:
        arrays, state, losses = carry
        if num_losses > 1:
            losses = losses.at[index].set(loss(arrays, held_out))
        updates, state = optimiser.update(jax.grad(loss)(arrays, train), state)
        return optax.apply_updates(arrays, updates), state, losses

    carry = arrays, optimiser.init(arrays), jnp.zeros(num_losses)
    arrays, _, losses = jax.lax.fori_loop(0, steps, step, carry)
    return combine(arrays, rest), losses


# --- models of scikit-learn ---


def one_thread(predict: Predict) -> Predict:
    """Makes `predict` run scikit-learn's linear algebra on one thread.

    scikit-learn makes many small BLAS calls, which are slower with several threads on busy cores.
    """

    @functools.wraps(predict)
    def run(split: Split, key: jax.Array) -> Prediction:
        with importlib.import_module("threadpoolctl").threadpool_limits(1):
            return predict(split, key)

    return run


@one_thread
def linear(split: Split, key: jax.Array) -> Prediction:
    """Ridge or logistic regression, with the penalty chosen by cross-validation."""
    del key  # It is deterministic.
    models = importlib.import_module("sklearn.linear_model")
    if split.data.is_regression:
        model = models.RidgeCV(alphas=np.logspace(-2, 4, 13)).fit(split.x, split.y)
        scale = _residual_scale(model.predict(split.x), split.y)
        return of_normals(model.predict(split.x_test), scale)
    model = models.LogisticRegressionCV(
        Cs=np.logspace(-3, 2, 6),
        l1_ratios=(0.0,),
        scoring="neg_log_loss",
        cv=5,
        use_legacy_attributes=False,
    )
    return of_probabilities(model.fit(split.x, split.y).predict_proba(split.x_test))


@one_thread
def gaussian_process(split: Split, key: jax.Array) -> Prediction:
    """A Gaussian process with a squared exponential kernel that maximises the evidence.

    Classification fits a process for each class against all other classes.
    """
    del key  # It is deterministic.
    processes = importlib.import_module("sklearn.gaussian_process")
    kernels = importlib.import_module("sklearn.gaussian_process.kernels")
    length = float(np.sqrt(split.x.shape[1]))
    if split.data.is_regression:
        kernel = kernels.ConstantKernel() * kernels.RBF(length) + kernels.WhiteKernel(0.5)
        learnt = processes.GaussianProcessRegressor(kernel).fit(*_first(split)).kernel_
        model = processes.GaussianProcessRegressor(learnt, optimizer=None).fit(split.x, split.y)
        return of_normals(*model.predict(split.x_test, return_std=True))
    fitted = [
        processes.GaussianProcessClassifier(
            kernels.ConstantKernel(variance) * kernels.RBF(length * factor), optimizer=None
        ).fit(*_first(split))
        for variance, factor in itertools.product(VARIANCES, LENGTHS)
    ]
    best = max(fitted, key=lambda each: each.log_marginal_likelihood_value_)
    best.fit(*_first(split, MOST_FOR_CLASSES))
    return of_probabilities(best.predict_proba(split.x_test))


def _first(split: Split, num: int = MOST_FOR_KERNEL) -> tuple[np.ndarray, np.ndarray]:
    return split.x[:num], split.y[:num]
