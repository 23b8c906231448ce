import itertools
import math
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from eqxlike import filter_jit, is_array, nn, tree_at, tree_equal
from eqxlike.train import Callback, DynamicLossScale, TrainState, fit, make_step
from eqxlike.train._state import copy_arrays

OPTIMISER = optax.adam(0.1)
GOOD = np.ones((4, 2), np.float32)


@pytest.fixture(scope="module")
def step():
    """The loss is the mean square of the output, NaN or infinite where the batch is."""
    return make_step(lambda model, x, key: jnp.mean(jax.vmap(model)(x) ** 2), OPTIMISER)


@pytest.fixture
def state(getkey):
    return TrainState.create(nn.Linear(2, 1, key=getkey()), OPTIMISER, key=getkey())


def batches(*, bad_at=None, value=np.nan):
    bad = GOOD.copy()
    bad[:, 0] = value
    for number in itertools.count(1):
        yield bad if number == bad_at else GOOD


def test_makes_the_steps_that_a_loop_would(state, step):
    result = fit(state, step, batches(), num_steps=7)
    history = []
    for _ in range(7):
        state, loss = step(state, GOOD)
        history.append(float(loss))
    assert result.stopped == "finished"
    assert result.message == "Made 7 of 7 steps."
    assert result.history == tuple(history)
    assert all(type(loss) is float for loss in result.history)
    assert tree_equal(result.state, state)


def test_state_it_was_given_stays_usable(state, step):
    first = fit(state, step, batches(), num_steps=3)
    second = fit(state, step, batches(), num_steps=3)
    assert first.history == second.history


def test_goes_on_where_another_run_stopped(state, step):
    whole = fit(state, step, batches(), num_steps=6)
    half = fit(state, step, batches(), num_steps=3)
    rest = fit(half.state, step, batches(), num_steps=3)
    assert tree_equal(rest.state, whole.state)
    assert half.history + rest.history == whole.history


@pytest.mark.parametrize("check_every", [1, 3, 5, 100])
@pytest.mark.parametrize("bad_at", [1, 5, 12])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_divergence_returns_the_exact_last_good_state(check_every, bad_at, value, state, step):
    data = batches(bad_at=bad_at, value=value)
    result = fit(state, step, data, num_steps=12, check_every=check_every)
    loss = "nan" if math.isnan(value) else "inf"
    assert result.stopped == "diverged"
    assert result.message == (
        f"The loss was {loss} in step {bad_at}; the state is that after step {bad_at - 1}."
    )
    assert len(result.history) == bad_at - 1
    if bad_at > 1:
        expected = fit(state, step, batches(), num_steps=bad_at - 1)
        assert tree_equal(result.state, expected.state)
        assert result.history == expected.history
    else:
        assert tree_equal(result.state, state)


def test_divergence_names_the_step_of_the_whole_training(state, step):
    state = fit(state, step, batches(), num_steps=10).state
    result = fit(state, step, batches(bad_at=3), num_steps=10)
    assert "in step 13;" in result.message
    assert result.state.step == 12


def test_training_goes_on_after_a_divergence(state, step):
    diverged = fit(state, step, batches(bad_at=3), num_steps=5)
    assert not diverged.state.is_halted
    rest = fit(diverged.state, step, batches(), num_steps=3)
    assert tree_equal(rest.state, fit(state, step, batches(), num_steps=5).state)


def test_parameter_that_is_not_finite_is_a_divergence_at_a_finite_loss(state):
    # At 0 the root is finite and its gradient is not.
    step = make_step(
        lambda model, x, key: jnp.sqrt(jnp.sum((model.weight * x[:1, :1]) ** 2)), OPTIMISER
    )
    result = fit(state, step, batches(bad_at=4, value=0.0), num_steps=8)
    assert result.stopped == "diverged"
    assert result.message == (
        "A parameter, or what the optimiser or the model keeps, became NaN or infinite in step 4, "
        "at a loss of 0; the state is that after step 3."
    )
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(result.state.model))


