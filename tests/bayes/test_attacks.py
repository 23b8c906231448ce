"""Former mistakes of `bayes`. Each test failed before its mistake was fixed."""

import functools
import warnings

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro.distributions as dist
import optax
import pytest
from scipy import stats

import eqxlike as eqx
from eqxlike import ad, bayes, nn
from eqxlike._pytree import fingerprint
from eqxlike.bayes._fitted import fitted_from
from eqxlike.bayes._method import Chains
from eqxlike.bayes._methods._descent import Optimised

X = np.linspace(-1.0, 1.0, 12, dtype=np.float32).reshape(6, 2)
Y = X[:, 0] ** 2 - X[:, 1]
NORMAL, GAUSSIAN = bayes.normal(0.0, 1.0), bayes.Gaussian(0.5)


def optimised(learning_rate):
    return bayes.MAP(steps=2, optimiser=optax.adam(learning_rate))


SHORT = optimised(0.1)

pytestmark = pytest.mark.filterwarnings("ignore:MAP. 1 of 1 runs have not converged to")


def linear(seed=0, outputs="scalar", **kwargs):
    return nn.Linear(2, outputs, key=jr.key(seed), **kwargs)


def target(model=None, prior=NORMAL, likelihood=GAUSSIAN, data=(X, Y)):
    return bayes.Posterior(linear() if model is None else model, prior, likelihood, data)


def run(target, method=SHORT, **kwargs):
    return bayes.infer(target, method, key=jr.key(1), progress=False, **kwargs)


# --- files of other runs with arrays of the same shapes -----------------------------------------


def network(seed=1, frozen_seed=2):
    hidden = nn.freeze(linear(frozen_seed, 2))
    return nn.Sequential([hidden, nn.Lambda(jax.nn.tanh), linear(seed)])


def case(method=SHORT, **kwargs):
    return target(**{"model": network(), **kwargs}), method


def test_file_of_another_target_is_neither_loaded_nor_resumed(tmp_path):
    path = tmp_path / "run"
    posterior = run(*case(), checkpoint=path)
    for changed in (
        {"prior": bayes.normal(0.0, 2.0)},
        {"likelihood": bayes.StudentT(0.5)},
        {"model": network(frozen_seed=3)},
    ):
        with pytest.raises(ValueError, match="target differs in its prior, its likelihood, or"):
            bayes.load(path, *case(**changed))
    elsewhere = case(model=network(seed=4))
    with pytest.raises(ValueError, match="start differs: the model has other initial parameters"):
        run(*elsewhere, checkpoint=path)
    with pytest.raises(ValueError, match="with other settings: optimiser 'GradientTransformation"):
        run(*case(optimised(0.2)), checkpoint=path)
    # Loading a finished run ignores the start.
    np.testing.assert_array_equal(bayes.load(path, *elsewhere).found, posterior.found)


def test_equal_objects_have_equal_fingerprints():
    for make in (
        lambda: optax.chain(optax.clip(1.0), optax.adam(0.1)),
        lambda: functools.partial(jnp.sum, axis=0),
        lambda: dist.TruncatedNormal(0.0, 1.0, low=0.0),
        lambda: nn.Sequential([nn.Lambda(lambda x: x), nn.Dropout(0.1)]),
        lambda: {"b": jr.key(0), "a": object()},
    ):
        assert fingerprint(make()) == fingerprint(make())


def test_fingerprint_of_a_distribution_does_not_depend_on_the_process(monkeypatch):
    """NumPyro reads the names of fields from a set, whose order differs between processes."""
    names, expected = dist.Gamma.gather_pytree_aux_fields(), fingerprint(dist.Gamma(2.0, 1.0))
    reverse = staticmethod(lambda: names[::-1])
    monkeypatch.setattr(dist.Gamma, "gather_pytree_aux_fields", reverse)
    assert fingerprint(dist.Gamma(2.0, 1.0)) == expected


def test_fingerprint_of_a_function_that_refers_to_itself_terminates():
    def outer(number):
        def inner():
            return inner, number

        return inner

    assert fingerprint(outer(1)) != fingerprint(outer(2))


def test_different_objects_have_different_fingerprints():
    for one, other in (
        (dist.Uniform(0.0, 1.0), dist.Uniform(0.0, 2.0)),
        (dist.Normal().expand((2,)), dist.Normal().expand((3,))),
        (functools.partial(jnp.sum, axis=0), functools.partial(jnp.sum, axis=1)),
        (nn.Dropout(0.1), nn.Dropout(0.2)),
        (jax.nn.relu, jax.nn.tanh),
        (jnp.zeros(2), jnp.zeros(2, jnp.int32)),
        ([[1], 2], [[1, 2]]),
        (((1,), (2, 3)), ((1, 2), (3,))),
    ):
        assert fingerprint(one) != fingerprint(other)


