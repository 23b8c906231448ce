"""Targets for the tests of Laplace, and the same matrices by hand."""

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro.distributions as dist
import optax

import eqxlike as eqx
from eqxlike import bayes, nn
from eqxlike.bayes._inference._fitted import fitted_from
from tests.bayes.methods.cases import LinearModel

LINEAR = LinearModel()
STRUCTURES = ("full", "kronecker", "diagonal", "last_layer")
NEW = np.random.default_rng(5).normal(size=(4, 2))
INPUTS = 2.0 * np.random.default_rng(6).normal(size=(10, 2))
LABELS = np.random.default_rng(7).integers(0, 3, size=10)


def run_in_place(target, mode=None):
    """A run that stays at the parameters that the model has, and is told that those are no mode."""
    method = bayes.MAP(steps=1, optimiser=optax.set_to_zero())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", bayes.InferenceWarning)
        return bayes.infer(target, method, key=jr.key(1), progress=False, mode=mode)


def around(run, **fields):
    """Laplace around where a run ended, be that the most probable place or not."""
    if not isinstance(run, bayes.FittedPosterior):
        run = run_in_place(run)
    return fitted_from(run.problem, bayes.Laplace(**fields), run.chains, run.key)


def predicting(posterior, predictive):
    method = dataclasses.replace(posterior.method, predictive=predictive)
    return dataclasses.replace(posterior, method=method)


def linear_target(likelihood):
    """A model with the parameters of the closed form."""
    layer = nn.Linear(2, "scalar", key=jr.key(0), dtype=jnp.float64)
    weight, bias = (jnp.asarray(each) for each in (LINEAR.mean[None, :2], LINEAR.mean[2:]))
    layer = eqx.tree_at(lambda each: (each.weight, each.bias), layer, (weight, bias))
    return bayes.Posterior(layer, bayes.normal(0.0, 1.0), likelihood, (LINEAR.x, LINEAR.y))


@functools.cache
def linear():
    return around(linear_target(bayes.Gaussian(LINEAR.noise)))


@functools.cache
def small_start():
    model = nn.MLP(2, "scalar", width_size=3, depth=1, key=jr.key(0), dtype=jnp.float64)
    likelihood = bayes.Gaussian(dist.Gamma(20.0, 5.0))
    target = bayes.Posterior(
        model, bayes.normal(0.0, 1.0), likelihood, (LINEAR.x, np.sin(LINEAR.y))
    )
    return run_in_place(target)


@functools.cache
def small(structure="full", **fields):
    """A network of 13 parameters with an unknown scale."""
    return around(small_start(), structure=structure, **fields)


def classes_target(num=10):
    model = nn.MLP(2, 3, width_size=3, depth=1, key=jr.key(0), dtype=jnp.float64)
    data = (INPUTS[:num], LABELS[:num])
    return bayes.Posterior(model, bayes.normal(0.0, 1.0), bayes.Categorical(), data)


@functools.cache
def classes_start():
    return run_in_place(classes_target())


@functools.cache
def classes(structure="full"):
    """A network of 21 parameters for three classes."""
    return around(classes_start(), structure=structure)


def num_parameters(posterior):
    return sum(leaf.size for leaf in jax.tree.leaves(posterior.target.initial(key=jr.key(0)).model))


@jax.numpy_dtype_promotion("standard")
@jax.numpy_rank_promotion("allow")
def jacobian_by_hand(posterior, x):
    """Of shape (N, C, d)."""
    problem = posterior.problem

    def outputs(vector):
        return jax.vmap(problem.target.model(problem.unknowns(vector)))(x).reshape(len(x), -1)

    return np.asarray(jax.jit(jax.jacfwd(outputs))(posterior.found.mode))


@jax.numpy_dtype_promotion("standard")
@jax.numpy_rank_promotion("allow")
def precision_by_hand(posterior):
    """The Gauss-Newton matrix of the parameters, and the exact Hessian of everything else."""
    problem, target, mode = posterior.problem, posterior.target, posterior.found.mode
    x, y = target.data
    jacobian = jacobian_by_hand(posterior, x)
    size = jacobian.shape[1]

    def log_prior(vector):
        unknowns, log_det = target.constrain(problem.unflatten(vector))
        return target.log_prior(unknowns) + log_det

    @jax.jit
    def hessians(vector):
        unknowns = problem.unknowns(vector)

        def log_prob(output, y):
            return target.likelihood.log_prob(output, unknowns.likelihood, y)

        of_outputs = jax.vmap(jax.hessian(log_prob))(jax.vmap(target.model(unknowns))(x), y)
        return of_outputs, jax.hessian(problem.log_density)(vector), jax.hessian(log_prior)(vector)

    of_outputs, of_density, of_prior = (np.asarray(each) for each in hessians(mode))
    inner = -of_outputs.reshape(-1, size, size)
    gauss_newton = np.einsum("nci,ncd,ndj->ij", jacobian, inner, jacobian)
    is_other = np.arange(problem.size) >= num_parameters(posterior)
    exact, approximate = -of_density, gauss_newton - of_prior
    return np.where(is_other[:, None] | is_other[None, :], exact, approximate)


def covariance_of(normal, size):
    rows = np.asarray(normal.whitened(jnp.eye(size)))
    return rows @ rows.T


def block_precision(block):
    """The precision that a block of `kronecker` stands for."""
    bases = functools.reduce(np.kron, [np.asarray(basis) for basis in block.bases])
    return bases * np.asarray(block.values).reshape(-1) @ bases.T
