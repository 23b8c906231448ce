"""What callbacks see of a training, when, and what they may do."""

import io
import itertools
import json
import math
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqxlike as eqx
from eqxlike import nn, train
from tests.train.linear import BATCH, make_state, make_step

OPTIMISER = optax.inject_hyperparams(optax.sgd)(learning_rate=optax.linear_schedule(0.1, 0.0, 10))


@pytest.fixture(scope="module")
def step():
    return make_step(OPTIMISER)


@pytest.fixture(scope="module")
def state():
    return make_state(OPTIMISER)


def metrics_in_turn(values):
    values = iter(values)
    return lambda state: {"score": next(values)}


class Recorder(train.Callback):
    every = 2

    def __init__(self):
        self.moments = []

    def __getattribute__(self, name):
        if name.startswith("on_"):
            return lambda run: self.moments.append((name, run.steps))
        return super().__getattribute__(name)

    def close(self):
        self.moments.append(("close", None))


def test_moments_come_in_their_order(state, step):
    recorder = Recorder()
    train.fit(
        *(state, step, itertools.repeat(BATCH)),
        num_steps=5,
        log_every=4,
        evaluate=lambda state: {},
        evaluate_every=4,
        callbacks=[recorder],
    )
    assert recorder.moments == [
        ("on_start", 0),
        ("on_step", 2),
        *[("on_log", 4), ("on_evaluate", 4), ("on_step", 4)],
        *[("on_log", 5), ("on_evaluate", 5)],
        ("on_end", 5),
        ("close", None),
    ]


def test_they_let_go_after_an_exception_and_end_is_no_moment_of_it(state, step):
    recorder = Recorder()

    def batches():
        yield BATCH
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        train.fit(state, step, batches(), num_steps=5, callbacks=[recorder])
    assert recorder.moments == [("on_start", 0), ("close", None)]


def test_a_callback_may_end_the_run(state, step):
    class Stop(train.Callback):
        every = 3

        def on_step(self, run):
            run.stop("Enough.")

    result = train.fit(state, step, itertools.repeat(BATCH), num_steps=9, callbacks=[Stop()])
    assert (result.stopped, result.message, len(result.history)) == ("stopped", "Enough.", 3)
    assert result.exit_status == 0


def test_the_rate_is_that_of_the_schedule(state, step):
    rates = []

    class Look(train.Callback):
        def on_log(self, run):
            rates.append(run.learning_rate)

    batches = itertools.repeat(BATCH)
    train.fit(state, step, batches, num_steps=3, log_every=1, callbacks=[Look()])
    # What Optax keeps is the rate that the last update had.
    np.testing.assert_allclose(rates, [0.1, 0.09, 0.08], rtol=1e-5)


def test_an_optimiser_that_keeps_no_rate_has_none():
    optimiser = optax.adam(0.1)
    model = nn.Linear(2, 1, key=jax.random.key(0))
    state = train.TrainState.create(model, optimiser, key=jax.random.key(1))
    assert train.Run(state, 3).learning_rate is None


@pytest.mark.parametrize(
    ("callbacks", "error", "message"),
    [
        ([print], TypeError, r"expected a train.Callback at callbacks\[0\], got <built-in"),
        ([train.Progress], TypeError, r"got <class .*Progress'>: call the class"),
        (train.Progress(), TypeError, r"expected a list of callbacks; got <.*>: put it in a list"),
    ],
)
def test_what_is_no_callback_is_refused(state, step, callbacks, error, message):
    with pytest.raises(error, match=message):
        train.fit(state, step, [], num_steps=1, callbacks=callbacks)


def test_a_period_that_is_none_is_refused(state, step):
    callback = Recorder()
    callback.every = 0
    with pytest.raises(ValueError, match=r"callbacks\[0\].every must be an integer of at least 1"):
        train.fit(state, step, [], num_steps=1, callbacks=[callback])


# --- evaluation ---


def test_evaluations_are_in_the_result(state, step):
    result = train.fit(
        *(state, step, itertools.repeat(BATCH)),
        num_steps=5,
        evaluate=lambda state: {"steps": state.step},
        evaluate_every=2,
    )
    assert result.evaluations == ((2, {"steps": 2.0}), (4, {"steps": 4.0}), (5, {"steps": 5.0}))


def test_period_with_nothing_to_evaluate_is_refused(state, step):
    with pytest.raises(ValueError, match="evaluate_every=2 and nothing to evaluate: give it"):
        train.fit(*(state, step, [BATCH]), num_steps=1, evaluate_every=2)


def test_without_a_period_the_end_is_evaluated(state, step):
    batches = itertools.repeat(BATCH)
    result = train.fit(state, step, batches, num_steps=5, evaluate=metrics_in_turn([1.0]))
    assert result.evaluations == ((5, {"score": 1.0}),)


def test_a_metric_that_is_no_number_is_named(state, step):
    with pytest.raises(TypeError, match=r"a number for 'each', got f32\[2\]"):
        train.fit(
            *(state, step, [BATCH]), num_steps=1, evaluate=lambda state: {"each": jnp.ones(2)}
        )


def test_an_evaluation_that_is_no_mapping_is_refused(state, step):
    with pytest.raises(TypeError, match=r"a mapping from names to numbers, got 3\.0"):
        train.fit(state, step, [BATCH], num_steps=1, evaluate=lambda state: 3.0)


# --- early stopping ---


def stopped_early(state, step, scores, **options):
    return train.fit(
        *(state, step, itertools.repeat(BATCH)),
        num_steps=len(scores),
        evaluate=metrics_in_turn(scores),
        evaluate_every=1,
        callbacks=[train.EarlyStopping("score", **options)],
    )


def state_after(state, step, number):
    return train.fit(state, step, itertools.repeat(BATCH), num_steps=number).state