def test_settings_may_be_numpy_numbers(tmp_path):
    def method(number):
        return bayes.SGLD(
            num_samples=number(2),
            num_warmup=number(1),
            chains=number(2),
            thin=number(1),
            descent_steps=number(0),
        )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", bayes.InferenceWarning)
        posterior = run(target(), method(np.int64), checkpoint=tmp_path / "run")
    loaded = bayes.load(tmp_path / "run", target(), method(int))
    np.testing.assert_array_equal(loaded.found, posterior.found)


# --- targets ------------------------------------------------------------------------------------


def test_parameters_at_the_boundary_of_their_support_are_drawn():
    model = eqx.tree_at(lambda model: model.bias, linear(), jnp.zeros(1))
    priors = bayes.prior_by_path({"bias": dist.Uniform(0.0, 1.0), "weight": dist.Normal()})
    made = target(model, priors)
    assert np.isfinite(jax.jit(lambda: first_density(made))())


def first_density(made):
    vector, log_density, _ = made.flat(key=jr.key(0))
    return log_density(vector)


class Complex(eqx.Module):
    weight: jax.Array

    def __call__(self, x):
        return jnp.sum(self.weight.real) * x[0]


def with_head(y):
    return target(linear(outputs=2), likelihood=bayes.Gaussian("head"), data=(X, y))


def with_batch_norm():
    model, _ = nn.make_with_state(nn.BatchNorm)(2, axis_name="batch", mode="batch")
    return target(model, data=(X, X))


def test_targets_that_cannot_work_are_refused():
    for call, error, words in [
        (lambda: target(prior=dist.Poisson(3.0)), ValueError, "weight must be a continuous"),
        (lambda: bayes.Gaussian(dist.Poisson(3.0)), ValueError, "scale must be a continuous"),
        (lambda: with_head(np.ones((6, 1))), ValueError, r"got \(1,\); pass `y\[:, 0\]`"),
        (lambda: with_head(np.ones((6, 2, 2))), ValueError, r"\(\), or \(k,\) .* \(2, 2\)\."),
        (
            lambda: target(Complex(jnp.ones(2, jnp.complex64))),
            TypeError,
            "weight is complex, dtype",
        ),
        (with_batch_norm, TypeError, r"as `model\(x\)`, but this model has stateful layers"),
    ]:
        with pytest.raises(error, match=words):
            call()


def test_booleans_are_two_classes():
    model = linear(outputs=2)
    of_bools, of_integers = (
        target(model, likelihood=bayes.Categorical(), data=(X, (Y > 0).astype(dtype)))
        for dtype in (bool, int)
    )

    @jax.jit
    def both(key):
        unknowns = of_bools.initial(key=key)
        return of_bools.log_likelihood(unknowns), of_integers.log_likelihood(unknowns)

    np.testing.assert_array_equal(*both(jr.key(0)))


def test_target_can_be_made_of_traced_data():
    likelihood, y = bayes.Bernoulli(), (Y > 0).astype(np.int32)
    made = target(likelihood=likelihood, data=(X, y))

    @jax.jit
    def densities(x, y):
        unknowns = made.initial(key=jr.key(0))
        traced = target(made.network, likelihood=likelihood, data=(x, y))
        return traced.log_density(unknowns), made.log_density(unknowns)

    np.testing.assert_allclose(*densities(X, y), rtol=1e-6)


def test_single_precision_works_in_64_bit_mode():
    with jax.enable_x64(True):
        model = linear(dtype=jnp.float32)
        made = target(model, dist.Normal(), bayes.Gaussian(dist.HalfNormal(1.0)))
        assert np.isfinite(jax.jit(lambda: first_density(made))())


# --- inference ----------------------------------------------------------------------------------


def test_infer_refuses_jit_and_wrong_modes_and_keys():
    with pytest.raises(TypeError, match=r"target\.network\.weight is traced\. .* outside of `jit`"):
        eqx.filter_jit(run)(target())
    with pytest.raises(
        ValueError, match="chains run in a batch, and Enzyme does not support batching"
    ):
        run(target(), mode=ad.Enzyme())
    with pytest.raises(TypeError, match=r"mode must be a mode of eqxlike.ad, .* got 'forward'"):
        run(target(), mode="forward")
    for key in (0, None, jr.split(jr.key(0))):
        with pytest.raises(TypeError, match=r"infer: key must be one key, such as `jax.random.key"):
            bayes.infer(target(), SHORT, key=key, progress=False)


