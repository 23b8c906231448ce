"""`bayes.infer`: files, Ctrl-C, keys, diagnostics and bad input."""

import functools
import itertools
import re
import types
from typing import ClassVar

import arviz_stats
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro.distributions as dist
import pytest
from scipy import stats
from scipy.special import logsumexp

import eqxlike as eqx
from eqxlike import ad, bayes, nn
from eqxlike.bayes import _infer
from eqxlike.bayes._libraries import as_libraries_compute
from tests.bayes.methods.cases import X, Y

pytestmark = [
    pytest.mark.usefixtures("double_precision"),
    pytest.mark.filterwarnings("ignore::eqxlike.bayes.InferenceWarning"),
]

MAP = bayes.MAP(steps=3)
ENSEMBLE = bayes.DeepEnsemble(steps=3, members=3)


def sgld(**settings):
    """A method with two short chains and minibatches."""
    defaults = {"num_samples": 8, "num_warmup": 6, "chains": 2, "thin": 1, "descent_steps": 1}
    return bayes.SGLD(**defaults | settings, decay=0.0, batch_size=3)


SHORT = sgld()


@functools.cache
def linear():
    return nn.Linear(2, "scalar", key=jr.key(0), dtype=jnp.float64)


def small_target(order=slice(None)):
    likelihood = bayes.Gaussian(dist.HalfNormal(1.0))
    return bayes.Posterior(linear(), bayes.normal(0.0, 1.0), likelihood, (X[order], Y[order]))


def run(method=SHORT, target=None, seed=1, **kwargs):
    target = small_target() if target is None else target
    return bayes.infer(target, method, key=jr.key(seed), progress=False, **kwargs)


@functools.cache
def uninterrupted():
    return run()


def draws(posterior):
    return np.asarray(posterior.records["draw"])


def stop_after(monkeypatch, num_calls, ctrl_c):
    """Simulates Ctrl-C during the call with this number."""
    real, calls = _infer.advance, []

    def advance(*args):
        for each in real(*args):
            calls.append(each)
            if len(calls) == num_calls:
                ctrl_c()
            yield each

    monkeypatch.setattr(_infer, "advance", advance)


# --- files --------------------------------------------------------------------------------------


def test_interrupted_run_resumes_with_the_same_numbers(tmp_path, monkeypatch, ctrl_c):
    """Interrupts during the warm-up, at its end and later. Calls make 1, 2, 4, ... steps."""
    monkeypatch.setattr("eqxlike.bayes._infer._CALL_S", 1e6)
    path, tuned = tmp_path / "run", {}
    method = bayes.HMC(num_samples=8, num_warmup=10, chains=2, trajectory_steps=1)
    for num_calls, step in [(3, 7), (2, 10), (2, 13)]:
        with monkeypatch.context() as patch:
            stop_after(patch, num_calls, ctrl_c)
            message = f"stopped after step {step} of 18. The run is saved"
            with pytest.raises(KeyboardInterrupt, match=message):
                run(method, checkpoint=path)
        loaded = bayes.load(path, small_target(), method)
        if step <= 10:
            check_that_draws_are_missing(loaded, f"stopped after step {step} of 18")
        states = loaded.chains.states
        tuned[step] = np.asarray(states.step_size)
    resumed, expected = run(method, checkpoint=path), run(method)
    for name, record in expected.records.items():
        np.testing.assert_array_equal(resumed.records[name], record)
    # The step size is only tuned during the warm-up.
    assert np.all(tuned[7] != tuned[10])
    np.testing.assert_array_equal(tuned[10], expected.chains.states.step_size)


def check_that_draws_are_missing(posterior, message):
    message = f"there are no draws yet: the run {message}, before its first draw"
    for use in (
        lambda: posterior.samples(key=jr.key(0)),
        lambda: bayes.predict(posterior, X, key=jr.key(0)),
        lambda: posterior.to_arviz(key=jr.key(0)),
    ):
        with pytest.raises(ValueError, match=message):
            use()
    assert message in str(posterior.diagnostics)
    assert not hasattr(posterior, "convergence")


