"""`fit`: steps, divergence, interrupts and errors."""

import functools
import gc
import itertools
import math
import shutil
import signal
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from eqxlike import error_if, filter_jit, is_array, nn, tree_at, tree_equal
from eqxlike.train import Callback, Checkpoint, DynamicLossScale, TrainState, fit, make_step, repeat
from eqxlike.train._run import Run
from eqxlike.train._state import copy_arrays
from tests.train.linear import BATCH as GOOD
from tests.train.linear import make_state, mean_square

OPTIMISER = optax.sgd(0.1, momentum=0.9)
SKIPPING = make_step(mean_square, OPTIMISER, check_finite="skip")


@pytest.fixture(scope="module")
def step():
    """A step whose loss is NaN or infinite if the batch is."""
    return make_step(mean_square, OPTIMISER)


@pytest.fixture
def state():
    return make_state(OPTIMISER)


BAD = np.full_like(GOOD, np.nan)


def batches(*, bad_at=None, value=np.nan):
    bad = GOOD.copy()
    bad[:, 0] = value
    for number in itertools.count(1):
        yield bad if number == bad_at else GOOD


def test_fit_makes_the_same_steps_as_a_loop(state, step):
    result = fit(state, step, batches(), num_steps=7)
    half = fit(state, step, batches(), num_steps=3)
    rest = fit(half.state, step, batches(), num_steps=4)
    history = []
    for _ in range(7):
        state, loss = step(state, GOOD)
        history.append(float(loss))
    assert (result.stopped, result.exit_status) == ("finished", 0)
    assert (result.message, result.evaluations) == ("Made 7 of 7 steps.", ())
    assert result.history == half.history + rest.history == tuple(history)
    assert all(type(loss) is float for loss in result.history)
    assert tree_equal(result.state, rest.state)
    assert tree_equal(result.state, state)
    assert result.steps_per_call == 1


def test_steps_may_have_aux_and_batches_may_end(state):
    loss = lambda model, x, key: (jnp.mean(model(x[0]) ** 2), "aux")
    step, data = make_step(loss, OPTIMISER, has_aux=True), iter([GOOD] * 5)
    assert len(fit(state, step, data, num_steps=2).history) == 2
    # Every batch that is drawn is used.
    result = fit(state, step, data, num_steps=10)
    assert (result.stopped, result.exit_status) == ("exhausted", 1)
    assert result.message.startswith("Made 3 of 10 steps; the batches ended. Use `train.repeat(")
    assert len(result.history) == result.state.step == 3
    for steps_per_call in (1, 4):
        batches = repeat([GOOD] * 3)
        result = fit(state, step, batches, num_steps=10, steps_per_call=steps_per_call)
        assert (result.stopped, len(result.history)) == ("finished", 10)


def test_losses_are_read_and_logged_every_n_steps(state, step, monkeypatch):
    reads, log, read = [], [], Run.read
    monkeypatch.setattr(Run, "read", lambda run: reads.append(run.num_unread) or read(run))
    fit(state, step, batches(), num_steps=11, check_every=4)
    assert [*filter(None, reads)] == [4, 4, 3]
    reads.clear()
    fit(state, step, batches(), num_steps=101, on_log=lambda *logged: log.append(logged[0]))
    assert ([*filter(None, reads)], log) == ([100, 1], [100, 101])
    log.clear()
    result = fit(
        *(state, step, itertools.islice(batches(), 7)),
        num_steps=20,
        log_every=3,
        check_every=2,
        on_log=lambda *logged: log.append(logged),
        evaluate=lambda state: {"step": state.step},
        evaluate_every=3,
    )
    history = result.history
    expected = [(3, np.mean(history[:3])), (6, np.mean(history[3:6])), (7, history[6])]
    np.testing.assert_allclose(log, expected, rtol=1e-6)
    assert result.evaluations == tuple((at, {"step": float(at)}) for at in (3, 6, 7))


