"""Callbacks: the order of calls, their effects on a run, and the logs that they write."""

import io
import itertools
import json
import math
import re
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqxlike as eqx
from eqxlike import train
from eqxlike.train._logging import _peak_of
from tests.train import event_files
from tests.train.linear import BATCH, make_state, make_step

OPTIMISER = optax.inject_hyperparams(optax.sgd)(learning_rate=optax.linear_schedule(0.1, 0.0, 10))


@pytest.fixture(scope="module")
def step():
    return make_step(OPTIMISER)


@pytest.fixture(scope="module")
def state():
    return make_state(OPTIMISER)


@pytest.fixture(scope="module")
def run(state, step):
    """A function that calls `fit` with the same batch for each step."""

    def run(num_steps, batches=None, **options):
        batches = itertools.repeat(BATCH) if batches is None else batches
        return train.fit(state, step, batches, num_steps=num_steps, **options)

    return run


def gone_after(number):
    yield from itertools.repeat(BATCH, number)
    raise OSError("gone")


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


def test_callbacks_are_called_in_order(run):
    recorder = Recorder()
    evaluate = {"evaluate": lambda state: {}, "evaluate_every": 4}
    run(5, log_every=4, **evaluate, callbacks=[recorder])
    assert recorder.moments == [
        *[("on_start", 0), ("on_step", 2), ("on_evaluate", 4), ("on_log", 4), ("on_step", 4)],
        *[("on_evaluate", 5), ("on_log", 5), ("on_end", 5), ("close", None)],
    ]


def test_callbacks_are_closed_after_an_exception_without_on_end(run):
    recorder = Recorder()
    with pytest.raises(OSError, match="gone"):
        run(5, gone_after(1), callbacks=[recorder])
    assert recorder.moments == [("on_start", 0), ("close", None)]


def test_sigterm_ends_the_run_cleanly_and_then_the_process(run, tmp_path, capsys):
    recorder, saved = Recorder(), tmp_path / "step_000000002"

    def batches():
        yield BATCH
        signal.raise_signal(signal.SIGTERM)
        yield BATCH

    with pytest.raises(SystemExit) as ended:
        run(5, batches(), callbacks=[train.Checkpoint(tmp_path, every=9), recorder])
    assert ended.value.code == 143
    assert recorder.moments[-2:] == [("on_end", 2), ("close", None)]
    told = f"fit: Interrupted after 2 of 5 steps. The run is saved in {saved}.\n"
    assert capsys.readouterr().err == told
    assert saved.is_dir()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_callback_may_end_the_run(run):
    class Stop(train.Callback):
        def on_step(self, run):
            run.stop("Enough.")
            run.stop("Too late.")

    stop = Stop()
    with pytest.warns(UserWarning, match=r"callbacks\[0\] has an `on_step` that is never called"):
        assert len(run(3, callbacks=[stop]).history) == 3
    stop.every = 3
    result = run(9, callbacks=[stop])
    assert (result.stopped, result.message, len(result.history)) == ("stopped", "Enough.", 3)
    assert result.exit_status == 0


def test_bad_callbacks_and_evaluations_are_refused(run):
    no_period, stopping = Recorder(), train.EarlyStopping("loss")
    no_period.every = 0
    scores = {"evaluate": lambda state: {"score": 1.0}, "evaluate_every": 1}
    for error, message, options in [
        (TypeError, r"a train.Callback at callbacks\[0\], got <built-in", {"callbacks": [print]}),
        (TypeError, r"got <class .*Progress'>: call it", {"callbacks": [train.Progress]}),
        (TypeError, r"a list of callbacks, got <.*>: put it in", {"callbacks": train.Progress()}),
        (ValueError, r"callbacks\[0\].every must be an integer", {"callbacks": [no_period]}),
        (ValueError, "evaluate_every=2 but no `evaluate`: pass `evaluate`", {"evaluate_every": 2}),
        (TypeError, r"a number for 'x', got f32\[2\]", {"evaluate": lambda _: {"x": jnp.ones(2)}}),
        (TypeError, r"a mapping from names to numbers, got 3\.0", {"evaluate": lambda _: 3.0}),
        (ValueError, "pass `evaluate` and `evaluate_every` to fit", {"callbacks": [stopping]}),
        (
            KeyError,
            "metric 'loss', but `evaluate` returned 'score'",
            {"callbacks": [stopping]} | scores,
        ),
    ]:
        with pytest.raises(error, match=message):
            run(1, [BATCH], **options)