@pytest.mark.parametrize(
    ("scores", "options", "made", "best"),
    [
        ([3, 2, 2.5, 2.1, 1], {"patience": 2}, 4, 2),
        ([3, 2, 2.5, 1, 0.5], {"patience": 2}, 5, 5),
        ([1, 2, 1.5, 1.9, 3], {"patience": 2, "mode": "max"}, 4, 2),
        ([3, 2.9, 2.8, 1], {"patience": 2, "min_delta": 0.5}, 3, 1),
        ([math.nan, 3, math.nan, math.nan, 1], {"patience": 2}, 4, 2),
    ],
)
def test_it_stops_where_there_is_no_progress_with_the_best_state(
    state, step, scores, options, made, best
):
    result = stopped_early(state, step, scores, **options)
    assert len(result.history) == made
    assert eqx.tree_equal(result.state, state_after(state, step, best))


def test_it_says_when_and_why(state, step):
    result = stopped_early(state, step, [3, 2, 2.5, 2.1, 1], patience=2)
    assert result.stopped == "stopped"
    assert result.message == (
        "Stopped after step 4: score was not better than 2, of step 2, in 2 evaluations. The state "
        "is that after step 2, the best."
    )


def test_the_last_state_on_demand(state, step):
    result = stopped_early(state, step, [1, 2, 3], patience=2, restore_best=False)
    assert eqx.tree_equal(result.state, state_after(state, step, 3))


def test_a_callback_serves_for_another_run(state, step):
    callback = train.EarlyStopping("score", patience=1)
    for _ in range(2):
        result = train.fit(
            *(state, step, itertools.repeat(BATCH)),
            num_steps=3,
            evaluate=metrics_in_turn([2, 1, 3]),
            evaluate_every=1,
            callbacks=[callback],
        )
        assert len(result.history) == 3


def test_a_metric_that_is_not_there_is_named(state, step):
    with pytest.raises(KeyError, match="looks for the metric 'loss', and `evaluate` gives 'score'"):
        train.fit(
            *(state, step, [BATCH]),
            num_steps=1,
            evaluate=metrics_in_turn([1]),
            evaluate_every=1,
            callbacks=[train.EarlyStopping("loss")],
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "least"}, 'mode must be "min" or "max", got \'least\''),
        ({"patience": 0}, "patience must be an integer of at least 1"),
        ({"min_delta": -1.0}, "min_delta must be at least 0"),
        ({"min_delta": math.nan}, "min_delta must be at least 0"),
    ],
)
def test_settings_that_are_none_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        train.EarlyStopping("score", **options)


def test_early_stopping_without_evaluations_is_refused(state, step):
    with pytest.raises(ValueError, match="call fit with `evaluate` and `evaluate_every`"):
        train.fit(state, step, [BATCH], num_steps=1, callbacks=[train.EarlyStopping("score")])


# --- what is written ---


def test_lines_of_json(state, step, tmp_path):
    path = tmp_path / "run.jsonl"
    for _ in range(2):
        result = train.fit(
            *(state, step, itertools.repeat(BATCH)),
            num_steps=3,
            log_every=2,
            evaluate=lambda state: {"score": math.inf},
            callbacks=[train.JsonLines(path)],
        )
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["event"], line["step"]) for line in lines] == [
        *[("start", 0), ("log", 2), ("log", 3), ("evaluate", 3), ("end", 3)] * 2
    ]
    np.testing.assert_allclose(lines[1]["loss"], np.mean(result.history[:2]))
    np.testing.assert_allclose(lines[1]["learning_rate"], 0.09, rtol=1e-5)
    assert lines[3]["metrics"] == {"score": "inf"}


def test_lines_of_json_make_the_folders_above(state, step, tmp_path):
    path = tmp_path / "runs/one/log.jsonl"
    train.fit(*(state, step, [BATCH]), num_steps=1, callbacks=[train.JsonLines(path)])
    assert path.is_file()


def test_speed_that_progress_shows_is_that_since_the_last_log(state, step, monkeypatch):
    stream, now = io.StringIO(), itertools.accumulate([100.0, 2.0], initial=5.0)
    monkeypatch.setattr("time.perf_counter", now.__next__)
    progress = train.Progress(stream=stream)
    run = train.Run(state, num_steps=20)
    progress.on_start(run)
    for run.steps in (10, 20):
        progress.on_log(run)
    progress.close()
    speeds = [line.rsplit(", ", 1)[1] for line in stream.getvalue().splitlines()]
    assert speeds == ["0.1 steps/s", "5 steps/s"]


def test_progress_shows_what_is_known(state, step):
    stream = io.StringIO()
    train.fit(
        *(state, step, itertools.repeat(BATCH)),
        num_steps=4,
        log_every=2,
        evaluate=lambda state: {"accuracy": 0.5},
        evaluate_every=1,
        callbacks=[train.Progress("toy", stream=stream)],
    )
    first, last = stream.getvalue().splitlines()
    assert first.startswith("toy: step 2/4, loss ")
    assert ", rate 0.09, accuracy 0.5, " in first
    assert last.startswith("toy: step 4/4, loss ")
    assert last.endswith(" steps/s")


# --- asked to end ---


def test_sigterm_ends_the_run_in_order_and_then_the_process(state, step, capsys):
    recorder = Recorder()

    def batches():
        yield BATCH
        signal.raise_signal(signal.SIGTERM)
        yield BATCH

    with pytest.raises(SystemExit) as ended:
        train.fit(state, step, batches(), num_steps=5, callbacks=[recorder])
    assert ended.value.code == 143
    assert recorder.moments[-2:] == [("on_end", 2), ("close", None)]
    assert capsys.readouterr().err == "fit: Interrupted after 2 of 5 steps.\n"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