# --- divergence ---


@pytest.mark.parametrize(
    ("check_every", "bad_at", "value"), [(3, 1, np.inf), (3, 5, np.nan), (100, 12, np.nan)]
)
def test_divergence_returns_the_exact_last_good_state(check_every, bad_at, value, state, step):
    data = batches(bad_at=bad_at, value=value)
    result = fit(state, step, data, num_steps=12, check_every=check_every)
    loss = "nan" if math.isnan(value) else "inf"
    assert (result.stopped, result.exit_status) == ("diverged", 1)
    told = f"The loss was {loss} in step {bad_at}; the state is the one after step {bad_at - 1}."
    assert result.message == told
    expected = fit(state, step, itertools.islice(batches(), bad_at - 1), num_steps=12)
    assert tree_equal(result.state, expected.state)
    assert result.history == expected.history
    # Training can continue, and step numbers count from its start.
    assert not result.state.is_halted
    rest = fit(result.state, step, batches(bad_at=3), num_steps=5)
    assert f"in step {bad_at + 2};" in rest.message
    assert rest.state.step == bad_at + 1


def test_nonfinite_array_is_a_divergence_and_skipped_step_is_not(state):
    # At 0 the root is finite, but its gradient is not.
    loss = lambda model, x, key: jnp.sqrt(jnp.sum((model.weight * x[:1, :1]) ** 2))
    step = make_step(loss, OPTIMISER)
    result = fit(state, step, batches(bad_at=4, value=0.0), num_steps=8)
    assert result.stopped == "diverged"
    assert result.message == (
        "A parameter or an array of the optimiser's or the model's state became NaN or infinite in "
        "step 4, at a loss of 0; the state is the one after step 3."
    )
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(result.state.model))
    scaled = make_state(OPTIMISER, loss_scale=DynamicLossScale())
    for bad_at in (4, 8):
        result = fit(scaled, step, batches(bad_at=bad_at, value=0.0), num_steps=8, check_every=3)
        assert (result.stopped, result.state.step, len(result.history)) == ("finished", 8, 8)
        assert result.history[bad_at - 1] == 0
    zeros = fit(scaled, step, [0 * GOOD] * 20, num_steps=20, check_every=7)
    assert zeros.stopped == "diverged"
    assert zeros.message == (
        "A gradient at the smallest loss scale, a parameter or an array of the optimiser's or the "
        "model's state became NaN or infinite in step 16, at a loss of 0; the state is the "
        "one after step 15."
    )
    assert tree_equal(zeros.state.model, scaled.model)


def broken_in(number):
    """Gradient descent that makes the last number of each array NaN in step `number`."""

    def update(updates, left, parameters=None):
        bad = jnp.where(left == 1, jnp.nan, 0.0)
        broken = lambda leaf: (-1e-3 * leaf).at[(-1,) * leaf.ndim].add(bad)
        return jax.tree.map(broken, updates), left - 1

    return optax.GradientTransformation(lambda _: jnp.array(number, jnp.int32), update)