# --- early stopping ---


def stopped_early(run, scores, callback):
    values = iter(scores)
    evaluate = lambda state: {"score": next(values)}
    return run(len(scores), evaluate=evaluate, evaluate_every=1, callbacks=[callback])


def test_early_stopping_returns_the_best_state_when_patience_ends(run):
    for scores, options, made, best in [
        ([3, 2, 2.5, 2.1, 1], {"patience": 2}, 4, 2),
        ([3, 2, 2.5, 1, 0.5], {"patience": 2}, 5, 5),
        ([1, 2, 1.5, 1.9, 3], {"patience": 2, "mode": "max"}, 4, 2),
        ([3, 2.9, 2.8, 1], {"patience": 2, "min_delta": 0.5}, 3, 1),
        ([4, 3, math.nan, math.nan, 1], {"patience": 2}, 4, 2),
        ([1, 2, 3], {"patience": 2, "restore_best": False}, 3, 3),
        ([1, 1, 1, 1, 1, 1, 0], {}, 6, 1),
    ]:
        callback = train.EarlyStopping("score", **({"mode": "min"} | options))
        # The callback may be used for another run.
        for _ in range(2):
            result = stopped_early(run, scores, callback)
            assert len(result.history) == made
        assert eqx.tree_equal(result.state, run(best).state)