@pytest.mark.parametrize("bad_at", [4, 8])
def test_step_that_a_loss_scale_skips_is_no_divergence(bad_at, getkey):
    # At 0 the root is finite and its gradient is not.
    step = make_step(
        lambda model, x, key: jnp.sqrt(jnp.sum((model.weight * x[:1, :1]) ** 2)), OPTIMISER
    )
    state = TrainState.create(
        nn.Linear(2, 1, key=getkey()), OPTIMISER, key=getkey(), loss_scale=DynamicLossScale()
    )
    result = fit(state, step, batches(bad_at=bad_at, value=0.0), num_steps=8, check_every=3)
    assert result.stopped == "finished"
    assert result.state.step == len(result.history) == 8
    assert result.history[bad_at - 1] == 0
    zeros = fit(state, step, [0 * GOOD] * 20, num_steps=20, check_every=7)
    assert zeros.stopped == "diverged"
    assert zeros.message == (
        "A gradient at the smallest loss scale, a parameter, or what the optimiser or the model "
        "keeps, became NaN or infinite in step 16, at a loss of 0; the state is that after step 15."
    )
    assert tree_equal(zeros.state.model, state.model)


def test_step_of_ones_own_that_keeps_no_good_state_is_told_so(state, step):
    def own(state, batch):
        new_state, loss = step(state, jnp.where(jnp.isfinite(batch), batch, 0))
        return new_state, jnp.where(jnp.isfinite(batch).all(), loss, jnp.nan)

    result = fit(state, own, batches(bad_at=4), num_steps=8)
    assert result.stopped == "diverged"
    assert "nan in step 4. The step did not keep its last good state" in result.message
    assert len(result.history) == 3


@pytest.mark.parametrize("check_every", [1, 3, 100])
@pytest.mark.parametrize("bad_at", [1, 5, 12])
@pytest.mark.parametrize("is_loss_finite", [False, True])
def test_step_of_ones_own_that_does_not_count_is_named_by_its_calls(
    check_every, bad_at, is_loss_finite, state, step
):
    def own(state, batch):
        new, loss = step(state, batch)
        loss = jnp.where(jnp.isfinite(loss), loss, 0.0) if is_loss_finite else loss
        return tree_at(lambda state: state.step, new, jnp.zeros((), jnp.int32)), loss

    result = fit(state, own, batches(bad_at=bad_at), num_steps=12, check_every=check_every)
    assert result.stopped == "diverged"
    assert f"in step {bad_at}" in result.message
    assert result.message.endswith(f"the state is that after step {bad_at - 1}.")
    expected = fit(state, step, batches(bad_at=bad_at), num_steps=12)
    assert result.history == expected.history
    assert tree_equal(result.state.model, expected.state.model)


def test_state_that_was_donated_is_refused_with_the_paths(state, step):
    newest, _ = step(state, GOOD)
    expected = (
        r"fit expected a state whose arrays are there; .* deleted: state\.model\.weight, "
        r"state\.model\.bias, .* and \d+ more\. A training step donates the state that it gets"
    )
    with pytest.raises(RuntimeError, match=expected):
        fit(state, step, batches(), num_steps=2)
    assert len(fit(newest, step, batches(), num_steps=2).history) == 2


@pytest.mark.parametrize(
    ("given", "name"), [(nn.Identity(), "Identity"), (nn.Linear, "the class Linear")]
)
def test_what_is_no_state_is_refused_with_the_way_to_make_one(given, name, step):
    expected = (
        rf"fit expected a TrainState, and got {name}\. Make one .*TrainState\.create\(model, "
    )
    with pytest.raises(TypeError, match=expected):
        fit(given, step, batches(), num_steps=2)


def test_step_may_return_more(state):
    step = make_step(
        lambda model, x, key: (jnp.mean(model(x[0]) ** 2), "aux"), OPTIMISER, has_aux=True
    )
    assert len(fit(state, step, batches(), num_steps=3).history) == 3


