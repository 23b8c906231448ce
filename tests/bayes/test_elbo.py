import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import scipy.stats

from eqxlike import bayes, filter_jit, nn
from eqxlike.bayes import negative_elbo

compiled = filter_jit(negative_elbo)
kl_of = filter_jit(lambda model: model.kl())


def gaussian(model, example, key):
    x, y = example
    return jax.scipy.stats.norm.logpdf(y, model(x, key=key), 0.5)


@pytest.fixture
def data(getkey):
    return jr.normal(getkey(), (12, 3)), jr.normal(getkey(), (12,))


@pytest.fixture
def model(getkey):
    return nn.BayesianLinear(3, "scalar", key=getkey())


def test_full_batch_of_a_model_without_noise_is_kl_minus_log_likelihood(model, data, getkey):
    model = nn.inference_mode(model)
    value = compiled(model, gaussian, data, num_data=12, key=getkey())
    x, y = map(np.asarray, data)
    mean = x @ np.asarray(model.weight_mean)[0] + np.asarray(model.bias_mean)
    total = scipy.stats.norm(mean, 0.5).logpdf(y).sum()
    np.testing.assert_allclose(value, kl_of(model) - total, rtol=1e-5)


def test_estimate_is_unbiased_with_several_samples(data, getkey):
    # E_q log N(y | w x + b, s^2) has a closed form.
    x, y = data
    model = nn.BayesianLinear(3, "scalar", estimator="flipout", key=getkey())

    @jax.jit
    def exact(x, y):
        mean = jax.vmap(nn.inference_mode(model))(x)
        weight, bias = jax.nn.softplus(model.weight_rho[0]), jax.nn.softplus(model.bias_rho)
        variance = x**2 @ weight**2 + bias**2
        log_likelihood = jax.scipy.stats.norm.logpdf(y, mean, 0.5) - variance / (2 * 0.5**2)
        return model.kl() - jnp.sum(log_likelihood)

    @jax.jit
    @jax.vmap
    def estimate(key):
        return negative_elbo(model, gaussian, data, key=key, num_data=12, num_samples=3)

    estimates = estimate(jr.split(getkey(), 4000))
    error = abs(np.mean(estimates) - float(exact(x, y)))
    assert error < 5 * np.std(estimates) / 4000**0.5


def test_examples_share_one_perturbation_in_each_draw(getkey):
    model = nn.BayesianLinear(1, "scalar", False, estimator="flipout", key=getkey())
    seen = []

    def spy(model, example, key):
        noise = model(example, key=key) - model.mean_layer()(example)
        jax.debug.callback(lambda value: seen.append(round(abs(float(value)), 6)), noise)
        return noise

    compiled(model, spy, jnp.ones((5, 1)), num_data=5, key=getkey(), num_samples=2)
    jax.effects_barrier()
    assert (len(seen), len(set(seen))) == (10, 2)


def test_kl_weight_scales_the_kl_and_per_example_divides_by_the_data(model, data, getkey):
    key = getkey()

    def value(**options):
        options |= {"num_data": 24, "key": jr.clone(key)}
        return float(compiled(model, gaussian, data, **options))

    np.testing.assert_allclose(
        value() - value(kl_weight=jnp.array(0.25)), 0.75 * float(kl_of(model)), rtol=1e-4
    )
    np.testing.assert_allclose(value(per_example=True), value() / 24, rtol=1e-5)


def test_each_example_has_its_own_noise(model, getkey):
    seen = []

    def spy(model, example, key):
        output = model(example, key=key)
        jax.debug.callback(lambda value: seen.append(float(value)), output)
        return output

    compiled(model, spy, jnp.ones((5, 3)), num_data=5, key=getkey(), num_samples=2)
    jax.effects_barrier()
    assert len(set(seen)) == 10


def test_bad_input_is_refused(model, data, getkey):
    def bound(log_likelihood=gaussian, batch=data, **options):
        options = {"num_data": 5} | options
        negative_elbo(model, log_likelihood, batch, key=getkey(), **options)

    no_scalar = lambda model, example, key: example[0]
    predict = functools.partial(bayes.predict_samples, model, jnp.ones((3, 3)), key=getkey())
    for call, words in [
        (lambda: bound(num_data=0), "num_data must be an integer of at least 1, got 0"),
        (lambda: bound(num_samples=2.5), "num_samples must be an integer of at least 1, got 2.5"),
        (
            lambda: bound(batch=(jnp.ones((5, 3)), jnp.ones(4))),
            r"same leading length, got shapes \[\(4,\), \(5, 3\)\]",
        ),
        (lambda: bound(no_scalar), r"shape \(\) for one example, got shape \(3,\)"),
        (lambda: predict(num_samples=0), "num_samples must be .* at least 1, got 0"),
    ]:
        with pytest.raises(ValueError, match=words):
            call()


# --- predictions from draws --------------------------------------------------------------------


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
