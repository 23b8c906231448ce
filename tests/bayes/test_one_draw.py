"""What takes one draw says so to one who gives it many."""

import jax
import jax.random as jr
import numpy as np
import numpyro.distributions as dist
import pytest

from eqxlike import bayes, nn

X = np.linspace(-1.0, 1.0, 6, dtype=np.float32)[:, None]
TARGET = bayes.Posterior(
    nn.Linear(1, "scalar", key=jr.key(0)),
    bayes.normal(0.0, dist.HalfNormal(1.0)),
    bayes.Gaussian(dist.Gamma(2.0, 1.0)),
    (X, X[:, 0]),
)
MANY = jax.jit(jax.vmap(lambda key: TARGET.sample_prior(key=key)))(jr.split(jr.key(1), 3))
FIRST = jax.tree.map(lambda each: each[0], MANY)

USES = {
    "log_prior": TARGET.log_prior,
    "log_likelihood": TARGET.log_likelihood,
    "log_density": TARGET.log_density,
    "linked": lambda unknowns: TARGET.log_density(unknowns, linked=True),
    "minibatch": lambda unknowns: TARGET.minibatch_log_density(unknowns, TARGET.data),
    "simulate": lambda unknowns: TARGET.simulate(unknowns, key=jr.key(2)),
    "model": lambda unknowns: TARGET.model(unknowns)(X[0]),
}


def test_many_draws_in_place_of_one_are_named():
    message = (
        r"the unknowns have shape \(3, 1, 1\) at model\.weight, where one draw has \(1, 1\)\. Of "
        r"draws with a leading axis take one, `jax\.tree\.map\(lambda each: each\[0\], samples\)`, "
        r"or all with `jax\.vmap`"
    )
    for use in USES.values():
        with pytest.raises(ValueError, match=message), jax.numpy_rank_promotion("allow"):
            use(MANY)


def test_unknown_beside_the_parameters_is_named():
    for name in ("likelihood", "prior"):
        parts = {"likelihood": FIRST.likelihood, "prior": FIRST.prior} | {name: getattr(MANY, name)}
        message = rf"have shape \(3,\) at {name}\['scale'\], where one draw has \(\)"
        with pytest.raises(ValueError, match=message):
            TARGET.log_density(bayes.Unknowns(FIRST.model, **parts))
