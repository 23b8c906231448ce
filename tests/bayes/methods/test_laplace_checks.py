"""What Laplace refuses."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro.distributions as dist
import pytest

from eqxlike import bayes, nn
from tests.bayes.methods.laplace import NEW, linear


@pytest.fixture(autouse=True, scope="module")
def double_precision():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"structure": "block"},
            "Laplace: structure must be one of 'full', 'diagonal', 'kronecker', 'last_layer', got "
            "'block'",
        ),
        (
            {"predictive": "mean"},
            "Laplace: predictive must be one of 'linearised', 'probit', 'sampled', got 'mean'",
        ),
        (
            {"layer": "layers[0].*"},
            "layer is for structure=\"last_layer\", and structure is 'full'",
        ),
    ],
)
def test_wrong_words_are_named(fields, message):
    with pytest.raises(ValueError, match=message.replace("[", r"\[").replace("*", r"\*")):
        bayes.Laplace(**fields)


def test_tune_prior_is_a_bool():
    with pytest.raises(TypeError, match=r"tune_prior must be a bool, got 2\.0"):
        bayes.Laplace(tune_prior=2.0)  # pyright: ignore[reportArgumentType]


def test_too_many_unknowns_are_refused_by_their_bytes():
    model = nn.Linear(200, 200, key=jr.key(0), dtype=jnp.float64)
    data = (np.zeros((2, 200)), np.zeros((2, 200)))
    target = bayes.Posterior(model, bayes.normal(), bayes.Gaussian(), data)
    with pytest.raises(
        ValueError,
        match=r"structure='full' would keep 1,616,040,000 numbers, 12\.0 GiB, for 40,200 unknowns; "
        r"at most 4 GiB are taken\. Structures that do: 'kronecker', 'diagonal', 'last_layer'\.",
    ):
        bayes.infer(target, bayes.Laplace(), key=jr.key(0), progress=False)


@pytest.mark.parametrize(
    ("prior", "fields", "message"),
    [
        (
            bayes.normal(),
            {"predictive": "probit"},
            r'predictive="probit" is for classes.*the likelihood is Poisson\. "linearised" serves',
        ),
        (
            dist.Laplace(0.0, 1.0),
            {"tune_prior": True},
            r"tune_prior is for one prior `bayes\.normal\(loc, number\)`.*the prior is Independent",
        ),
        (
            bayes.normal(0.0, dist.HalfCauchy(1.0)),
            {"tune_prior": True},
            r"tune_prior is for one prior `bayes\.normal\(loc, number\)`",
        ),
        (
            bayes.normal(),
            {"structure": "last_layer", "layer": "layers[7].*"},
            r"layer 'layers\[7\]\.\*' matches no parameter\. The parameters are weight, bias\.",
        ),
    ],
    ids=["probit", "prior", "hierarchical prior", "layer"],
)
def test_what_does_not_fit_the_target_is_refused(prior, fields, message):
    model = nn.Linear(2, "scalar", key=jr.key(0), dtype=jnp.float64)
    target = bayes.Posterior(model, prior, bayes.Poisson(), (NEW, np.arange(4)))
    with pytest.raises(ValueError, match=message):
        bayes.infer(target, bayes.Laplace(**fields), key=jr.key(0), progress=False)


def test_one_quantile_is_no_distribution():
    with pytest.raises(ValueError, match="one sample has no variance; take at least 2"):
        bayes.predict(linear(), NEW, key=jr.key(0), num_samples=1)
