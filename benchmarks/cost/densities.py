"""Value and gradient of a posterior, compared with the hand-written density and NumPyro's; and the
models of the zoo as `bayes` defines them.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from numpyro.infer.util import potential_energy

import eqxlike
from benchmarks.cases import Case, check_agreement
from benchmarks.command import Row
from benchmarks.networks import with_arrays
from benchmarks.report import Table
from benchmarks.timing import Call
from benchmarks.zoo import bayesian, bayesian_network, in_numpyro
from benchmarks.zoo.bayesian_network import FEATURES, WIDTHS
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
    layers = [
        nn.Linear(FEATURES, width, key=keys[0]),
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


# --- rows ---

ONE = Table("Value and gradient", unit="microseconds")
LOOP = Table("Value and gradient, 200 in one call as samplers call them", unit="microseconds")
IN_LOOP = 200

BY_HAND = "by hand"
BY_HAND_VECTOR = "by hand, vector"
OURS = "Posterior"
OURS_FILTERED = "Posterior, filter_jit"
OURS_VECTOR = "Posterior.flat"
NUMPYRO = "NumPyro"

Density = Callable[[Any], Array]


def rows() -> Iterator[Row]:
    """Each network in constrained and in linked space. Loops use linked space, as samplers do."""
    for table, spaces in ((ONE, (False, True)), (LOOP, (True,))):
        for width in WIDTHS:
            for linked in spaces:
                yield Row(table, _case(table, width, linked), check_agreement)


def _case(table: Table, width: int, linked: bool) -> Case:
    @functools.cache
    def stated() -> Stated:
        return network(width)

    makers = {BY_HAND: by_hand, OURS: of_unknowns}
    if linked:
        makers |= {BY_HAND_VECTOR: vector_by_hand, OURS_VECTOR: of_vector, NUMPYRO: by_numpyro}
    call = one_call if table is ONE else loop_call
    builders: dict[str, Callable[[], Call]] = {
        name: functools.partial(lambda make: call(jax.jit, *make(stated(), linked)), make)
        for name, make in makers.items()
    }
    if table is ONE:
        builders[OURS_FILTERED] = lambda: one_call(
            eqxlike.filter_jit, *of_unknowns(stated(), linked)
        )
    space = ", linked" if linked else ""
    return Case(f"{4 * width + 1} unknowns{space}", builders, BY_HAND)


def one_call(jit: Any, density: Density, unknowns: Any) -> Call:
    """Value and gradient in one call. Returns the value, which is ready with the gradient."""
    gradient = jit(jax.value_and_grad(density))
    return lambda: gradient(unknowns)[0]


def loop_call(jit: Any, density: Density, unknowns: Any) -> Call:
    """Many values and gradients in one call. Each point depends on the last gradient."""

    def run(unknowns: Any) -> Array:
        def step(_: Any, carry: tuple[Any, Array]) -> tuple[Any, Array]:
            place, _ = carry
            value, gradient = jax.value_and_grad(density)(place)
            moved = jax.tree_util.tree_map(lambda one, by: one + 1e-9 * by, place, gradient)
            return moved, value

        return jax.lax.fori_loop(0, IN_LOOP, step, (unknowns, jnp.zeros(())))[1]

    jitted = jit(run)
    return lambda: jitted(unknowns)


def of_unknowns(stated: Stated, linked: bool) -> tuple[Density, Any]:
    """`log_density` as a function of the tree of unknowns."""
    return (
        lambda unknowns: stated.target.log_density(unknowns, linked),
        stated.unknowns(linked),
    )


def of_vector(stated: Stated, linked: bool) -> tuple[Density, Any]:
    """The density of `Posterior.flat`, a function of a vector."""
    density = stated.target.flat(linked=linked, key=jax.random.key(0))[1]
    return density, _vector(stated, linked)


def by_hand(stated: Stated, linked: bool) -> tuple[Density, Any]:
    """A hand-written density for these arrays, with an explicit link function."""
    x, y = stated.data

    def density(arrays: tuple[Array, ...]) -> Array:
        weight, bias, output, free = arrays
        sigma = jnp.exp(free) if linked else free
        size = weight.size + bias.size + output.size
        prior = -(jnp.sum(weight**2) + jnp.sum(bias**2) + jnp.sum(output**2)) / 2
        prior -= size * math.log(2 * math.pi) / 2
        prior += (0.1 - 1) * jnp.log(sigma) - sigma - math.lgamma(0.1)
        mean = jax.nn.relu(x @ weight.T + bias) @ output[0]
        log_scale = jnp.log(sigma) + math.log(2 * math.pi) / 2
        likelihood = -jnp.sum(((y - mean) / sigma) ** 2) / 2 - len(y) * log_scale
        return prior + likelihood + (free if linked else 0.0)

    return density, tuple(jax.tree_util.tree_leaves(stated.unknowns(linked)))


def vector_by_hand(stated: Stated, linked: bool) -> tuple[Density, Any]:
    """The hand-written density as a function of a vector, which is split at known positions."""
    of_arrays, _ = by_hand(stated, linked)
    width = stated.start[1].size

    def density(vector: Array) -> Array:
        weight, bias, output = jnp.split(vector[:-1], [FEATURES * width, (FEATURES + 1) * width])
        return of_arrays((weight.reshape(width, FEATURES), bias, output[None], vector[-1]))

    return density, _vector(stated, linked)


def by_numpyro(stated: Stated, linked: bool) -> tuple[Density, Mapping[str, Array]]:
    """Minus `potential_energy` of NumPyro's model, as NumPyro's samplers call it."""
    model, data = in_numpyro.MODELS[stated.name], stated.data
    leaves = jax.tree_util.tree_leaves(stated.unknowns(linked))
    return (
        lambda values: -jnp.asarray(potential_energy(model, data, {}, values)),
        dict(zip(stated.sites, leaves, strict=True)),
    )


def _vector(stated: Stated, linked: bool) -> Array:
    leaves = jax.tree_util.tree_leaves(stated.unknowns(linked))
    return jnp.concatenate([leaf.ravel() for leaf in leaves])
