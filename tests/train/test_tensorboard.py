"""Curves for TensorBoard, read by the format of their files."""

import builtins
import itertools
import math

import jax
import numpy as np
import optax
import pytest

from eqxlike import train
from tests.train import event_files
from tests.train.linear import BATCH, make_state, make_step

OPTIMISER = optax.inject_hyperparams(optax.sgd)(learning_rate=optax.linear_schedule(0.1, 0.0, 10))


@pytest.fixture(scope="module")
def step():
    return make_step(OPTIMISER)


@pytest.fixture(scope="module")
def state():
    return make_state(OPTIMISER)


def run(state, step, folder, num_steps=4, batches=None, **options):
    return train.fit(
        *(state, step, itertools.repeat(BATCH) if batches is None else batches),
        num_steps=num_steps,
        log_every=2,
        callbacks=[*options.pop("callbacks", []), train.TensorBoard(folder)],
        **options,
    )


def test_loss_rate_and_metrics_are_at_their_steps(state, step, tmp_path):
    result = run(
        *(state, step, tmp_path / "made" / "run"),
        evaluate=lambda state: {"score": 2 * state.step},
        evaluate_every=3,
    )
    found = event_files.scalars(tmp_path / "made" / "run")
    speeds = found.pop("train/steps_per_second")
    assert found.keys() == {"train/loss", "train/learning_rate", "evaluate/score"}
    means = [np.mean(result.history[:2]), np.mean(result.history[2:])]
    np.testing.assert_allclose(found["train/loss"], [(2, means[0]), (4, means[1])], rtol=1e-6)
    np.testing.assert_allclose(found["train/learning_rate"], [(2, 0.09), (4, 0.07)], rtol=1e-5)
    assert found["evaluate/score"] == [(3, 6.0), (4, 8.0)]
    assert [at for at, _ in speeds] == [2, 4]
    assert all(math.isfinite(speed) and speed > 0 for _, speed in speeds)


def test_numbers_that_are_none_are_written_as_they_are(state, step, tmp_path):
    metrics = {"nan": math.nan, "least": -math.inf, "wide": 1e300}
    run(state, step, tmp_path, evaluate=lambda state: metrics)
    found = event_files.scalars(tmp_path)
    assert math.isnan(found["evaluate/nan"][0][1])
    assert found["evaluate/least"] == [(4, -math.inf)]
    assert found["evaluate/wide"] == [(4, math.inf)]


def test_a_resumed_run_has_no_step_twice(state, step, tmp_path):
    def batches():
        yield from itertools.repeat(BATCH, 8)
        raise OSError("gone")

    options = {
        "callbacks": [train.Checkpoint(tmp_path / "saved", every=3)],
        "resume_from": tmp_path / "saved",
    }
    with pytest.raises(OSError, match="gone"):
        run(state, step, tmp_path / "curves", 9, batches(), **options)
    # The checkpoint is that after six steps: the eighth is made again.
    first = event_files.scalars(tmp_path / "curves")["train/loss"]
    assert [at for at, _ in first] == [2, 4, 6, 8]
    run(state, step, tmp_path / "curves", 9, **options)
    second = event_files.scalars(tmp_path / "curves")["train/loss"]
    assert [at for at, _ in second] == [2, 4, 6, 8, 9]
    assert second[:3] == first[:3]


def test_a_run_that_begins_anew_takes_the_place_of_the_other(state, step, tmp_path):
    run(state, step, tmp_path, 6)
    run(state, step, tmp_path, 4)
    assert [at for at, _ in event_files.scalars(tmp_path)["train/loss"]] == [2, 4]
    # Neither file was written over the other, though both may have begun in the same second.
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    "make", [train.TensorBoard, lambda folder: train.JsonLines(folder / "run.jsonl")]
)
def test_of_several_processes_the_first_writes(state, step, tmp_path, monkeypatch, make):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    evaluate = {"evaluate": lambda state: {"score": 1.0}}
    train.fit(
        state, step, [BATCH] * 2, num_steps=2, log_every=1, callbacks=[make(tmp_path)], **evaluate
    )
    assert list(tmp_path.iterdir()) == []


def test_without_tensorboardx_it_says_what_to_install(tmp_path, monkeypatch):
    real_import = builtins.__import__

    def fail(name, *arguments, **options):
        if name.startswith("tensorboardX"):
            raise ImportError(name)
        return real_import(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", fail)
    with pytest.raises(ImportError, match=r"pip install 'eqxlike\[tensorboard\]'"):
        train.TensorBoard(tmp_path)