def test_losses_are_read_every_so_many_steps_and_no_sooner(state, step, monkeypatch):
    reads = []
    device_get = jax.device_get
    monkeypatch.setattr(
        jax, "device_get", lambda losses: reads.append(len(losses)) or device_get(losses)
    )
    fit(state, step, batches(), num_steps=11, check_every=4)
    assert reads == [4, 4, 3]


def test_log_gets_the_steps_made_and_the_mean_loss_since(state, step):
    log = []
    result = fit(
        state,
        step,
        batches(),
        num_steps=7,
        log_every=3,
        check_every=2,
        on_log=lambda step, loss: log.append((step, loss)),
    )
    history = result.history
    expected = [(3, np.mean(history[:3])), (6, np.mean(history[3:6])), (7, history[6])]
    np.testing.assert_allclose(log, expected, rtol=1e-6)


def test_batches_that_end_end_the_training(state, step):
    result = fit(state, step, [GOOD] * 3, num_steps=10)
    assert result.stopped == "finished"
    assert result.message == "Made 3 of 10 steps; the batches ended."
    assert len(result.history) == result.state.step == 3


def test_no_batch_is_drawn_that_is_not_used(state, step):
    data = iter([GOOD] * 5)
    fit(state, step, data, num_steps=3)
    assert len(list(data)) == 2


def interrupted_at(number, ctrl_c):
    for count in itertools.count(1):
        if count == number:
            ctrl_c()
        yield GOOD


def test_ctrl_c_at_the_last_step_is_not_lost(state, step, ctrl_c):
    assert fit(state, step, interrupted_at(10, ctrl_c), num_steps=10).stopped == "interrupted"


def test_ctrl_c_ends_after_the_step_under_way(state, step, ctrl_c):
    result = fit(state, step, interrupted_at(4, ctrl_c), num_steps=10)
    assert result.stopped == "interrupted"
    assert result.message == "Interrupted after 4 of 10 steps."
    assert tree_equal(result.state, fit(state, step, batches(), num_steps=4).state)


def test_ctrl_c_inside_a_step_loses_nothing(state, step, ctrl_c):
    def interrupting(state, batch):
        outputs = step(state, batch)
        ctrl_c()
        return outputs

    result = fit(state, interrupting, batches(), num_steps=10)
    assert result.stopped == "interrupted"
    assert len(result.history) == result.state.step == 1


@pytest.mark.parametrize("where", ["batches", "on_log"])
def test_keyboard_interrupt_raised_by_others_ends_cleanly(where, state, step):
    def raising(*_):
        raise KeyboardInterrupt

    data = itertools.chain([GOOD] * 4, map(raising, [0])) if where == "batches" else batches()
    on_log = raising if where == "on_log" else None
    result = fit(state, step, data, num_steps=10, log_every=4, on_log=on_log)
    assert result.stopped == "interrupted"
    assert tree_equal(result.state, fit(state, step, batches(), num_steps=4).state)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(result.state) if is_array(leaf))


def test_keyboard_interrupt_that_takes_the_state_with_it_is_passed_on(state, step):
    def raising(state, batch):
        step(state, batch)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(state, raising, batches(), num_steps=10)
    assert len(fit(state, step, batches(), num_steps=2).history) == 2


def test_bad_step_that_is_interrupted_leaves_the_last_good_state(state, step, monkeypatch):
    def copy(array):
        if array:
            raise KeyboardInterrupt
        return jnp.array(array, copy=True)

    monkeypatch.setattr(jnp, "copy", copy)
    result = fit(state, lambda *arguments: step(*arguments), batches(bad_at=3), num_steps=10)
    assert (result.stopped, len(result.history), result.state.step) == ("interrupted", 2, 2)
    assert not result.state.is_halted


def test_divergence_seen_at_an_interrupt_is_reported(state, step, ctrl_c):
    def data():
        yield GOOD
        yield np.full_like(GOOD, np.nan)
        ctrl_c()
        yield GOOD

    assert fit(state, step, data(), num_steps=10).stopped == "diverged"


