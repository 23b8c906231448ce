"""Predictions of NUTS compared with those of NumPyro's own, which was written by others."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC
from numpyro.infer import NUTS as NumPyrosNUTS

from eqxlike import bayes, nn

pytestmark = pytest.mark.usefixtures("as_methods_run")

WIDTH, NOISE = 4, 0.5
INPUTS = np.random.default_rng(0).normal(size=(30, 2))
TARGETS = np.sin(1.5 * INPUTS[:, 0]) + 0.5 * INPUTS[:, 1]
TARGETS = TARGETS + NOISE * np.random.default_rng(1).normal(size=30)
NEW = np.random.default_rng(2).normal(size=(12, 2))


def in_numpyro(x, y):
    def sample(name, *shape):
        return numpyro.sample(name, dist.Normal(0.0, 1.0).expand(list(shape)).to_event(len(shape)))

    hidden = jnp.tanh(x @ sample("w0", WIDTH, 2).T + sample("b0", WIDTH))
    mean = hidden @ sample("w1", WIDTH) + numpyro.sample("b1", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(mean, NOISE), obs=y)


@jax.numpy_dtype_promotion("standard")
@jax.numpy_rank_promotion("allow")
@jax.debug_key_reuse(False)
def theirs(num_warmup, num_samples):
    """Means at the new inputs, of each chain and draw."""
    sampler = MCMC(
        NumPyrosNUTS(in_numpyro),
        num_warmup=num_warmup,
        num_samples=num_samples,
        num_chains=2,
        chain_method="vectorized",
        progress_bar=False,
    )
    sampler.run(jr.key(0), INPUTS, TARGETS)
    found = sampler.get_samples(group_by_chain=True)
    draws = {name: np.asarray(each) for name, each in found.items()}
    hidden = np.tanh(np.einsum("cnhi,bi->cnbh", draws["w0"], NEW) + draws["b0"][:, :, None])
    return np.einsum("cnbh,cnh->cnb", hidden, draws["w1"]) + draws["b1"][:, :, None]


@pytest.mark.filterwarnings("ignore::eqxlike.bayes.InferenceWarning")
def test_predictions_of_nuts_are_those_of_numpyro():
    num_warmup, num_samples = 100, 250
    model = nn.MLP(2, "scalar", WIDTH, 1, jnp.tanh, dtype=jnp.float64, key=jr.key(0))
    data = (INPUTS, TARGETS)
    target = bayes.Posterior(model, dist.Normal(0.0, 1.0), bayes.Gaussian(NOISE), data)
    method = bayes.NUTS(num_samples=num_samples, num_warmup=num_warmup, chains=2)
    posterior = bayes.infer(target, method, key=jr.key(1), progress=False)
    prediction = bayes.predict(posterior, NEW, key=jr.key(2))
    assert isinstance(prediction, bayes.Mixture)
    means = jax.jit(jax.vmap(lambda sample: jax.vmap(posterior.model(sample))(NEW)))
    ours = np.asarray(means(posterior.samples(key=jr.key(3)))).reshape(2, num_samples, len(NEW))
    others = theirs(num_warmup, num_samples)
    errors = np.hypot(
        *(
            draws.std((0, 1)) / np.sqrt(bayes.convergence(draws).ess_bulk)
            for draws in (ours, others)
        )
    )
    np.testing.assert_allclose((prediction.mean - others.mean((0, 1))) / errors, 0, atol=3.5)

    # Much noise for each mean, so that what is left is the error of the means.
    noise = NOISE * np.random.default_rng(3).normal(size=(20, *others.shape))
    low, high = np.quantile(others + noise, [0.05, 0.95], axis=(0, 1, 2))
    our_low, our_high = prediction.interval(0.9)
    width = high - low
    np.testing.assert_allclose((our_low - low) / width, 0, atol=0.05)
    np.testing.assert_allclose((our_high - high) / width, 0, atol=0.05)
