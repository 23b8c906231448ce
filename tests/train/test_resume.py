"""A run that was ended goes on as if it had not been."""

import itertools
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import optax
import pytest

import eqxlike as eqx
from eqxlike import nn, train
from tests.train import killed_run

ROOT = pathlib.Path(__file__).parents[2]
KILLS = int(os.environ.get("EQXLIKE_KILLS", "2"))
"""How often the run is killed. More take longer, as more of `EQXLIKE_STEPS` do."""


def start(folder, result, steps_per_call):
    command = [sys.executable, killed_run.__file__, folder, result, str(steps_per_call)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        list(map(str, command)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def end_after(process, number, with_signal, *, seconds=0.0):
    """Sends a signal after so many lines on steps, and a moment; whether it came in time."""
    for said in itertools.count(1):
        if not process.stdout.readline().strip().isdigit():
            return False
        if said == number:
            time.sleep(seconds)
            process.send_signal(with_signal)
            return True


@pytest.mark.parametrize("steps_per_call", [1, 16])
def test_a_run_that_is_killed_and_resumed_ends_with_the_same_bits(tmp_path, steps_per_call):
    random = np.random.default_rng(steps_per_call)
    for _ in range(KILLS):
        process = start(tmp_path / "run", tmp_path / "result.npz", steps_per_call)
        with process:
            said = killed_run.NUM_STEPS // (killed_run.EVERY[16] if steps_per_call > 1 else 1)
            number = random.integers(1, max(2, 2 * said // KILLS))
            # In the middle of a step, or of what is written after it.
            end_after(process, number, signal.SIGKILL, seconds=random.uniform(0, 0.02))
            process.communicate(timeout=120)
    with start(tmp_path / "run", tmp_path / "result.npz", steps_per_call) as process:
        said, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert f"Made {killed_run.NUM_STEPS} of {killed_run.NUM_STEPS} steps" in said
    found = np.load(tmp_path / "result.npz")
    whole = killed_run.main(tmp_path / "other", steps_per_call).state.model
    for name, expected in zip(found, jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(found[name], np.asarray(expected), strict=True)


@pytest.mark.parametrize(("with_signal", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 0)])
def test_a_run_that_is_asked_to_end_saves_itself_and_says_where(tmp_path, with_signal, status):
    with start(tmp_path / "run", tmp_path / "result.npz", 1) as process:
        assert end_after(process, 5, with_signal)
        said, errors = process.communicate(timeout=120)
    assert process.returncode == status, errors
    (newest, *_) = train.CheckpointFolder(tmp_path / "run").paths()
    assert f"The run is saved in {newest}." in (errors if status else said)


# --- in one process ---


@pytest.fixture(scope="module")
def simple():
    optimiser = optax.sgd(0.1)
    model = nn.Linear(3, "scalar", key=jax.random.key(0))
    state = train.TrainState.create(model, optimiser, key=jax.random.key(1))

    def loss(model, batch, key):
        return ((jax.vmap(model)(batch) - 1) ** 2).mean()

    return state, train.make_step(loss, optimiser)


def stream(seed=0):
    x = np.random.default_rng(0).normal(size=(22, 3)).astype(np.float32)
    return train.minibatches(x, 4, seed=seed)


def in_two_parts(simple, folder, make_batches, *, first=7, **options):
    """Seven steps, of which six are saved, and the rest of ten."""
    parts = []
    for num_steps in (first, 10):
        checkpoint = train.Checkpoint(folder, every=3, **options)
        parts.append(
            train.fit(
                *(*simple, make_batches()),
                num_steps=num_steps,
                callbacks=[checkpoint],
                resume_from=folder,
            )
        )
    return parts


@pytest.mark.parametrize(
    "make_batches",
    [
        stream,
        lambda: train.prefetch(stream(), 3),
        lambda: itertools.islice(stream(), 99),
        lambda: train.prefetch(itertools.islice(stream(), 99)),
    ],
)
@pytest.mark.parametrize("background", [True, False])
def test_a_run_in_two_parts_is_one(simple, tmp_path, make_batches, background):
    whole = train.fit(*simple, stream(), num_steps=10)
    first, second = in_two_parts(simple, tmp_path, make_batches, background=background)
    assert eqx.tree_equal(second.state, whole.state)
    assert first.history + second.history == whole.history
    name = tmp_path / "step_0000000"
    assert first.message == f"Made 7 of 7 steps. The run is saved in {name}07."
    assert second.message == (
        f"Made 10 of 10 steps, 7 of them before this call. The run is saved in {name}10."
    )


def test_a_run_that_was_finished_makes_no_step(simple, tmp_path):
    first, second = in_two_parts(simple, tmp_path, stream, first=10)
    assert second.history == ()
    assert second.message == "Made 10 of 10 steps, 10 of them before this call."
    assert eqx.tree_equal(second.state, first.state)


def test_a_stream_without_a_position_goes_on_after_one_that_has_one(simple, tmp_path):
    streams = [stream(), train.prefetch(itertools.islice(stream(), 99))]
    _, second = in_two_parts(simple, tmp_path, lambda: streams.pop(0))
    assert eqx.tree_equal(second.state, train.fit(*simple, stream(), num_steps=10).state)


def test_other_batches_are_refused(simple, tmp_path):
    in_two_parts(simple, tmp_path, stream)
    with pytest.raises(ValueError, match="minibatches with seed 0, and these have 1"):
        train.fit(*simple, stream(seed=1), num_steps=12, resume_from=tmp_path)


def test_a_damaged_checkpoint_is_passed_over_and_does_not_come_back(simple, tmp_path):
    whole = train.fit(*simple, stream(), num_steps=10)
    train.fit(*simple, stream(), num_steps=7, callbacks=[train.Checkpoint(tmp_path, every=3)])
    (tmp_path / "step_000000007" / "manifest.json").write_text("{")
    callback = train.Checkpoint(tmp_path, every=3)
    with pytest.warns(UserWarning, match="Going on from .*step_000000006, which is older"):
        result = train.fit(
            *simple, stream(), num_steps=10, callbacks=[callback], resume_from=tmp_path
        )
    assert len(result.history) == 4
    assert eqx.tree_equal(result.state, whole.state)
    assert callback.folder.newest().name == "step_000000010"


def test_what_fit_did_not_save_is_told(simple, tmp_path):
    with train.CheckpointFolder(tmp_path) as folder:
        folder.save(3, simple[0])
    with pytest.raises(ValueError, match="goes on from checkpoints that `train"):
        train.fit(*simple, stream(), num_steps=10, resume_from=tmp_path)


def test_a_state_that_does_not_fit_is_told_to_be_the_one_that_fit_is_given(simple, tmp_path):
    state, step = simple
    train.fit(state, step, stream(), num_steps=3, callbacks=[train.Checkpoint(tmp_path, every=3)])
    larger = eqx.tree_at(lambda state: state.step, state, np.zeros(2, np.int32))
    with pytest.raises(ValueError, match="does not fit `like`") as caught:
        train.fit(larger, step, stream(), num_steps=6, resume_from=tmp_path)
    assert caught.value.__notes__ == ["Here `like` is the state that `fit` is given."]


# --- what is saved ---


class Told(train.Callback):
    def __init__(self):
        self.folders = []

    def on_checkpoint(self, run):
        self.folders.append(run.checkpoint.name)


@pytest.mark.parametrize("background", [True, False])
def test_callbacks_are_told_of_each(simple, tmp_path, background):
    told = Told()
    checkpoint = train.Checkpoint(tmp_path, every=3, background=background)
    train.fit(*simple, stream(), num_steps=7, callbacks=[told, checkpoint])
    assert told.folders == ["step_000000003", "step_000000006", "step_000000007"]


def test_the_best_stay_beside_the_newest(simple, tmp_path):
    scores = iter([3.0, 1.0, 2.0, 4.0])
    train.fit(
        *(*simple, stream()),
        num_steps=8,
        evaluate=lambda state: {"score": next(scores)},
        evaluate_every=2,
        callbacks=[train.Checkpoint(tmp_path, every=2, keep_last=1, keep_best=1, metric="score")],
    )
    names = [path.name for path in train.CheckpointFolder(tmp_path).paths()]
    assert names == ["step_000000008", "step_000000004"]


def test_a_score_is_that_of_an_evaluation_after_the_same_step(simple, tmp_path):
    scores = iter([1.0, 2.0, 3.0])
    train.fit(
        *(*simple, stream()),
        num_steps=12,
        evaluate=lambda state: {"score": next(scores)},
        evaluate_every=4,
        # After 6 steps the newest score is that of step 4.
        callbacks=[train.Checkpoint(tmp_path, every=3, keep_last=1, keep_best=2, metric="score")],
    )
    names = [path.name for path in train.CheckpointFolder(tmp_path).paths()]
    assert names == ["step_000000012"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "call fit with `evaluate` and `evaluate_every`"),
        (
            {"evaluate": lambda state: {"score": 1.0}, "evaluate_every": 5},
            "got checkpoints every 3 steps and evaluations every 5",
        ),
    ],
)
def test_keep_best_without_evaluations_is_refused(simple, tmp_path, options, message):
    best = train.Checkpoint(tmp_path, every=3, keep_best=1, metric="score")
    with pytest.raises(ValueError, match=message):
        train.fit(*simple, stream(), num_steps=9, callbacks=[best], **options)


def test_a_divergence_is_not_saved(simple, tmp_path):
    batches = [np.ones((4, 3), np.float32)] * 4 + [np.full((4, 3), np.nan, np.float32)]
    checkpoint = train.Checkpoint(tmp_path, every=3)
    result = train.fit(*simple, batches, num_steps=9, callbacks=[checkpoint])
    assert result.stopped == "diverged"
    assert [path.name for path in checkpoint.folder.paths()] == ["step_000000003"]


def full_disk(*_, **__):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("background", [True, False])
def test_a_disk_that_is_full_ends_the_run_or_does_not(simple, tmp_path, monkeypatch, background):
    def run(**options):
        callback = train.Checkpoint(tmp_path, every=3, background=background, **options)
        return train.fit(*simple, stream(), num_steps=7, callbacks=[callback])

    run()
    shutil.rmtree(tmp_path / "step_000000007")
    shutil.rmtree(tmp_path / "step_000000006")
    monkeypatch.setattr("eqxlike.train._checkpoints._save.write_arrays", full_disk)
    with pytest.raises(OSError, match="No space left"):
        train.fit(
            *(*simple, stream()),
            num_steps=7,
            callbacks=[train.Checkpoint(tmp_path, every=3, background=background)],
            resume_from=tmp_path,
        )
    callback = train.Checkpoint(tmp_path, every=3, background=background, on_error="warn")
    with pytest.warns(UserWarning, match="was not written, and training goes on: .* No space"):
        result = train.fit(
            *simple, stream(), num_steps=7, callbacks=[callback], resume_from=tmp_path
        )
    assert result.message == "Made 7 of 7 steps, 3 of them before this call."
    assert [path.name for path in callback.folder.paths()] == ["step_000000003"]


def test_a_folder_with_later_steps_is_refused_before_the_first(simple, tmp_path):
    in_two_parts(simple, tmp_path, stream)
    with pytest.raises(ValueError, match="has a checkpoint of step 10, and one of step 0 is to be"):
        train.fit(*simple, stream(), num_steps=3, callbacks=[train.Checkpoint(tmp_path, every=3)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every must be an integer of at least 1"),
        ({"every": 3, "on_error": "ignore"}, 'on_error must be "raise" or "warn", got \'ignore\''),
        ({"every": 3, "keep_best": 1}, "keep_best needs the name of a metric"),
        ({"every": 3, "keep_last": 0}, "keep_last must be an integer of at least 1"),
        ({"every": 3, "mode": "least"}, 'mode "min" or "max"'),
    ],
)
def test_settings_that_are_none_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        train.Checkpoint(tmp_path, **options)


def test_a_metric_that_is_not_there_is_named(simple, tmp_path):
    with pytest.raises(KeyError, match="looks for the metric 'loss', and `evaluate` gives 'score'"):
        train.fit(
            *(*simple, stream()),
            num_steps=2,
            evaluate=lambda state: {"score": 1.0},
            evaluate_every=1,
            callbacks=[train.Checkpoint(tmp_path, every=2, keep_best=1, metric="loss")],
        )
