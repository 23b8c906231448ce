"""Models of the zoo as `bayes` defines them, and predictions from NumPyro's draws."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
import numpyro.distributions as dist
from jax import Array

import eqxlike
from benchmarks.networks import with_arrays
from benchmarks.zoo import bayesian, bayesian_network
from eqxlike import bayes, nn

Arrays = tuple[Array, ...]


@dataclasses.dataclass(frozen=True)
class Stated:
    """A model of the zoo.

    - `name`: its name in the zoo.
    - `target`: the posterior.
    - `start`: the initial arrays, in constrained space and in tree order.
    - `sites`: NumPyro's names of these arrays.
    - `predict`: maps such arrays and inputs `(B, F)` to predictions `(B,)`.
    """

    name: str
    target: bayes.Posterior
    start: Arrays
    sites: tuple[str, ...]
    predict: Callable[[Arrays, Array], Array]

    @property
    def data(self) -> tuple[Array, Array]:
        """The inputs and targets."""
        x, y = self.target.data
        return x, y

    def unknowns(self, linked: bool = False) -> bayes.Unknowns:
        """`start` as the unknowns of `target`."""
        like = jax.eval_shape(lambda: self.target.initial(key=jax.random.key(0)))
        treedef = jax.tree_util.tree_structure(like)
        unknowns = jax.tree_util.tree_unflatten(treedef, self.start)
        return self.target.unconstrain(unknowns) if linked else unknowns


def network(width: int) -> Stated:
    """The Bayesian network of the zoo."""
    start, (x, y) = bayesian_network.bayesian_network(width).start()
    arrays = (start.hidden.weight, start.hidden.bias, start.output.weight)
    keys = jax.random.split(jax.random.key(0))
    features = bayesian_network.FEATURES
    layers = [
        nn.Linear(features, width, key=keys[0]),
        nn.Lambda(jax.nn.relu),
        nn.Linear(width, "scalar", use_bias=False, key=keys[1]),
    ]
    model = with_arrays(eqxlike, nn.Sequential(layers), arrays)
    likelihood = bayes.Gaussian(scale=dist.Gamma(0.1, 1.0))
    target = bayes.Posterior(model, bayes.normal(0.0, 1.0), likelihood, (x, y))

    def predict(arrays: Arrays, x: Array) -> Array:
        weight, bias, output, *_ = arrays
        return jax.nn.relu(x @ weight.T + bias[None]) @ output[0]

    name = bayesian_network.name(width)
    sites = ("hidden.weight", "hidden.bias", "output.weight", "sigma")
    return Stated(name, target, (*arrays, start.sigma), sites, predict)


def logistic_regression() -> Stated:
    """The logistic regression of the zoo, with 1,000 examples of 8 inputs."""
    problem = bayesian.logistic_regression(points=1000)
    start, (x, y) = problem.start()
    arrays = (start.weights[None], start.intercept[None])
    linear = nn.Linear(x.shape[1], "scalar", key=jax.random.key(0))
    model = with_arrays(eqxlike, linear, arrays)
    data = (x, np.asarray(y).astype(np.int32))
    target = bayes.Posterior(model, bayes.normal(0.0, 1.0), bayes.Bernoulli(), data)

    def predict(arrays: Arrays, x: Array) -> Array:
        weights, intercept = arrays
        return jax.nn.sigmoid(x @ weights.ravel() + intercept.ravel())

    return Stated(problem.name, target, arrays, ("weights", "intercept"), predict)