@pytest.mark.parametrize("steps_per_call", [1, 3])
def test_state_that_the_optimiser_makes_nonfinite_is_dropped_or_reported(steps_per_call):
    def loss(model, x, key):
        return jnp.mean((model.weight[:2] @ x[0]) ** 2)

    def checked_loss(model, x, key):
        # The loss of a nonfinite state must not be computed.
        return loss(error_if(model, jnp.isnan(model.weight).any(), "a bad state"), x, key)

    def run(bad_at, num_steps, check_finite):
        model = nn.Linear(2, 100, use_bias=False, key=jax.random.key(0))
        optimiser = broken_in(bad_at)
        state = TrainState.create(model, optimiser, key=jax.random.key(1))
        used = checked_loss if check_finite == "state" and steps_per_call == 1 else loss
        step = make_step(used, optimiser, check_finite=check_finite)
        options = {"steps_per_call": steps_per_call, "check_every": 5}
        return fit(state, step, batches(), num_steps=num_steps, **options)

    for bad_at in (1, 9):
        found = run(bad_at, 12, "state")
        assert f"became NaN or infinite in step {bad_at}, at a loss of" in found.message
        assert len(found.history) == bad_at - 1
        assert jnp.isfinite(found.state.model.weight).all()
        if bad_at > 1:
            expected = run(bad_at, bad_at - 1, "state")
            assert found.history == expected.history
            assert tree_equal(found.state, expected.state)
        # Loss and gradient are finite. The next read finds the NaN, also after the last step.
        for num_steps in (bad_at, 12):
            found = run(bad_at, num_steps, True)
            assert found.stopped == "diverged"
            assert f"The state after step {len(found.history)} is not finite, alt" in found.message
            assert bad_at <= len(found.history) < bad_at + 5 + steps_per_call


def test_nonfinite_model_state_that_the_next_step_replaces_is_found():
    def loss(model, kept, x, key):
        bad = jnp.where(x[0, 0] > 2, jnp.inf, 0.0)
        return jnp.mean(model.weight @ x[0]), kept.at[5000].set(bad)

    state = make_state(OPTIMISER, model_state=jnp.zeros(8192))
    data = [jnp.full((1, 2), 3.0 if index == 2 else 1.0) for index in range(6)]
    step = make_step(loss, OPTIMISER)
    for steps_per_call in (1, 3):
        result = fit(state, step, data, num_steps=6, steps_per_call=steps_per_call)
        assert (result.stopped, len(result.history), int(result.state.step)) == ("diverged", 2, 2)


@pytest.mark.parametrize(("steps_per_call", "is_wrapped"), [(1, False), (3, False), (1, True)])
def test_skipped_steps_are_reported_and_excluded_from_means(
    steps_per_call, is_wrapped, state, tmp_path
):
    data = [GOOD, GOOD, BAD, BAD, GOOD, BAD, GOOD, GOOD]
    step = (lambda *arguments: SKIPPING(*arguments)) if is_wrapped else SKIPPING
    run = functools.partial(fit, step=step, steps_per_call=steps_per_call)
    means, skipped = [], []

    class Log(Callback):
        def on_log(self, run):
            means.append(run.loss)
            skipped[:] = run.skipped

    options = {"callbacks": [Log(), Checkpoint(tmp_path, every=4)], "check_every": 2}
    result = run(state, batches=data, num_steps=8, log_every=4, **options)
    good = fit(state, SKIPPING, batches(), num_steps=5)
    history = np.array(result.history)
    assert np.flatnonzero(np.isnan(history)).tolist() == skipped == [2, 3, 5]
    np.testing.assert_allclose(history[[0, 1, 4, 6, 7]], good.history, rtol=1e-6)
    np.testing.assert_allclose(means, [history[:2].mean(), history[[4, 6, 7]].mean()])
    message = "Made 8 of 8 steps. Skipped updates that were not finite: steps 3, 4, 6."
    assert result.message.startswith(message)
    assert (result.stopped, result.num_skipped) == ("finished", 3)
    assert (result.state.step, bool(result.state.is_halted)) == (8, False)
    assert tree_equal(result.state.model, good.state.model, rtol=1e-6)
    # The run resumes from the checkpoint of a skipped step.
    shutil.rmtree(tmp_path / "step_000000008")
    resumed = run(state, batches=data, num_steps=8, resume_from=tmp_path)
    assert resumed.message.endswith("Skipped updates that were not finite: step 6.")
    assert tree_equal(resumed.state, result.state)
    # With `max_skipped=1`, too many steps in a row are skipped.
    few = run(state, batches=data, num_steps=8, max_skipped=1)
    assert (few.stopped, few.exit_status, len(few.history)) == ("diverged", 1, 8)
    why = "of 2 steps in a row were not finite and were skipped, more than max_skipped=1"
    assert why in few.message


