"""Every method of inference, with settings that suit a test, and a problem for it."""

import dataclasses

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro.distributions as dist

from eqxlike import bayes, nn

# By the name of its class: tests/bayes/methods/test_laws.py fails for a method that is not here.
METHODS: dict[str, bayes.Method] = {
    "DeepEnsemble": bayes.DeepEnsemble(steps=30, members=3),
    "HMC": bayes.HMC(num_samples=8, num_warmup=6, chains=2, trajectory_steps=3),
    "Laplace": bayes.Laplace(steps=30),
    "MAP": bayes.MAP(steps=30),
    "MCDropout": bayes.MCDropout(steps=30),
    "MCLMC": bayes.MCLMC(num_samples=8, num_warmup=100, chains=2, thin=1),
    "MeanField": bayes.MeanField(steps=30),
    "NUTS": bayes.NUTS(num_samples=8, num_warmup=6, chains=2, max_doublings=3),
    "Pathfinder": bayes.Pathfinder(paths=2, path_steps=5, elbo_draws=3, draws=25),
    "SGHMC": bayes.SGHMC(num_samples=8, num_warmup=6, chains=2, descent_steps=4),
    "SGLD": bayes.SGLD(num_samples=8, num_warmup=6, chains=2, thin=2, descent_steps=4),
    "SWAG": bayes.SWAG(steps=10, batch_size=None, collect_steps=20, collect_every=4, rank=3),
}

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

    @property
    def x(self):
        return np.random.default_rng(0).normal(size=(self.num_data, 2)) @ np.array(
            [[1.0, 0.6], [0.0, 0.8]]
        )

    @property
    def y(self):
        errors = np.random.default_rng(1).normal(size=self.num_data)
        return self.x @ np.array([1.0, -2.0]) + 0.5 + self.noise * errors

    @property
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

    def predictive(self, x):
        """Mean and variance of new targets."""
        design = self.design(x)
        spread = np.einsum("ij,jk,ik->i", design, self.covariance, design)
        return design @ self.mean, spread + self.noise**2


def as_vectors(samples):
    """Draws of a linear model as an array, the bias last."""
    weight, bias = samples.model.weight, samples.model.bias
    return np.concatenate([np.asarray(weight)[:, 0], np.asarray(bias).reshape(-1, 1)], axis=1)
