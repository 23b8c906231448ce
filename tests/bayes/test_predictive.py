import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from eqxlike import bayes, filter_jit, nn


def test_each_draw_is_one_network_applied_to_all_inputs(getkey):
    key = getkey()
    model = nn.BayesianMLP(2, 3, 8, 1, posterior_scale=1.0, key=getkey())
    x = np.concatenate([np.ones((4, 2), np.float32), np.zeros((1, 2), np.float32)])
    outputs = np.asarray(filter_jit(bayes.predict_samples)(model, x, key=key, num_samples=3))
    assert outputs.shape == (3, 5, 3)
    same = np.broadcast_to(outputs[:, :1], (3, 4, 3))
    np.testing.assert_allclose(outputs[:, :4], same, rtol=1e-5)
    network = filter_jit(nn.sample_posterior)(model, jr.split(jr.clone(key), 3)[2])
    np.testing.assert_allclose(outputs[2, 0], network(jnp.ones(2)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_samples", [0, 2.5])
def test_number_of_draws_that_is_no_positive_integer_is_refused(num_samples, getkey):
    model = nn.BayesianLinear(2, 1, key=getkey())
    options = {"key": getkey(), "num_samples": num_samples}
    with pytest.raises(ValueError, match=f"num_samples must be .* at least 1, got {num_samples}"):
        bayes.predict_samples(model, jnp.ones((3, 2)), **options)


def test_draws_of_a_linear_model_have_its_moments(getkey):
    layer = nn.BayesianLinear(2, "scalar", posterior_scale=0.5, key=getkey())
    x = jnp.array([[1.0, 2.0]])
    outputs = bayes.predict_samples(layer, x, key=getkey(), num_samples=20_000)
    variance = 0.5**2 / 2 * (1 + 4) + 0.5**2
    np.testing.assert_allclose(np.std(outputs), variance**0.5, rtol=0.05)