@pytest.mark.parametrize(("check_finite", "steps_per_call"), [(True, 1), (False, 2), (True, 2)])
def test_run_continues_until_the_optimiser_skips_too_many_steps(check_finite, steps_per_call):
    optimiser = optax.apply_if_finite(OPTIMISER, 2)
    step = make_step(mean_square, optimiser, check_finite=check_finite)
    run = functools.partial(fit, make_state(optimiser), step, steps_per_call=steps_per_call)
    result = run([GOOD, BAD, BAD, GOOD], num_steps=4)
    assert (result.stopped, result.num_skipped) == ("finished", 2)
    assert np.isfinite(result.history[3])
    result = run([GOOD, BAD, BAD, BAD, GOOD], num_steps=5)
    assert (result.stopped, len(result.history)) == ("diverged", 3)
    if check_finite:
        assert result.message.startswith("The loss was nan in step 4; the state is the one after")


def test_error_names_an_array_of_the_state_that_is_also_a_batch(state, step):
    data, keeps = [GOOD], Callback()
    keeps.every, keeps.on_step = 1, lambda run: data.append(run.state.model.weight)
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError)) as caught:
        fit(state, step, iter(data), num_steps=3, callbacks=[keeps])
    assert "state.model.weight = batch" in str(caught.value.__notes__)


def test_last_good_state_is_kept_with_weak_types_and_numpy_arrays_from_a_callback(state, step):
    class Puts(Callback):
        def on_start(self, run):
            arrays = jax.tree.map(lambda leaf: np.asarray(leaf) if leaf.ndim else leaf, run.state)
            run.state = tree_at(lambda state: state.model.bias, arrays, jnp.full(1, 0.5))

    result = fit(state, step, batches(bad_at=4), num_steps=6, callbacks=[Puts()])
    assert (result.stopped, len(result.history)) == ("diverged", 3)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(result.state.model))


def test_nonfinite_number_that_the_next_step_replaces_is_found():
    optimiser = optax.chain(optax.optimistic_gradient_descent(0.01), optax.zero_nans())

    def loss(model, x, key):
        # If x is 0, a single number of the gradient is NaN, in the middle of the array.
        return jnp.mean((model - 1) ** 2) + jnp.sqrt(x * (1 + model[5000] ** 2))

    state = TrainState.create(jnp.full(10_000, 0.5), optimiser, key=jax.random.key(0))
    stream, step = [np.float32(index != 3) for index in range(8)], make_step(loss, optimiser)
    for check_every in (4, 100):
        result = fit(state, step, stream, num_steps=8, check_every=check_every)
        assert (result.stopped, int(result.state.step)) == ("diverged", 3)


def test_custom_step_that_calls_our_step_runs_without_keeping_the_last_good_state(state, step):
    @filter_jit
    @functools.wraps(step.__wrapped__)
    def own(state, batch):
        state, loss = step(state, jnp.where(jnp.isfinite(batch), batch, 0))
        return state, loss + jnp.where(jnp.isfinite(batch).all(), 1, jnp.nan)

    expected = fit(state, step, batches(), num_steps=3).history
    result = fit(state, own, batches(bad_at=4), num_steps=8)
    assert result.stopped == "diverged"
    assert "nan in step 4, and the last good state was not kept" in result.message
    np.testing.assert_allclose(result.history, np.add(expected, 1), rtol=1e-6)


def test_calls_are_counted_if_a_custom_step_does_not_count_steps(state, step):
    for check_every, bad_at, is_loss_finite in [(1, 5, False), (3, 1, True), (100, 5, True)]:

        def own(state, batch, is_loss_finite=is_loss_finite):
            new, loss = step(state, batch)
            loss = jnp.where(jnp.isfinite(loss), loss, 0.0) if is_loss_finite else loss
            return tree_at(lambda state: state.step, new, jnp.zeros((), jnp.int32)), loss

        result = fit(state, own, batches(bad_at=bad_at), num_steps=12, check_every=check_every)
        assert result.stopped == "diverged"
        assert f"in step {bad_at}" in result.message
        assert result.message.endswith(f"the state is the one after step {bad_at - 1}.")
        expected = fit(state, step, batches(bad_at=bad_at), num_steps=12)
        assert result.history == expected.history
        assert tree_equal(result.state.model, expected.state.model)


