import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxlike as eqx
from eqxlike import nn


class Shift(nn.BayesianLayer):
    mean: jax.Array

    def kl(self):
        return self.mean**2 / 2

    def sample(self, key):
        return nn.Lambda(jnp.negative)


class Autoencoder(eqx.Module):
    """Has methods of the same names, with other meanings."""

    decoder: nn.Linear

    def kl(self, mean, variance):
        return mean**2 + variance

    def sample(self, key):
        return self.decoder(jax.random.normal(key, (2,)))


def test_layer_of_a_user_counts(getkey):
    model = [Shift(jnp.array(2.0)), nn.BayesianLinear(2, 2, key=getkey())]
    total, one = eqx.filter_jit(lambda model: (nn.kl_divergence(model), model[1].kl()))(model)
    np.testing.assert_allclose(total, 2 + np.asarray(one), rtol=1e-6)


def test_layer_of_a_user_is_drawn(getkey):
    drawn = nn.sample_posterior({"a": Shift(jnp.array(2.0))}, getkey())
    assert drawn["a"](1.0) == -1.0


def test_model_with_methods_of_the_same_names_is_none(getkey):
    model = Autoencoder(nn.Linear(2, 2, key=getkey()))
    assert nn.kl_divergence(model) == 0
    assert nn.sample_posterior(model, getkey()) == model


def test_layer_without_the_methods_cannot_be_made():
    class Incomplete(nn.BayesianLayer):
        def kl(self):
            return jnp.zeros(())

    with pytest.raises(TypeError, match="sample"):
        Incomplete()
