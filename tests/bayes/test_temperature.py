import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
import scipy.optimize
import scipy.special

from eqxlike import bayes


def nll(temperature, logits, labels):
    log_probabilities = scipy.special.log_softmax(np.asarray(logits) / temperature, axis=-1)
    return -np.take_along_axis(log_probabilities, np.asarray(labels)[:, None], -1).mean()


def by_scipy(logits, labels):
    objective = lambda log_temperature: nll(np.exp(log_temperature), logits, labels)
    return np.exp(scipy.optimize.minimize_scalar(objective, bracket=(-1, 1), tol=1e-12).x)


def test_temperature_equals_scipy_and_divides_logits():
    rng = np.random.default_rng(0)
    logits = 2 * rng.normal(size=(400, 4))
    labels = np.argmax(logits + rng.gumbel(size=(400, 4)), axis=-1).astype(np.int32)
    logits = (3 * logits).astype(np.float32)

    @jax.jit
    def fitted(logits, labels):
        scaling = bayes.temperature_scaling(logits, labels)
        return scaling.temperature, scaling(logits)

    found, scaled = fitted(logits, labels)
    np.testing.assert_allclose(found, by_scipy(np.asarray(logits, np.float64), labels), rtol=1e-5)
    np.testing.assert_allclose(scaled, logits / found, rtol=1e-6)


def test_tokens_count_as_examples():
    rng = np.random.default_rng(0)
    logits, labels = 3 * rng.normal(size=(20, 5, 4)), rng.integers(0, 4, size=(20, 5))
    logits[:, :, 1] += 3 * (labels == 1)
    found = bayes.temperature_scaling(logits, labels)
    flat = bayes.temperature_scaling(logits.reshape(-1, 4), labels.reshape(-1))
    np.testing.assert_array_equal(found.temperature, flat.temperature)
    assert found(jnp.asarray(logits)).shape == (20, 5, 4)
    with pytest.raises(ValueError, match=r"If all labels are exchangeable, flatten both"):
        bayes.conformal_sets(bayes.CategoricalMixture(logits[None]), labels)


def test_integer_logits_are_accepted():
    logits, labels = np.array([[1, 0], [2, 0], [1, 0]]), jnp.array([0, 0, 1])
    found = bayes.temperature_scaling(logits, labels).temperature
    expected = bayes.temperature_scaling(logits.astype(np.float32), labels).temperature
    np.testing.assert_array_equal(found, expected)


def test_mixture_is_scaled_as_a_whole():
    rng = np.random.default_rng(0)
    logits = 5 * rng.normal(size=(6, 50, 4)).astype(np.float32)
    labels = np.argmax(logits.mean(axis=0) / 4 + rng.gumbel(size=(50, 4)), axis=-1)

    @jax.jit
    def both(logits, labels):
        mixture = bayes.CategoricalMixture(logits)
        scaling = bayes.temperature_scaling(mixture, labels)
        return scaling.temperature, mixture.log_probabilities, scaling(mixture).probabilities

    temperature, before, after = map(np.asarray, both(logits, labels.astype(np.int32)))
    np.testing.assert_allclose(temperature, by_scipy(np.float64(before), labels), rtol=1e-4)
    expected = scipy.special.softmax(before / temperature, axis=-1)
    np.testing.assert_allclose(after, expected, rtol=1e-4)


@pytest.mark.parametrize(
    ("sign", "limit", "words"),
    [(1, 0.01, r"its lower limit, 0\.01"), (-1, 100, "its upper limit, 100")],
)
def test_temperature_at_a_limit_is_a_warning(sign, limit, words):
    with pytest.warns(UserWarning, match=f"reached {words}"):
        scaling = bayes.temperature_scaling(sign * jnp.eye(3), jnp.arange(3))
    np.testing.assert_allclose(scaling.temperature, limit, rtol=1e-5)


def test_wrong_labels_are_refused():
    for logits, labels, message in [
        ((5, 3), jnp.zeros(4, int), r"labels of shape \(N,\), got \(5, 3\) and \(4,\)"),
        ((5, 2, 3), jnp.zeros(5, int), r"labels of shape \(N,\), got \(5, 2, 3\)"),
        ((3,), jnp.zeros((), int), r"labels of shape \(N,\), got \(3,\) and \(\)"),
        ((), jnp.zeros((), int), r"expects logits of shape \(N, C\), got shape \(\)"),
        ((0, 3), jnp.zeros(0, int), "there are no examples"),
        ((5, 3), jnp.zeros(5), "integer labels, got dtype float32"),
        ((5, 3), jnp.arange(1, 6), "labels from 0 to 2, got labels from 1 to 5"),
        ((5, 3), jnp.full(5, -1), "labels from 0 to 2, got labels from -1 to -1"),
    ]:
        with pytest.raises(ValueError, match=message):
            bayes.temperature_scaling(jnp.zeros(logits), labels)


def test_logits_that_are_not_finite_and_mixtures_over_numbers_are_refused():
    with pytest.raises(ValueError, match="logits: 1 of 6 are not finite"):
        bayes.temperature_scaling(jnp.zeros((2, 3)).at[0, 1].set(jnp.nan), jnp.zeros(2, int))
    mixture = bayes.Mixture(dist.Normal(jnp.zeros((2, 3)), 1.0))
    with pytest.raises(TypeError, match=r"expects a bayes\.CategoricalMixture, got Mixture"):
        bayes.temperature_scaling(mixture, jnp.zeros(3, int))