def test_message_of_early_stopping_has_step_and_reason(run):
    result = stopped_early(
        run, [3, 2, 2.5, 2.1, 1], train.EarlyStopping("score", patience=2, mode="min")
    )
    assert result.stopped == "stopped"
    assert result.message == (
        "Stopped after step 4: score did not improve on 2, at step 2, in 2 evaluations. The state "
        "is the best one, after step 2."
    )
    # The warning is given at the first evaluation and not when patience ends.
    with pytest.warns(UserWarning, match="score is NaN after step 1, which counts as no improv"):
        result = stopped_early(
            run, [math.nan] * 3, train.EarlyStopping("score", patience=2, mode="min")
        )
    assert result.message == "Stopped after step 2: score was NaN in 2 evaluations."
    for options, message in [
        ({"mode": "least"}, 'pass mode="max" if a larger \'score\' is better, or mode="min" if'),
        ({"mode": None}, "a smaller one is; got mode=None"),
        ({"patience": 0}, "patience must be an integer of at least 1"),
        ({"min_delta": -1.0}, "min_delta must be at least 0"),
        ({"min_delta": math.nan}, "min_delta must be at least 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            train.EarlyStopping("score", **({"mode": "min"} | options))
    assert train.EarlyStopping("validation_loss").mode == "min"


# --- logs ---


def test_json_lines_and_tensorboard_have_losses_rates_and_metrics_at_their_steps(run, tmp_path):
    path, folder = tmp_path / "runs/one/log.jsonl", tmp_path / "made/run"
    metrics = {"nan": math.nan, "least": -math.inf, "most": math.inf, "wide": 1e300}
    evaluate = lambda state: {"score": 2 * state.step, **metrics}
    often = {"log_every": 2, "evaluate_every": 3, "evaluate": evaluate}
    for writer in (train.JsonLines(path), train.JsonLines(path), train.TensorBoard(folder)):
        result = run(4, **often, callbacks=[writer])
    means = [np.mean(result.history[:2]), np.mean(result.history[2:])]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    moments = [("start", 0), ("log", 2), ("evaluate", 3), ("evaluate", 4), ("log", 4), ("end", 4)]
    assert [(line["event"], line["step"]) for line in lines] == 2 * moments
    assert lines[0]["num_steps"] == 4
    np.testing.assert_allclose(lines[1]["loss"], means[0])
    # Optax stores the learning rate of the last update.
    np.testing.assert_allclose(lines[1]["learning_rate"], 0.09, rtol=1e-5)
    words = {"nan": "nan", "least": "-inf", "most": "inf"}
    assert lines[2]["metrics"] == {"score": 6.0, "wide": 1e300, **words}
    assert all(0 <= line["seconds"] < 600 for line in lines)
    found = event_files.scalars(folder)
    speeds = found.pop("train/steps_per_second")
    np.testing.assert_allclose(found.pop("train/loss"), [(2, means[0]), (4, means[1])], rtol=1e-6)
    np.testing.assert_allclose(found.pop("train/learning_rate"), [(2, 0.09), (4, 0.07)], rtol=1e-5)
    assert found.pop("evaluate/score") == [(3, 6.0), (4, 8.0)]
    assert [at for at, _ in speeds] == [2, 4]
    assert all(math.isfinite(speed) and speed > 0 for _, speed in speeds)
    # Numbers that are not finite are written unchanged.
    assert math.isnan(found.pop("evaluate/nan")[0][1])
    extremes = {"least": -math.inf, "most": math.inf, "wide": math.inf}
    assert found == {f"evaluate/{name}": [(3, each), (4, each)] for name, each in extremes.items()}


def test_curve_of_a_resumed_run_has_each_step_once_and_a_new_run_replaces_the_curve(run, tmp_path):
    def write(num_steps, batches=None, callbacks=(), **options):
        callbacks = [*callbacks, train.TensorBoard(tmp_path / "curves")]
        run(num_steps, batches, log_every=2, callbacks=callbacks, **options)

    def losses():
        return event_files.scalars(tmp_path / "curves")["train/loss"]

    saved = tmp_path / "saved"
    with pytest.raises(OSError, match="gone"):
        write(9, gone_after(8), [train.Checkpoint(saved, every=3)], resume_from=saved)
    # The checkpoint is after six steps, so the seventh and eighth step are repeated.
    first = losses()
    assert [at for at, _ in first] == [2, 4, 6, 8]
    write(9, resume_from=saved)
    assert [at for at, _ in losses()] == [2, 4, 6, 8, 9]
    assert losses()[:3] == first[:3]
    write(4)
    assert [at for at, _ in losses()] == [2, 4]
    # Each run has its own file, although two runs may start in the same second.
    assert len(list((tmp_path / "curves").iterdir())) == 3


def test_only_the_first_of_several_processes_writes(run, tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    writers = [train.TensorBoard(tmp_path), train.JsonLines(tmp_path / "run.jsonl")]
    run(2, log_every=1, callbacks=writers, evaluate=lambda state: {"score": 1.0})
    assert list(tmp_path.iterdir()) == []


def test_no_learning_rate_is_written_if_the_optimiser_does_not_store_one(tmp_path):
    optimiser, stream = optax.sgd(0.1), io.StringIO()
    state, curves, lines = make_state(optimiser), tmp_path / "curves", tmp_path / "lines"
    assert train.Run(state, 3).learning_rate is None
    writers = [train.TensorBoard(curves), train.JsonLines(lines), train.Progress(stream=stream)]
    train.fit(state, make_step(optimiser), [BATCH], num_steps=1, callbacks=writers)
    assert "train/learning_rate" not in event_files.scalars(curves)
    assert "learning_rate" not in lines.read_text()
    assert stream.getvalue().startswith("training: step 1/1, loss ")
    assert "rate" not in stream.getvalue()


def test_error_without_tensorboardx_names_the_package_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ImportError, match=r"pip install 'eqxlike\[tensorboard\]'"):
        train.TensorBoard(tmp_path)


# --- progress ---


def test_progress_shows_metrics_and_the_speed_since_the_last_log(run, state, monkeypatch):
    stream = io.StringIO()
    evaluate = {"evaluate": lambda state: {"accuracy": 0.5}, "evaluate_every": 1}
    run(4, log_every=2, **evaluate, callbacks=[train.Progress("toy", stream=stream)])
    first, last = stream.getvalue().splitlines()
    assert first.startswith("toy: step 2/4, loss ")
    assert ", rate 0.09, accuracy 0.5, " in first
    assert last.startswith("toy: step 4/4, loss ")
    stream, now = io.StringIO(), itertools.accumulate([100.0, 2.0], initial=5.0)
    monkeypatch.setattr("time.perf_counter", now.__next__)
    progress, fresh = train.Progress(stream=stream), train.Run(state, num_steps=20)
    progress.on_start(fresh)
    for fresh.steps in (10, 20):
        progress.on_log(fresh)
    progress.close()
    speeds = [line.rsplit(", ", 1)[1] for line in stream.getvalue().splitlines()]
    assert speeds == ["0.1 steps/s", "5 steps/s"]


def test_amounts_per_second_and_their_share_of_the_peak_are_shown(state, tmp_path, monkeypatch):
    now = [5.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    path, stream, per_step = tmp_path / "log", io.StringIO(), {"tokens": 400, "flops": 6e9}
    known = {"per_step": per_step, "peak_flops": 1e11}
    callbacks = [train.JsonLines(path, **known), train.Progress(stream=stream, **known)]
    callbacks += [train.Progress(stream=stream, per_step=per_step)]  # the peak of a CPU is unknown
    fresh = train.Run(state, num_steps=20)
    for callback in callbacks:
        callback.on_start(fresh)
    fresh.steps, now[0] = 12, 11.0
    for callback in callbacks:
        callback.on_log(fresh)
        callback.close()
    first, second = stream.getvalue().splitlines()
    assert first.endswith(", 2 steps/s, 800 tokens/s, 1.2e+10 flops/s, 12.0% of peak")
    assert second.endswith(", 2 steps/s, 800 tokens/s, 1.2e+10 flops/s")
    log = json.loads(path.read_text().splitlines()[1])
    speeds = {f"{name}_per_second": log[f"{name}_per_second"] for name in ("steps", *per_step)}
    assert ([*speeds.values()], log["mfu"]) == ([2, 800, 1.2e10], 0.12)
    with pytest.raises(ValueError, match=r"per_step\['tokens'\] must be positive"):
        train.Progress(per_step={"tokens": 0})


def test_longest_matching_device_name_decides_the_peak():
    nvidia = {"L4": 121, "L40S": 362, "H100 80GB HBM3": 989, "H100 PCIe": 756, "GB200": 2500}
    nvidia["A100-SXM4-40GB"] = 312
    peaks = {f"NVIDIA {name}": peak for name, peak in nvidia.items()}
    peaks |= {"Tesla V100-SXM2-16GB": 125, "TPU v5 lite": 197, "TPU v5": 459, "TPU v6 lite": 918}
    assert {kind: _peak_of(kind) for kind in peaks} == {k: peak * 1e12 for k, peak in peaks.items()}
    assert _peak_of("cpu") is None


def test_progress_shows_the_metrics_of_each_step_including_the_last(run):
    for num_batches, every, shown in [
        (40, {"log_every": 10, "evaluate_every": 10}, {10: 10, 20: 20, 30: 30, 40: 40}),
        (40, {"log_every": 10, "evaluate_every": 20}, {10: None, 20: 20, 30: 20, 40: 40}),
        (40, {}, {40: 40}),
        # The batches end after a step with a log, and after a step without a log.
        (20, {"log_every": 20}, {20: 20}),
        (19, {"log_every": 5, "evaluate_every": 10}, {5: None, 10: 10, 15: 10, 19: 19}),
    ]:
        stream = io.StringIO()
        evaluate = {"evaluate": lambda state: {"at": state.step}, **every}
        run(40, [BATCH] * num_batches, **evaluate, callbacks=[train.Progress(stream=stream)])
        line = r"step (\d+)/40, loss [^,]*, rate [^,]*(?:, at (\d+))?"
        found = re.findall(line, stream.getvalue())
        assert {int(step): int(at) if at else None for step, at in found} == shown


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(stream, **options):
    with train.progress(100, label="net", stream=stream, **options) as on_log:
        for step in range(1, 101):
            on_log(step, 1 / step)
    return stream.getvalue()


def test_progress_prints_few_lines_and_the_last_step(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    losses = {25: 0.04, 50: 0.02, 75: 0.01333, 100: 0.01}
    expected = [f"net: step {step}/100, loss {loss}" for step, loss in losses.items()]
    assert shown(io.StringIO(), num_lines=4).splitlines() == expected
    assert "rich" not in sys.modules
    # If there are fewer calls than lines, each call prints a line.
    with train.progress(100, stream=(stream := io.StringIO())) as on_log:
        on_log(33, 1.0)
        on_log(66, 1.0)
    assert stream.getvalue() == "training: step 33/100, loss 1\ntraining: step 66/100, loss 1\n"


def test_terminal_shows_a_bar_if_rich_is_installed(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    text = shown(Terminal())
    assert "100/100" in text
    assert "loss 0.01" in text
    assert "step" not in text
    with pytest.raises(OSError, match="disk"), train.progress(10, stream=Terminal()):
        raise OSError("disk")
    monkeypatch.setitem(sys.modules, "rich", None)
    assert "net: step 100/100, loss 0.01" in shown(Terminal())