def test_callback_may_replace_the_state_and_the_new_state_is_checked(state, step):
    def rewound(make, **options):
        class Rewind(Callback):
            every = 5

            def on_start(self, run):
                self.start = make(run)

            def on_step(self, run):
                if run.steps == 10:
                    run.state = self.start

        return fit(state, step, batches(**options), num_steps=20, callbacks=[Rewind()])

    result = rewound(lambda run: copy_arrays(run.state), bad_at=13)
    assert result.message == "The loss was nan in step 3; the state is the one after step 2."
    assert (len(result.history), int(result.state.step)) == (12, 2)
    with pytest.raises(RuntimeError, match=r"run\.state got a state with .*\.copy\(\)"):
        rewound(lambda run: run.state)
    with pytest.raises(TypeError, match=r"run\.state expected a TrainState, got Linear"):
        rewound(lambda run: run.state.model)


def test_error_of_a_failed_check_says_that_the_state_of_the_caller_is_kept(state):
    def loss(model, x, key):
        return jnp.mean(jax.vmap(model)(error_if(x, jnp.isnan(x), "nan in x")) ** 2)

    with pytest.raises(RuntimeError, match="nan in x") as caught:
        fit(state, make_step(loss, OPTIMISER), batches(bad_at=2), num_steps=3)
    (note,) = caught.value.__notes__
    assert note.startswith("The state of this run was donated to the step that failed")
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


# --- interrupts ---


def interrupted_at(number, ctrl_c):
    for count in itertools.count(1):
        if count == number:
            ctrl_c()
        yield GOOD


def test_ctrl_c_ends_the_run_after_the_current_step(state, step, ctrl_c):
    for number in (4, 10):
        result = fit(state, step, interrupted_at(number, ctrl_c), num_steps=10)
        assert (result.stopped, result.exit_status) == ("interrupted", 130)
        assert result.message == f"Interrupted after {number} of 10 steps."
        assert tree_equal(result.state, fit(state, step, batches(), num_steps=number).state)

    def interrupting(state, batch):
        outputs = step(state, batch)
        ctrl_c()
        return outputs

    result = fit(state, interrupting, batches(), num_steps=10)
    assert result.stopped == "interrupted"
    assert len(result.history) == result.state.step == 1

    def data():
        yield GOOD
        yield BAD
        ctrl_c()
        yield GOOD

    assert fit(state, step, data(), num_steps=10).stopped == "diverged"


def test_ctrl_c_while_waiting_for_losses_loses_no_loss(state, step, ctrl_c, monkeypatch):
    get, interrupts = jax.device_get, iter([ctrl_c, ctrl_c])

    def interrupted(arrays):
        found = get(arrays)
        for interrupt in interrupts:
            interrupt()
        return found

    monkeypatch.setattr(jax, "device_get", interrupted)
    result = fit(state, step, batches(), num_steps=20, check_every=4)
    assert (result.stopped, len(result.history)) == ("interrupted", 4)