def test_swag_that_stopped_before_two_positions_has_no_draws(tmp_path, monkeypatch, ctrl_c):
    path, method = tmp_path / "run", bayes.SWAG(steps=4, collect_steps=4, collect_every=2, rank=2)
    method = eqx.tree_at(lambda method: method.batch_size, method, None)
    with monkeypatch.context() as patch:
        stop_after(patch, 1, ctrl_c)
        with pytest.raises(KeyboardInterrupt):
            run(method, checkpoint=path)
    loaded = bayes.load(path, small_target(), method)
    check_that_draws_are_missing(loaded, "stopped after step 1 of 8")


def test_run_without_a_file_says_that_nothing_was_saved(monkeypatch, ctrl_c):
    stop_after(monkeypatch, 1, ctrl_c)
    with pytest.raises(
        KeyboardInterrupt, match=r"Nothing was saved: pass `checkpoint=PATH` to save runs."
    ):
        run()


def test_finished_run_is_read_from_its_file_and_extended(tmp_path, monkeypatch):
    path = tmp_path / "run"
    first = run(checkpoint=path)
    with monkeypatch.context() as patch:
        patch.setattr(_infer, "advance", lambda *args: iter(()))
        np.testing.assert_array_equal(draws(run(checkpoint=path)), draws(first))
    longer = sgld(num_samples=12)
    extended = run(longer, checkpoint=path)
    np.testing.assert_array_equal(draws(extended), draws(run(longer)))


def test_draws_do_not_depend_on_the_number_of_steps_in_a_call(monkeypatch):
    expected = draws(uninterrupted())
    monkeypatch.setattr("eqxlike.bayes._infer._CALL_S", 1e-9)
    np.testing.assert_array_equal(draws(run()), expected)


class Waiting(bayes.SGLD):
    """Fast chains of a batch wait for slow chains, as in `bayes.NUTS`."""

    makes_draws_in_turn: ClassVar[bool] = False


@pytest.mark.parametrize(
    ("kind", "chains", "lengths"),
    [(Waiting, 2, [1, 1, 1, 1]), (Waiting, 64, [1, 2, 1]), (bayes.SGLD, 64, [1, 1, 1, 1])],
)
def test_calls_of_many_chains_that_wait_for_each_other_are_longer(
    kind, chains, lengths, monkeypatch
):
    """With a fake clock, each call takes 0.5 s, the target for few chains."""
    clock = itertools.count(step=0.5)
    fake = types.SimpleNamespace(perf_counter=lambda: next(clock))
    monkeypatch.setattr("eqxlike.bayes._infer.time", fake)
    found, problem = [], bayes.Problem(small_target())
    method = kind(num_samples=4, num_warmup=0, thin=1, chains=chains, descent_steps=0)
    begun = _infer.start(method, problem, jr.key(0))
    for after, _ in _infer.advance(method, problem, begun, jr.key(1)):
        found.append(after.step - sum(found))
    assert found == lengths


