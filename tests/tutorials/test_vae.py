"""The tutorial on variational autoencoders, in a short form."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats


@pytest.fixture
def module(script):
    return script("vae")


def test_short_run_is_judged_beside_models_without_a_network(module, capsys):
    module.main(["--steps", "2", "--width", "8", "--code", "2"])
    output = capsys.readouterr().out
    found = dict(re.findall(r"^  (\w.*?) +(-\d+\.\d)$", output, re.MULTILINE))
    assert list(found) == [
        "independent pixels",
        "independent pixels of each digit",
        "autoencoder, lower bound",
        "autoencoder",
    ]
    assert float(found["autoencoder"]) >= float(found["autoencoder, lower bound"])
    assert len(output.partition("New digits:\n\n")[2].splitlines()) == 8


def test_log_likelihood_of_pixels_is_that_of_scipy(module):
    pixels, logits = jnp.array([0.0, 3.0, 16.0]), jnp.array([-1.0, 0.5, 2.0])
    expected = stats.binom.logpmf(pixels, 16, jax.nn.sigmoid(logits)).sum()
    np.testing.assert_allclose(module.log_binomial(pixels, logits), expected, rtol=1e-5)
