"""Every method of inference with settings for tests, and target distributions."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro.distributions as dist
import optax

import eqxlike as eqx
from eqxlike import bayes, nn

X = np.linspace(-1.0, 1.0, 12).reshape(6, 2)
Y = X[:, 0] ** 2 - X[:, 1]


def small_target(order=slice(None)):
    """A network of 13 parameters, with dropout, and an unknown scale."""
    keys = jr.split(jr.key(0))
    layers = [
        nn.Linear(2, 3, key=keys[0], dtype=jnp.float64),
        nn.Lambda(jax.nn.tanh),
        nn.Dropout(0.2),
        nn.Linear(3, "scalar", key=keys[1], dtype=jnp.float64),
    ]
    model = nn.Sequential(layers)
    likelihood = bayes.Gaussian(dist.Gamma(2.0, 1.0))
    return bayes.Posterior(model, bayes.normal(0.0, 1.0), likelihood, (X[order], Y[order]))


@dataclasses.dataclass(frozen=True)
class LinearModel:
    """Linear regression with known noise, and its posterior in closed form.

    `w ~ Normal(0, 1)`, `y ~ Normal(X w, noise)`: the posterior is normal with precision
    `P = X^T X / noise^2 + I` and mean `P^-1 X^T y / noise^2`. The bias comes last.
    """

    noise: float = 0.5
    num_data: int = 30
    correlation: float = 0.6

    @property
    def x(self):
        mix = np.array([[1.0, self.correlation], [0.0, np.sqrt(1 - self.correlation**2)]])
        return np.random.default_rng(0).normal(size=(self.num_data, 2)) @ mix

    @property
    def y(self):
        errors = np.random.default_rng(1).normal(size=self.num_data)
        return self.x @ np.array([1.0, -2.0]) + 0.5 + self.noise * errors

    @functools.cached_property
    def target(self):
        model = nn.Linear(2, "scalar", key=jr.key(0), dtype=jnp.float64)
        likelihood = bayes.Gaussian(self.noise)
        return bayes.Posterior(model, bayes.normal(0.0, 1.0), likelihood, (self.x, self.y))

    def design(self, x):
        return np.concatenate([x, np.ones((len(x), 1))], axis=1)

    @property
    def precision(self):
        design = self.design(self.x)
        return design.T @ design / self.noise**2 + np.eye(3)

    @property
    def covariance(self):
        return np.linalg.inv(self.precision)

    @property
    def mean(self):
        return self.covariance @ self.design(self.x).T @ self.y / self.noise**2

    @property
    def log_evidence(self):
        design = self.design(self.x)
        covariance = design @ design.T + self.noise**2 * np.eye(self.num_data)
        _, log_det = np.linalg.slogdet(2 * np.pi * covariance)
        return -0.5 * (log_det + self.y @ np.linalg.solve(covariance, self.y))

    def best_rate(self, batch_size):
        """The optimal rate of constant SGD, `2 B d / (N trace(H))`. `H` is the Hessian of the loss.

        Mandt, Hoffman and Blei (2017).
        """
        return 2 * batch_size * 3 / np.trace(self.precision)

    def stationary_covariance(self, method):
        """The covariance of draws of SGLD or SGHMC with full gradients.

        The steps are linear. SGLD computes `x' = x - h P x + sqrt(2 h T) noise`. A step of SGHMC
        is a linear map of position and momentum, which this function iterates.
        """
        precision, one, zero = self.precision, np.eye(3), np.zeros((3, 3))
        rate, temperature = method.step_size / self.num_data, method.temperature
        if isinstance(method, bayes.SGLD):
            return temperature * np.linalg.inv(precision @ (one - rate * precision / 2))
        dt = np.sqrt(rate * temperature)
        one_gradient = np.block(
            [[one, dt * one], [-dt / temperature * precision, (1 - method.friction) * one]]
        )
        noise = np.block([[zero, zero], [zero, 2 * method.friction * one]])
        covariance = zero
        for _ in range(500):
            both = np.block([[covariance, zero], [zero, one]])
            for _ in range(method.trajectory_steps):
                both = one_gradient @ both @ one_gradient.T + noise
            covariance = both[:3, :3]
        return covariance

    def predictive(self, x):
        """Mean and variance of new targets."""
        design = self.design(x)
        spread = np.einsum("ij,jk,ik->i", design, self.covariance, design)
        return design @ self.mean, spread + self.noise**2


LINEAR = LinearModel()


class Rate(eqx.Module):
    """Returns the same rate for all inputs."""

    rate: jax.Array

    def __call__(self, x):
        return jnp.log(self.rate)


# The line search compiles faster than L-BFGS, and also needs the loss, its value and its gradient.
DESCENT = optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(10))

# Maps the name of a class to a method. test_laws.py fails if a method is missing here. The runs are
# long enough to reach the closed form of `LinearModel`. Chains have draws of the same shape, so
# that all share one program for diagnostics.
METHODS: dict[str, bayes.Method] = {
    "DeepEnsemble": bayes.DeepEnsemble(steps=3, members=3),
    "EarlyStoppedEnsemble": bayes.EarlyStoppedEnsemble(steps=3, members=3),
    "HMC": bayes.HMC(num_samples=400, num_warmup=200, chains=2, trajectory_steps=8),
    "Laplace": bayes.Laplace(steps=400, optimiser=DESCENT, structure="full", width=1.0),
    "MAP": bayes.MAP(),
    "MCDropout": bayes.MCDropout(steps=2500),
    "MCLMC": bayes.MCLMC(num_samples=400, num_warmup=1000, chains=2, energy_variance=1e-4),
    "MeanField": bayes.MeanField(steps=2000, learning_rate=0.02, draws=8),
    "NUTS": bayes.NUTS(num_samples=400, num_warmup=200, chains=2, dense_mass=True, max_doublings=6),
    "Pathfinder": bayes.Pathfinder(paths=4, path_steps=5),
    "SGHMC": bayes.SGHMC(
        num_samples=1,
        num_warmup=40,
        thin=1,
        chains=2000,
        descent_steps=0,
        step_size=0.02,
        temperature=0.5,
        friction=0.3,
        trajectory_steps=7,
    ),
    "SGLD": bayes.SGLD(
        num_samples=1,
        num_warmup=150,
        thin=1,
        chains=2000,
        descent_steps=0,
        step_size=0.1,
        temperature=0.5,
    ),
    "SWAG": bayes.SWAG(batch_size=5, collect_optimiser=optax.sgd(LINEAR.best_rate(5))),
}

DROPOUT_RATE = 0.3


def target_of(name):
    """The linear model: in single precision for one method, with dropout for another."""
    target = LINEAR.target
    if name == "MCLMC":
        model = nn.Linear(2, "scalar", key=jr.key(0), dtype=jnp.float32)
        data = tuple(each.astype(np.float32) for each in target.data)
        return bayes.Posterior(model, bayes.normal(), target.likelihood, data)
    if name != "MCDropout":
        return target
    model = nn.Sequential([nn.Dropout(DROPOUT_RATE), target.network])
    return bayes.Posterior(model, bayes.normal(0.0, 1.0), target.likelihood, target.data)


def run(method, target=None, key=None, **kwargs):
    target = LINEAR.target if target is None else target
    key = jr.key(1) if key is None else key
    return bayes.infer(target, method, key=key, progress=False, **kwargs)


@functools.cache
def fitted(name):
    """One run of a method, which the tests of all laws share."""
    return run(METHODS[name], target_of(name))


@eqx.filter_jit
def covariance_of(normal, size):
    return normal.covariance_of(jnp.eye(size))


def as_vectors(samples):
    """Draws of a linear model as an array, with the bias last."""
    layer = samples.model[1] if isinstance(samples.model, nn.Sequential) else samples.model
    weight, bias = np.asarray(layer.weight), np.asarray(layer.bias)
    return np.concatenate([weight[:, 0], bias.reshape(-1, 1)], axis=1)


def check_moments(draws, mean, covariance, ess, atol=5):
    """Compares means and covariances, up to `atol` Monte Carlo errors."""
    white = np.linalg.solve(np.linalg.cholesky(covariance), (draws - mean).T)
    np.testing.assert_allclose(np.mean(white, axis=1) * np.sqrt(ess), 0, atol=atol)
    identity = np.eye(len(white))
    found = white @ white.T / len(draws)
    np.testing.assert_allclose((found - identity) * np.sqrt(ess / 2), 0, atol=atol)