def test_keyboard_interrupts_end_cleanly_unless_the_state_is_lost(state, step):
    def raising(*arguments):
        if len(arguments) == 2 and isinstance(arguments[0], TrainState):
            step(*arguments)
        raise KeyboardInterrupt

    of_batches = itertools.chain([GOOD] * 4, map(raising, [0]))
    for data, on_log in ((of_batches, None), (batches(), raising)):
        result = fit(state, step, data, num_steps=10, log_every=4, on_log=on_log)
        assert result.stopped == "interrupted"
        assert tree_equal(result.state, fit(state, step, batches(), num_steps=4).state)
    with pytest.raises(KeyboardInterrupt):
        fit(state, raising, batches(), num_steps=10)
    # Other errors are raised unchanged.
    with pytest.raises(ZeroDivisionError):
        fit(state, step, (GOOD * (1 // number) for number in (1, 0)), num_steps=4)
    assert len(fit(state, step, batches(), num_steps=2).history) == 2


def test_interrupted_nonfinite_step_keeps_the_last_good_state(state, step, monkeypatch):
    def copy(array):
        if array:
            raise KeyboardInterrupt
        return jnp.array(array, copy=True)

    monkeypatch.setattr(jnp, "copy", copy)
    result = fit(state, lambda *arguments: step(*arguments), batches(bad_at=3), num_steps=10)
    assert (result.stopped, len(result.history), result.state.step) == ("interrupted", 2, 2)
    assert not result.state.is_halted


def test_custom_signal_handler_is_not_replaced(state, step):
    seen = []
    handler = lambda *_: seen.append(None)
    before = signal.signal(signal.SIGINT, handler)
    try:
        data = interrupted_at(2, lambda: signal.raise_signal(signal.SIGINT))
        result = fit(state, step, data, num_steps=4)
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert (result.stopped, len(seen)) == ("finished", 1)


# --- errors ---


def test_a_donated_state_is_refused_with_the_paths(step):
    state = make_state(optax.adam(0.1))
    for leaf in jax.tree.leaves(state):
        leaf.delete()
    paths = r"state\.model\.weight, state\.model\.bias, .* and \d+ more\. A training step donates"
    expected = f"fit got a state with arrays that were donated .* deleted: {paths} its state"
    with pytest.raises(RuntimeError, match=expected):
        fit(state, step, batches(), num_steps=2)


def test_bad_arguments_are_refused(state, step):
    def loss(model, batch, key):
        return 0.0

    way = r"\. Create one .*TrainState\.create\(model, "
    number = "must be an integer of at least 1, got"
    for error, message, arguments in [
        (TypeError, f"fit expected a TrainState, got Identity{way}", {"state": nn.Identity()}),
        (TypeError, f"a TrainState, got the class Linear{way}", {"state": nn.Linear}),
        (TypeError, r"`step` to be a function, `step\(state, batch\)`; got None", {"step": None}),
        (TypeError, r"fit calls `step\(state, batch\)`, but .* argument: 'key'", {"step": loss}),
        (TypeError, r"an iterable of batches, .* got <function .*>: call it", {"batches": batches}),
        (TypeError, r"an iterable of batches, .* got 3\.", {"batches": 3}),
        (TypeError, r"of numbers; got batch\[1\] \(<U1\)", {"batches": [(GOOD, np.array(["a"]))]}),
        (TypeError, r"`evaluate` to be a f.*, `evaluate\(state\)`; got \{\}", {"evaluate": {}}),
        (TypeError, r"calls `evaluate\(state\)`, .* `make_evaluate", {"evaluate": loss}),
        (TypeError, r"`on_log` to be a f.*, `on_log\(step, loss\)`; got 100", {"on_log": 100}),
        (TypeError, "fit: resume_from must be the path .* got 3", {"resume_from": 3}),
        (ValueError, f"num_steps {number} 0", {"num_steps": 0}),
        (ValueError, f"log_every {number} 2.5", {"log_every": 2.5}),
        (ValueError, f"check_every {number} True", {"check_every": True}),
        (ValueError, f"evaluate_every {number} 0", {"evaluate_every": 0, "evaluate": dict}),
    ]:
        given = {"state": state, "step": step, "batches": [], "num_steps": 1, **arguments}
        with pytest.raises(error, match=message):
            fit(**given)


def test_arrays_instead_of_batches_are_refused_with_their_shapes(state, step):
    array = r"f32\[4,2\]\(numpy\)"
    for arrays, shown in [
        (GOOD, array),
        (jnp.ones((4, 2)), r"f32\[4,2\]"),
        ((GOOD, GOOD[:, :1]), rf"\({array}, f32\[4,1\]\(numpy\)\)"),
        ((GOOD, 2 * GOOD), rf"\({array}, {array}\)"),
        ([GOOD, GOOD[:, 0]], rf"\[{array}, f32\[4\]\(numpy\)\]"),
        ({"x": GOOD}, rf"\{{'x': {array}\}}"),
    ]:
        way = r"\. .*`train\.minibatches\(arrays, "
        with pytest.raises(TypeError, match=f"^fit expected an iterable .* arrays: {shown}{way}"):
            fit(state, step, arrays, num_steps=3)


def test_lists_and_tuples_of_batches_are_accepted(state, step):
    split = tuple(np.stack([GOOD] * 3))
    for data in ([GOOD, 2 * GOOD], (GOOD,) * 2, split, (GOOD, GOOD[:3]), (GOOD,)):
        assert len(fit(state, step, data, num_steps=len(data)).history) == len(data)


def test_step_with_a_wrong_return_value_is_refused(state):
    pair = r"expected the step to return `\(state, loss\)`, with the next TrainState"
    for wrong, message in [
        (lambda state, batch: state, pair),
        (lambda state, batch: (0.0, state), pair),
        (lambda state, batch: (state,), pair),
        (lambda state, batch: (state, "low"), "a real number of .* as loss, got 'low'"),
        (lambda state, batch: (state, [0.0]), r"a real number of .* as loss, got \["),
        (lambda state, batch: (state, jnp.ones(2)), r"of shape \(\) as loss, got f32\[2\]"),
        (lambda state, batch: (state, jnp.ones((), complex)), r"of shape \(\) as loss, got c64"),
    ]:
        with pytest.raises(TypeError, match=message):
            fit(state, wrong, batches(), num_steps=2)


def test_no_state_is_kept_alive_after_the_result(state, step):
    gc.disable()
    try:
        kept = weakref.ref(fit(state, step, batches(), num_steps=3).state.model.weight)
        assert kept() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("donate", [False, True])
def test_fit_and_its_check_need_memory_for_one_state(donate):
    """The caller's state needs memory too, unless it is deleted or donated."""
    found, optimiser = [], optax.adamw(1e-3)

    def make():
        model = nn.Linear(512, 512, key=jax.random.key(0))
        return TrainState.create(model, optimiser, key=jax.random.key(1))

    def watched():
        for _ in range(6):
            found.append(sum(each.nbytes for each in jax.live_arrays() if not each.is_deleted()))
            yield np.ones((4, 512), np.float32)

    step, before = make_step(mean_square, optimiser), sum(each.nbytes for each in jax.live_arrays())
    kept = make()
    if donate:
        fit(kept, step, watched(), num_steps=6, check_every=2, donate=True)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(kept) if is_array(leaf))
    else:
        del kept
        fit(make(), step, watched(), num_steps=6, check_every=2)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(make()) if is_array(leaf))
    assert (max(found) - before) / size == pytest.approx(1, abs=0.05)
    # The step updates all arrays in place and only needs memory for the gradients.
    memory = step.lower(make(), np.ones((4, 512), np.float32)).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= 0.99 * size
    assert memory.temp_size_in_bytes < 0.45 * size


def test_state_with_a_shared_array_may_be_donated(step):
    state = make_state(OPTIMISER)
    state = tree_at(lambda state: state.optimiser_state[0].trace.weight, state, state.model.weight)
    expected = fit(state, step, batches(), num_steps=2)
    assert tree_equal(fit(state, step, batches(), num_steps=2, donate=True).state, expected.state)
    assert state.key.is_deleted()
    assert state.model.weight.is_deleted()
