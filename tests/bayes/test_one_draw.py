"""Functions that expect one draw refuse several draws."""

import jax
import jax.random as jr
import numpy as np
import numpyro.distributions as dist
import pytest

from eqxlike import bayes, nn

X = np.linspace(-1.0, 1.0, 6, dtype=np.float32)[:, None]


@pytest.fixture(scope="module")
def target():
    return bayes.Posterior(
        nn.Linear(1, "scalar", key=jr.key(0)),
        bayes.normal(0.0, dist.HalfNormal(1.0)),
        bayes.Gaussian(dist.Gamma(2.0, 1.0)),
        (X, X[:, 0]),
    )


@pytest.fixture(scope="module")
def many(target):
    return jax.jit(jax.vmap(lambda key: target.sample_prior(key=key)))(jr.split(jr.key(1), 3))


USES = {
    "log_prior": lambda target, unknowns: target.log_prior(unknowns),
    "log_likelihood": lambda target, unknowns: target.log_likelihood(unknowns),
    "log_density": lambda target, unknowns: target.log_density(unknowns),
    "linked": lambda target, unknowns: target.log_density(unknowns, linked=True),
    "minibatch": lambda target, unknowns: target.minibatch_log_density(unknowns, target.data),
    "simulate": lambda target, unknowns: target.simulate(unknowns, key=jr.key(2)),
    "model": lambda target, unknowns: target.model(unknowns)(X[0]),
}


def test_several_draws_instead_of_one_are_an_error(target, many):
    message = (
        r"the unknowns of one draw, with shape \(1, 1\) at model\.weight; got shape \(3, 1, 1\)\. "
        r"Select one of several draws by `jax\.tree\.map\(lambda each: each\[0\], samples\)`, "
        r"or use `jax\.vmap` for all"
    )
    for use in USES.values():
        with pytest.raises(ValueError, match=message), jax.numpy_rank_promotion("allow"):
            use(target, many)


def test_several_draws_of_a_scale_instead_of_one_are_an_error(target, many):
    first = jax.tree.map(lambda each: each[0], many)
    for name in ("likelihood", "prior"):
        parts = {"likelihood": first.likelihood, "prior": first.prior} | {name: getattr(many, name)}
        message = rf"with shape \(\) at {name}\['scale'\]; got shape \(3,\)"
        with pytest.raises(ValueError, match=message):
            target.log_density(bayes.Unknowns(first.model, **parts))