def test_file_of_another_run_is_refused(tmp_path):
    path = tmp_path / "run"
    run(checkpoint=path)
    again, load = functools.partial(run, checkpoint=path), functools.partial(bayes.load, path)
    for call, message in [
        (lambda: again(seed=2), "its key differs"),
        (lambda: again(target=small_target(slice(None, None, -1))), "its data differs"),
        (lambda: again(MAP), "its method differs: SGLD, not MAP"),
        (lambda: load(small_target(), MAP), "its method differs: SGLD, not MAP"),
        (
            lambda: load(small_target(), sgld(num_warmup=0)),
            "with other settings: .*num_warmup 6, not 0",
        ),
        (
            lambda: load(small_target(), sgld(num_samples=4)),
            r"num_samples = 8, and num_samples = 4 was requested\. Pass at least 8 to continue .*"
            r".* `bayes\.load` with num_samples = 8, and call `samples\(4, key=key",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match=r"run is damaged: .*'draw'.* expected 512 bytes"):
        load(small_target(), SHORT)
    for content in (b"", b"{}", b"[1]\n", b'{"format": 3}\n'):
        path.write_bytes(content)
        for call in (again, lambda: load(small_target(), SHORT)):
            with pytest.raises(ValueError, match=r"is not a run of `bayes.infer`"):
                call()


# --- how chains run -----------------------------------------------------------------------------


def test_chains_run_in_parallel_on_devices():
    again = draws(run(chain_method="parallel"))
    np.testing.assert_allclose(again, draws(uninterrupted()), rtol=1e-6)


def test_mode_computes_the_gradients():
    class Zero(ad.Mode):
        def value_and_grad(self, function, arrays):
            return function(arrays), [jnp.zeros_like(each) for each in arrays]

    posterior = run(MAP, mode=Zero())
    np.testing.assert_array_equal(
        posterior.samples(1, key=jr.key(0)).model.weight[0], linear().weight
    )


def test_thinned_sequential_chains_have_every_third_draw():
    thinned = run(sgld(num_samples=2, num_warmup=6, thin=3), chain_method="sequential")
    np.testing.assert_allclose(draws(thinned), draws(uninterrupted())[:, 2::3], rtol=1e-6)


def test_step_size_without_warm_up_is_not_tuned():
    method = bayes.HMC(num_warmup=0, chains=2, step_size=1e-3, trajectory_steps=3)
    problem = bayes.Problem(small_target())

    @jax.jit
    def stepped():
        with as_libraries_compute():
            state = method.init(problem, jr.key(0))
            return method.step(problem, state, jnp.asarray(0), jr.key(1))

    state, record = stepped()
    assert record["acceptance"] > 0.99
    np.testing.assert_array_equal(state.step_size, 1e-3)
    np.testing.assert_array_equal(state.inverse_mass_matrix, 1.0)


def test_progress_is_shown(capsys):
    bayes.infer(small_target(), ENSEMBLE, key=jr.key(0))
    assert "DeepEnsemble: step 3/3, loss " in capsys.readouterr().err


def test_kept_draws_are_equally_spaced():
    posterior = run(ENSEMBLE)
    samples = posterior.samples(8, key=jr.key(3)).likelihood["scale"]
    _, counts = np.unique(np.asarray(samples), return_counts=True)
    assert sorted(counts) == [2, 3, 3]


# --- diagnostics --------------------------------------------------------------------------------


def test_convergence_equals_arviz():
    noise = np.random.default_rng(0).normal(size=(4, 100))
    chains = np.cumsum(noise, axis=1) * 0.1 + noise
    found = bayes.convergence(chains[..., None])
    np.testing.assert_allclose(found.r_hat[0], arviz_stats.rhat(chains), rtol=1e-6)
    # NumPyro truncates the sum of autocorrelations a little later than ArviZ.
    ess = functools.partial(arviz_stats.ess, chains)
    np.testing.assert_allclose(found.ess_bulk[0], ess(method="bulk"), rtol=0.05)
    np.testing.assert_allclose(found.ess_tail[0], ess(method="tail", prob=(0.05, 0.95)), rtol=0.05)


def test_effective_sizes_of_alternating_and_of_discrete_draws_equal_arviz():
    noise = np.random.default_rng(0).normal(size=(4, 100))
    alternating = np.sign(noise[:, :1]) * (-1.0) ** np.arange(100) + 0.1 * noise
    discrete = np.random.default_rng(0).integers(0, 3, (4, 100)).astype(float)
    found = bayes.convergence(np.stack([alternating, discrete], axis=-1))
    bulk = [arviz_stats.ess(each, method="bulk") for each in (alternating, discrete)]
    np.testing.assert_allclose(found.ess_bulk, bulk, rtol=0.05)
    tail = arviz_stats.ess(discrete, method="tail", prob=(0.05, 0.95))
    np.testing.assert_allclose(found.ess_tail[1], tail, rtol=0.05)


def test_chains_that_disagree_are_a_warning():
    with pytest.warns(bayes.InferenceWarning, match="SGLD: the chains disagree on the outputs"):
        run()


def test_method_without_chains_or_evidence_raises():
    posterior = run(ENSEMBLE)
    with pytest.raises(
        AttributeError, match="DeepEnsemble has no Markov chains, and therefore no convergence"
    ):
        _ = posterior.convergence
    message = "DeepEnsemble does not estimate the evidence; use `bayes.Laplace` or `bayes.Pathfin"
    with pytest.raises(AttributeError, match=re.escape(message)):
        _ = posterior.log_evidence
    assert getattr(posterior, "log_evidence", None) is getattr(posterior, "convergence", None)


# --- bad input ----------------------------------------------------------------------------------


def far_away():
    return bayes.Posterior(linear(), bayes.normal(), bayes.Gaussian(1.0), (1e200 * X, Y))


def predicted(x):
    return bayes.predict(uninterrupted(), x, key=jr.key(0))


NO_TARGET = r"target must be a bayes.Posterior.* got one of type int"
SHAPE = r"inputs of shape \(2,\), as in the data; got inputs of shape "
BAD_INPUT = [
    (lambda: run(bayes.NUTS), TypeError, r"NUTS\'>: call it, `NUTS\(\.\.\.\)`"),
    (lambda: bayes.load("run", small_target(), bayes.NUTS), TypeError, r"`NUTS\(\.\.\.\)`"),
    (lambda: run(MAP, target=3), TypeError, NO_TARGET),
    (lambda: bayes.simulation_ranks(3, MAP, key=jr.key(0)), TypeError, NO_TARGET),
    (
        lambda: run(target=far_away()),
        ValueError,
        "log likelihood is -inf at the initial parameters",
    ),
    (
        lambda: uninterrupted().model(uninterrupted().samples(3, key=jr.key(0))),
        *(ValueError, r"at model\.weight; got shape \(3, 1, 2\)"),
    ),
    (lambda: predicted(np.ones((4, 3))), ValueError, SHAPE + r"\(3,\)\.$"),
    (lambda: predicted(np.ones(2)), ValueError, SHAPE + r"\(\)\. For one .* pass `x\[None\]`\.$"),
    (lambda: predicted(X[:0]), ValueError, "x has no examples"),
    (lambda: bayes.convergence(np.zeros(10)), ValueError, r"\(chains, draws, .* at least 4 draws"),
    (lambda: bayes.convergence(np.zeros((4, 3))), ValueError, "with at least 4 draws"),
]


def test_bad_input_is_an_error():
    for call, error, message in BAD_INPUT:
        with pytest.raises(error, match=message):
            call()


# --- predictions --------------------------------------------------------------------------------


def test_predictions_use_the_outputs_of_each_draw():
    posterior = run(ENSEMBLE)
    samples = posterior.samples(key=jr.key(5))
    weight, bias = np.asarray(samples.model.weight), np.asarray(samples.model.bias)
    mean = (weight @ X.T)[:, 0] + bias
    scale = np.asarray(samples.likelihood["scale"])[:, None]
    expected = logsumexp(stats.norm.logpdf(Y, mean, scale), axis=0) - np.log(3)
    for batch_size in (4, 100):
        prediction = bayes.predict(
            posterior, X, key=jr.key(0), num_samples=3, batch_size=batch_size
        )
        assert isinstance(prediction, bayes.Mixture)
        np.testing.assert_allclose(prediction.log_prob(jnp.asarray(Y)), expected, rtol=1e-9)