def test_missing_directory_is_an_error_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setattr("eqxlike.bayes._infer.start", pytest.fail)
    with pytest.raises(
        FileNotFoundError, match=r"infer: checkpoint is .*, but the directory .* does not exist"
    ):
        run(target(), checkpoint=tmp_path / "missing" / "run")


def test_constant_output_is_left_out_of_convergence():
    model = linear(use_bias=False)
    x = np.concatenate([np.zeros((1, 2), np.float32), X[1:]])
    draws = np.random.default_rng(0).normal(size=(2, 40, 2)).astype(np.float32)
    problem, chains = bayes.Problem(target(model, data=(x, Y))), Chains(0, (), {"draw": draws})
    found = fitted_from(problem, bayes.HMC(), chains, jr.key(1)).diagnostics.outputs
    assert found is not None
    assert found.r_hat.shape == (5,)
    assert np.isfinite(found.r_hat).all()


def test_log_likelihoods_and_draws_use_the_same_dropout_masks():
    model = nn.Sequential([nn.Dropout(0.5), linear()])
    chains = Chains(0, Optimised(np.ones((1, 3), np.float32), ()), {})
    posterior = fitted_from(bayes.Problem(target(model)), bayes.MCDropout(), chains, jr.key(1))
    tree = posterior.to_arviz(5, key=jr.key(2))
    draws = posterior.samples(5, key=jr.key(2))
    outputs = jax.jit(jax.vmap(lambda draw: jax.vmap(posterior.model(draw))(X)))(draws)
    expected = stats.norm.logpdf(Y, np.asarray(outputs), 0.5)
    np.testing.assert_allclose(tree["log_likelihood"]["y"][0], expected, rtol=1e-5)


class Convolutional(eqx.Module):
    convolution: nn.Conv1d
    readout: nn.Linear

    def __call__(self, x, *, key=None):
        keys = (None, None) if key is None else jr.split(key)
        hidden = self.convolution(x[None], key=keys[0])
        return self.readout(jnp.mean(hidden, axis=1), key=keys[1])


def test_positions_of_a_convolution_share_their_kernel_in_training():
    convolution = nn.Conv1d(1, 2, 1, key=jr.key(0))
    model = Convolutional(convolution, nn.Linear(2, "scalar", key=jr.key(1)))
    x = np.ones((6, 8), np.float32)

    found, expected = losses(bayes.Problem(target(model, data=(x, Y))), 1000).mean(axis=1)
    np.testing.assert_allclose(found, expected, rtol=0.15)


@jax.numpy_dtype_promotion("standard")
@jax.numpy_rank_promotion("allow")
def losses(problem, num):
    """The losses of two estimators, for draws from normal distributions of scale 2."""
    by_default, by_weights = (
        bayes.MeanField(initial_scale=2.0, estimator=estimator) for estimator in (None, "weights")
    )

    @jax.jit
    def of_both(keys):
        place = jax.tree.map(problem.unflatten, by_default.init(problem, jr.key(0)).place)
        one = jnp.asarray(1.0)
        of = [
            functools.partial(method._loss_of_draw, problem, place, problem.target.data, one)
            for method in (by_default, by_weights)
        ]
        return [jax.vmap(loss)(keys) for loss in of]

    with jax.debug_key_reuse(False):
        return np.asarray(of_both(jr.split(jr.key(1), num)))


class Tied(eqx.Module):
    shared: nn.Shared

    def __init__(self):
        layers = linear(0, 2), linear(1, 2)
        self.shared = nn.Shared(
            layers, where=lambda pair: pair[1].weight, get=lambda pair: pair[0].weight
        )

    def __call__(self, x, *, key=None):
        first, second = self.shared()
        return jnp.sum(second(jnp.tanh(first(x, key=key)), key=key))


def test_shared_arrays_are_drawn_once():
    problem = bayes.Problem(target(Tied()))
    np.testing.assert_array_equal(*losses(problem, 4))


def test_flipout_is_refused_for_shared_arrays():
    with pytest.raises(
        ValueError, match=r'"flipout" samples each layer separately, but Tied has layers'
    ):
        run(target(Tied()), bayes.MeanField(steps=2, estimator="flipout"))