def test_somebody_elses_handler_is_left_alone(state, step):
    seen = []
    handler = lambda *_: seen.append(None)
    before = signal.signal(signal.SIGINT, handler)
    try:
        result = fit(
            state,
            step,
            interrupted_at(2, lambda: signal.raise_signal(signal.SIGINT)),
            num_steps=4,
        )
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert result.stopped == "finished"
    assert len(seen) == 1


def test_other_errors_pass(state, step):
    def data():
        yield GOOD
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        fit(state, step, data(), num_steps=4)


@pytest.mark.parametrize("count", [0, 2.5, True])
@pytest.mark.parametrize("name", ["num_steps", "log_every", "check_every"])
def test_count_that_is_no_positive_integer_is_refused_by_name(name, count, state, step):
    with pytest.raises(ValueError, match=f"{name} must be an integer of at least 1, got {count}"):
        fit(state, step, batches(), **{"num_steps": 1, name: count})


@pytest.mark.parametrize("steps_per_call", [1, 2])
@pytest.mark.parametrize("compiled", [filter_jit, lambda step: step])
@pytest.mark.parametrize(
    "wrong",
    [lambda state, batch: state, lambda state, batch: (0.0, state), lambda state, batch: (state,)],
)
def test_a_step_that_returns_something_else_is_refused(state, wrong, compiled, steps_per_call):
    message = r"expected the step to return the next TrainState and the loss, `\(state, loss\)`"
    with pytest.raises(TypeError, match=message):
        fit(state, compiled(wrong), batches(), num_steps=2, steps_per_call=steps_per_call)


@pytest.mark.parametrize("loss", [None, "low", [0.0]])
def test_a_loss_that_is_no_number_is_refused(state, loss):
    with pytest.raises(TypeError, match="expected the step to return a number as loss; got "):
        fit(state, lambda state, batch: (state, loss), batches(), num_steps=2)


class Rewind(Callback):
    """Goes back to the start once."""

    every = 5

    def on_start(self, run):
        self.start = copy_arrays(run.state)

    def on_step(self, run):
        if run.steps == 10:
            run.state = self.start


def test_a_divergence_is_found_where_a_callback_has_put_an_older_state(state, step):
    result = fit(state, step, batches(bad_at=13), num_steps=20, callbacks=[Rewind()])
    assert result.message == "The loss was nan in step 3; the state is that after step 2."
    assert (len(result.history), int(result.state.step)) == (12, 2)


def test_ctrl_c_while_losses_are_waited_for_loses_none(state, step, ctrl_c, monkeypatch):
    get, calls = jax.device_get, []

    def interrupted(arrays):
        calls.append(arrays)
        found = get(arrays)
        if len(calls) == 1:
            ctrl_c()
            ctrl_c()
        return found

    monkeypatch.setattr(jax, "device_get", interrupted)
    result = fit(state, step, batches(), num_steps=20, check_every=4)
    assert (result.stopped, len(result.history)) == ("interrupted", 4)


def test_the_last_step_is_evaluated_and_logged_where_batches_end(state, step):
    logged = []
    result = fit(
        *(state, step, itertools.islice(batches(), 6)),
        num_steps=20,
        log_every=4,
        on_log=lambda number, loss: logged.append(number),
        evaluate=lambda state: {"step": state.step},
        evaluate_every=3,
    )
    assert logged == [4, 6]
    assert result.evaluations == ((3, {"step": 3.0}), (6, {"step": 6.0}))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"step": None}, r"`step` to be a function, `step\(state, batch\)`; got None"),
        ({"batches": batches}, r"batches that one can go through, .* got <function .*>: call it"),
        ({"batches": 3}, r"batches that one can go through, .* got 3\."),
        ({"evaluate": {}}, r"`evaluate` to be a function, `evaluate\(state\)`; got \{\}"),
        ({"on_log": 100}, r"`on_log` to be a function, `on_log\(step, loss\)`; got 100"),
    ],
)
def test_argument_of_another_kind_is_named(arguments, message, state, step):
    given = {"step": step, "batches": [], **arguments}
    with pytest.raises(TypeError, match=f"fit expected {message}"):
        fit(state, **given, num_steps=1)
