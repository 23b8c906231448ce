"""Problems with a known posterior: standard deviations of outputs near and far from the data."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

import eqxlike as eqx
from eqxlike import bayes, nn

NUM_INPUTS = 20
"""The number of inputs near the data, and the number of inputs far away."""


class Reference(NamedTuple):
    """Exact standard deviations of the output, at inputs near the data and far away.

    - `r_hat`: the largest R-hat of the chains, or `None` for a closed form.
    """

    near: np.ndarray
    far: np.ndarray
    r_hat: float | None = None


class Problem(NamedTuple):
    """A posterior with exact standard deviations.

    - `target`: makes the posterior from the key of the initial parameters.
    - `near`, `far`: inputs, shape `(NUM_INPUTS, features)`.
    - `closed_form`: the exact standard deviations, or `None` if chains must estimate them.
    """

    name: str
    target: Callable[[jax.Array], bayes.Posterior]
    near: np.ndarray
    far: np.ndarray
    closed_form: Reference | None = None


def standard_deviations(posterior: bayes.FittedPosterior, x: np.ndarray, num: int | None) -> Any:
    """The standard deviations of the output over networks, for each input.

    The output is the function value if the noise is known, and otherwise the logit.

    **Arguments:**

    - `num`: the number of networks, by default all networks of the method.
    """
    prediction = bayes.predict(posterior, x, key=jr.key(0), num_samples=num)
    if isinstance(prediction, bayes.Mixture):
        return np.sqrt(np.asarray(prediction.epistemic, np.float64))
    return np.std(np.asarray(prediction.logits[..., 1], np.float64), axis=0)


# --- References ---

# With four such chains, the error of a standard deviation is about one percent.
LONG = bayes.NUTS(num_samples=5000, num_warmup=1000)
SHORT = bayes.NUTS(num_samples=200, num_warmup=200)


def reference(problem: Problem, method: bayes.NUTS = LONG) -> Reference:
    """The exact standard deviations, or the estimate of long chains."""
    if problem.closed_form is not None:
        return problem.closed_form
    posterior = bayes.infer(problem.target(jr.key(7)), method, key=jr.key(8), progress=False)
    near, far = (standard_deviations(posterior, x, None) for x in (problem.near, problem.far))
    outputs = posterior.diagnostics.outputs
    assert outputs is not None
    return Reference(near, far, float(np.max(outputs.r_hat)))


def _by_algebra(rows: np.ndarray, near: np.ndarray, far: np.ndarray, noise: float) -> Reference:
    """With precision `P = D^T D / noise^2 + I`, the variance of the output is `d^T P^-1 d`.

    **Arguments:**

    - `rows`: the design matrix `D`.
    - `near`, `far`: its rows `d` for other inputs.
    """
    covariance = np.linalg.inv(rows.T @ rows / noise**2 + np.eye(rows.shape[1]))
    scales = (np.sqrt(np.einsum("ij,jk,ik->i", each, covariance, each)) for each in (near, far))
    return Reference(*scales)


# --- Problems ---

FAR = 5.0
"""The distance of far inputs from the centre, relative to the data."""


def _inputs(random: np.random.Generator, num: int, features: int) -> tuple[np.ndarray, ...]:
    """Standard normal training inputs, inputs near them, and far inputs in random directions."""
    x, near, far = (random.normal(size=(each, features)) for each in (num, NUM_INPUTS, NUM_INPUTS))
    far *= FAR * np.sqrt(features) / np.linalg.norm(far, axis=1, keepdims=True)
    return tuple(each.astype(np.float32) for each in (x, near, far))


def _with_ones(x: np.ndarray) -> np.ndarray:
    return np.concatenate([x, np.ones((len(x), 1))], axis=1).astype(np.float64)


def linear_regression() -> Problem:
    """A linear regression with four unknowns and known noise."""
    random, noise = np.random.default_rng(0), 0.5
    x, near, far = _inputs(random, 40, 3)
    y = x @ np.array([1.0, -2.0, 0.5]) + 0.5 + noise * random.normal(size=len(x))

    def target(key: jax.Array) -> bayes.Posterior:
        model = nn.Linear(3, "scalar", key=key)
        data = x, y.astype(np.float32)
        return bayes.Posterior(model, bayes.normal(), bayes.Gaussian(noise), data)

    known = _by_algebra(_with_ones(x), _with_ones(near), _with_ones(far), noise)
    return Problem("linear regression", target, near, far, known)


class Features(eqx.Module):
    """`sqrt(2 / D) cos(w x + b)`. Linear regression on these approximates a Gaussian process.

    Rahimi and Recht (2007), "Random Features for Large-Scale Kernel Machines".
    """

    weight: np.ndarray
    bias: np.ndarray

    def __call__(self, x: Any, *, key: Any = None) -> Any:
        waves = jnp.cos(jnp.asarray(self.weight) @ x + jnp.asarray(self.bias))
        return np.sqrt(2 / len(self.bias)).astype(np.float32) * waves


def gaussian_process() -> Problem:
    """Regression on a hundred random features of a squared exponential kernel, with known noise."""
    random, noise, length, num = np.random.default_rng(1), 0.2, 0.5, 100
    weight = (random.normal(size=(num, 1)) / length).astype(np.float32)
    bias = random.uniform(0, 2 * np.pi, num).astype(np.float32)
    x, near = (random.uniform(-1, 1, (each, 1)).astype(np.float32) for each in (50, NUM_INPUTS))
    far = np.linspace(2.0, 4.0, NUM_INPUTS, dtype=np.float32)[:, None]
    y = np.sin(4 * x[:, 0]) + noise * random.normal(size=len(x))

    def design(x: np.ndarray) -> np.ndarray:
        return np.sqrt(2 / num) * np.cos(x.astype(np.float64) @ weight.T + bias)

    def target(key: jax.Array) -> bayes.Posterior:
        layer = nn.Linear(num, "scalar", use_bias=False, key=key)
        model = nn.Sequential([nn.freeze(Features(weight, bias)), layer])
        data = x, y.astype(np.float32)
        return bayes.Posterior(model, bayes.normal(), bayes.Gaussian(noise), data)

    known = _by_algebra(design(x), design(near), design(far), noise)
    return Problem("Gaussian process", target, near, far, known)


def logistic_regression() -> Problem:
    """A logistic regression with three unknowns and two overlapping classes."""
    random = np.random.default_rng(2)
    x, near, far = _inputs(random, 60, 2)
    logits = x @ np.array([1.0, -1.0]) + 0.5
    y = (random.uniform(size=len(x)) < 1 / (1 + np.exp(-logits))).astype(np.int32)

    def target(key: jax.Array) -> bayes.Posterior:
        model = nn.Linear(2, "scalar", key=key)
        return bayes.Posterior(model, bayes.normal(), bayes.Bernoulli(), (x, y))

    return Problem("logistic regression", target, near, far)


def network() -> Problem:
    """A network with five tanh units, 21 unknowns and known noise."""
    random, noise = np.random.default_rng(3), 0.3
    x, near, far = _inputs(random, 60, 2)
    y = np.sin(2 * x[:, 0]) + 0.5 * x[:, 1] + noise * random.normal(size=len(x))

    def target(key: jax.Array) -> bayes.Posterior:
        model = nn.MLP(2, "scalar", width_size=5, depth=1, activation=jnp.tanh, key=key)
        data = x, y.astype(np.float32)
        return bayes.Posterior(model, bayes.normal(), bayes.Gaussian(noise), data)

    return Problem("network", target, near, far)


PROBLEMS: Mapping[str, Callable[[], Problem]] = {
    "linear regression": linear_regression,
    "Gaussian process": gaussian_process,
    "logistic regression": logistic_regression,
    "network": network,
}
