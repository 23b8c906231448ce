"""A resumed run gives the same result as an uninterrupted run."""

import itertools
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqxlike as eqx
from eqxlike import train
from tests.train import killed_run
from tests.train.linear import BATCH, make_state, make_step

ROOT = pathlib.Path(__file__).parents[2]


def test_a_killed_run_resumes_to_the_same_bits(tmp_path):
    command = [sys.executable, killed_run.__file__, tmp_path / "run"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    result, whole = (killed_run.main(folder) for folder in (tmp_path / "run", None))
    assert result.message.startswith("Made 30 of 30 steps, ")
    assert 0 < len(result.history) < 30
    assert eqx.tree_equal(result.state, whole.state)


# --- in one process ---


@pytest.fixture(scope="module")
def simple():
    optimiser = optax.sgd(0.1)
    return make_state(optimiser), make_step(optimiser)


def stream(seed=0):
    x = np.random.default_rng(0).normal(size=(22, 2)).astype(np.float32)
    return train.minibatches(x, 4, seed=seed)


def without_position():
    return itertools.islice(stream(), 99)


class Told(train.Callback):
    def __init__(self):
        self.folders = []

    def on_checkpoint(self, run):
        self.folders.append(run.checkpoint.name)


def in_two_parts(simple, folder, *streams, first=7, **options):
    """Makes seven steps, and resumes the run to make ten steps."""
    parts, told = [], Told()
    for num_steps, batches in zip((first, 10), streams, strict=True):
        options_of_fit = {"num_steps": num_steps, "resume_from": folder}
        callbacks = [told, train.Checkpoint(folder, every=3, **options)]
        parts.append(train.fit(*simple, batches, callbacks=callbacks, **options_of_fit))
    return *parts, told.folders


@pytest.mark.parametrize(
    ("streams", "background"),
    [
        (lambda: (train.prefetch(stream(), 3), train.prefetch(stream(), 3)), True),
        (lambda: (stream(), train.prefetch(without_position())), False),
    ],
)
def test_a_run_in_two_parts_equals_one_run(simple, tmp_path, streams, background):
    whole = train.fit(*simple, stream(), num_steps=10)
    first, second, told = in_two_parts(simple, tmp_path, *streams(), background=background)
    assert eqx.tree_equal(second.state, whole.state)
    assert first.history + second.history == whole.history
    name = tmp_path / "step_0000000"
    assert first.message == f"Made 7 of 7 steps. The run is saved in {name}07."
    assert second.message == (
        f"Made 10 of 10 steps, 7 of them before this call. The run is saved in {name}10."
    )
    assert told == [f"step_{step:09d}" for step in (3, 6, 7, 9, 10)]
    # By default the last three checkpoints are kept.
    left = [path.name for path in train.CheckpointFolder(tmp_path).paths()]
    assert left == told[:1:-1]


def test_a_finished_run_makes_no_step_and_refuses_other_batches(simple, tmp_path):
    first, second, _ = in_two_parts(simple, tmp_path, stream(), stream(), first=10)
    assert second.history == ()
    assert second.message == "Made 10 of 10 steps, 10 of them before this call."
    assert eqx.tree_equal(second.state, first.state)
    with pytest.raises(ValueError, match="minibatches with seed=0, but these have seed=1"):
        train.fit(*simple, stream(seed=1), num_steps=12, resume_from=tmp_path)
    with pytest.raises(ValueError, match="already has a checkpoint of step 10, so a checkpoint of"):
        train.fit(*simple, stream(), num_steps=3, callbacks=[train.Checkpoint(tmp_path, every=3)])
    state, step = simple
    larger = eqx.tree_at(lambda state: state.step, state, np.zeros(2, np.int32))
    with pytest.raises(ValueError, match="does not fit `like`") as caught:
        train.fit(larger, step, stream(), num_steps=6, resume_from=tmp_path)
    assert caught.value.__notes__ == ["`like` is the state passed to `fit`."]
    with train.CheckpointFolder(tmp_path / "other") as folder:
        folder.save(3, state)
    with pytest.raises(ValueError, match="resumes only from checkpoints that `train"):
        train.fit(*simple, stream(), num_steps=10, resume_from=tmp_path / "other")


def test_a_folder_without_checkpoint_warns_unless_the_run_writes_to_it(simple, tmp_path):
    other, callbacks = str(tmp_path / "elsewhere"), [train.Checkpoint(tmp_path, every=3)]
    with pytest.warns(UserWarning, match=r"no checkpoint in resume_from='.*elsewhere', so the run"):
        train.fit(*simple, stream(), num_steps=1, callbacks=callbacks, resume_from=other)


def test_damaged_checkpoint_is_skipped_and_replaced(simple, tmp_path):
    whole = train.fit(*simple, stream(), num_steps=10)
    callback = train.Checkpoint(tmp_path, every=3)
    options = {"callbacks": [callback], "resume_from": tmp_path}
    train.fit(*simple, stream(), num_steps=7, **options)
    (tmp_path / "step_000000007/manifest/manifest.json").write_text("{")
    with pytest.warns(UserWarning, match="Restored the older .*step_000000006 instead"):
        result = train.fit(*simple, stream(), num_steps=10, **options)
    assert len(result.history) == 4
    assert eqx.tree_equal(result.state, whole.state)
    assert callback.folder.newest().name == "step_000000010"


# --- saved checkpoints ---


def test_the_best_checkpoints_are_kept(simple, tmp_path):
    for every, evaluate_every, options, expected in [
        (2, 2, {"keep_best": 1, "mode": "max"}, [8]),
        # After 6 steps the newest score is the score of step 4. If there are at most two
        # checkpoints, both are kept.
        (3, 4, {"keep_best": 2, "mode": "min"}, [12, 9]),
    ]:
        scores, folder = iter([3.0, 1.0, 2.0, 4.0]), tmp_path / str(every)
        evaluate = lambda state, scores=scores: {"score": next(scores)}
        best = train.Checkpoint(folder, every=every, keep_last=1, metric="score", **options)
        often = {"num_steps": expected[0], "evaluate_every": evaluate_every}
        train.fit(*simple, stream(), evaluate=evaluate, callbacks=[best], **often)
        names = [path.name for path in train.CheckpointFolder(folder).paths()]
        assert names == [f"step_{step:09d}" for step in expected]


def test_inconsistent_settings_are_refused(simple, tmp_path):
    scores = {"evaluate": lambda state: {"score": 1.0}}

    def run(metric, **options):
        best = train.Checkpoint(tmp_path, every=3, keep_best=1, metric=metric, mode="min")
        return lambda: train.fit(*simple, stream(), num_steps=9, callbacks=[best], **options)

    def create(**options):
        return lambda: train.Checkpoint(tmp_path, **options)

    found = "needs the metric 'loss', but `evaluate` returned 'score'"
    on_error = 'on_error must be "raise" or "warn", got \'ignore\''
    for call, error, message in [
        (create(every=0), ValueError, "every must be an integer of at least 1"),
        (create(every=3, on_error="ignore"), ValueError, on_error),
        (create(every=3, keep_best=1), ValueError, "keep_best needs a metric"),
        (create(every=3, keep_best=1, metric="score"), ValueError, "if a larger 'score' is better"),
        (run("score"), ValueError, "pass `evaluate` and `evaluate_every` to fit"),
        (run("score", evaluate_every=5, **scores), ValueError, "every 3 steps and evaluations ev"),
        (run("loss", evaluate_every=1, **scores), KeyError, found),
    ]:
        with pytest.raises(error, match=message):
            call()


def test_a_divergence_is_not_saved(simple, tmp_path):
    batches = [BATCH] * 4 + [BATCH * np.nan]
    checkpoint = train.Checkpoint(tmp_path, every=3)
    result = train.fit(*simple, batches, num_steps=9, callbacks=[checkpoint])
    assert result.stopped == "diverged"
    assert result.message.endswith("the state is the one after step 4.")
    assert [path.name for path in checkpoint.folder.paths()] == ["step_000000003"]


@pytest.mark.parametrize("background", [True, False])
def test_a_full_disk_ends_the_run_unless_on_error_is_warn(
    simple, tmp_path, monkeypatch, background
):
    def full_disk(*_, **__):
        raise OSError(28, "No space left on device")

    def run(**options):
        callbacks = [train.Checkpoint(tmp_path, every=3, background=background, **options)]
        return train.fit(*simple, stream(), num_steps=7, callbacks=callbacks, resume_from=tmp_path)

    run()
    shutil.rmtree(tmp_path / "step_000000007")
    shutil.rmtree(tmp_path / "step_000000006")
    monkeypatch.setattr("eqxlike.train._orbax.seal", full_disk)
    with pytest.raises(OSError, match="No space left"):
        run()
    with pytest.warns(UserWarning, match="was not written, training continues: .* No space"):
        result = run(on_error="warn")
    assert result.message == "Made 7 of 7 steps, 3 of them before this call."
    assert os.listdir(tmp_path / "step_000000003")
    assert not (tmp_path / "step_000000006").exists()


# --- states of callbacks ---


OPTIMISER = optax.sgd(0.1, momentum=0.9)
SCORES = {2: 3.0, 4: 1.0, 6: 2.0, 8: 1.5, 10: 1.2, 12: 0.5}
"""Maps the number of steps to a score. The best of the first five scores is at step 4."""


class Gone(Exception):
    pass


def batches(gone_after=None, with_error=Gone):
    yield from itertools.repeat(BATCH) if gone_after is None else [BATCH] * gone_after
    raise with_error


@pytest.fixture(scope="module")
def state():
    return make_state(OPTIMISER)


@pytest.fixture(scope="module")
def run(state):
    """A function that calls `fit` with `SCORES`."""
    step = make_step(OPTIMISER)
    scores = {"evaluate": lambda state: {"score": SCORES.get(int(state.step), 9.0)}}

    def run(stream, callbacks, folder=None, **options):
        options = {"num_steps": 20, "evaluate_every": 2} | scores | options
        return train.fit(state, step, stream, callbacks=callbacks, resume_from=folder, **options)

    return run


def stopping(**options):
    return train.EarlyStopping("score", **({"patience": 3, "mode": "min"} | options))


def saving(folder, **options):
    return train.Checkpoint(folder, **({"every": 3, "keep_last": 1} | options))


@pytest.fixture(scope="module")
def whole(run):
    callback = stopping()
    result = run(batches(), [callback])
    assert (len(result.history), callback.best, callback.best_step) == (10, 1.0, 4)
    return result


def same_end(result, callback, whole):
    # Several steps in a call are a different program, which may round differently.
    rtol = 0.0 if result.steps_per_call == whole.steps_per_call else 1e-6
    assert eqx.tree_equal(result.state, whole.state, rtol=rtol)
    told = "Stopped after step 10: score did not improve on 1, at step 4, in 3 evaluations."
    assert result.message.startswith(told)
    assert "The state is the best one, after step 4." in result.message
    assert (callback.best, callback.best_step) == (1.0, 4)


# Resumes from the checkpoints after 3 and 6 steps, before and after the best step.
@pytest.mark.parametrize(("gone_after", "steps_per_call", "left"), [(4, 1, 7), (7, 16, 4)])
def test_a_resumed_run_stops_at_the_same_step_with_the_same_best_state(
    run, tmp_path, whole, gone_after, steps_per_call, left
):
    options = {"folder": tmp_path, "steps_per_call": steps_per_call}
    with pytest.raises(Gone):
        run(batches(gone_after), [stopping(), saving(tmp_path)], **options)
    callback = stopping()
    result = run(batches(), [callback], **options)
    assert len(result.history) == left
    same_end(result, callback, whole)


def test_last_state_instead_of_the_best_is_saved_at_the_end(run, state, tmp_path, whole):
    first = run(batches(7, KeyboardInterrupt), [stopping(), saving(tmp_path)], tmp_path)
    assert first.stopped == "interrupted"
    assert int(first.state.step) == 4
    assert int(train.restore(tmp_path / "step_000000007", like=state).state.step) == 7
    callback = stopping()
    same_end(run(batches(), [callback], tmp_path), callback, whole)


def test_a_stopped_run_continues_with_more_patience_or_another_metric(run, tmp_path, whole):
    run(batches(), [stopping(), saving(tmp_path, every=99)])
    callback = stopping()
    result = run(batches(), [callback], tmp_path)
    assert result.history == ()
    same_end(result, callback, whole)
    for options in ({"patience": 4}, {"mode": "max"}):
        callback = stopping(**options)
        run(batches(), [callback], tmp_path, num_steps=12)
        assert (callback.best, callback.best_step) == (0.5, 12)


def test_a_run_that_did_not_keep_its_best_state_cannot_restore_it(run, tmp_path):
    last = {"restore_best": False}
    with pytest.raises(Gone):
        run(batches(7), [stopping(**last), saving(tmp_path)])
    with pytest.raises(ValueError, match=r"did not save its best state, of step 4: pass restore"):
        run(batches(), [stopping()], tmp_path)
    result = run(batches(), [stopping(**last)], tmp_path)
    assert int(result.state.step) == 10


class Counting(train.Callback):
    every = 1

    def on_start(self, run):
        self.count = 0

    def on_step(self, run):
        self.count += 1

    def save_state(self):
        return {"count": self.count}

    def load_state(self, run, state):
        self.count = state["count"]


class Averaging(train.Callback):
    """Averages the weights of all steps."""

    every = 1

    def on_start(self, run):
        self.sum = jnp.zeros_like(run.state.model.weight)

    def on_step(self, run):
        self.sum = self.sum + run.state.model.weight

    def save_arrays(self):
        return {"sum": self.sum}

    def load_arrays(self, run, read):
        self.sum = read({"sum": run.state.model.weight})["sum"]


def test_states_of_callbacks_are_restored_by_name_and_order(run, tmp_path):
    class Slow(Counting):
        every = 3
        state_name = "Counting"

    class New(Counting):
        """A callback without a saved state."""

    class Wrong(Counting):
        def save_state(self):
            return {"count": np.ones(2)}

    expected = Averaging()
    run(batches(), [expected], num_steps=9)
    with pytest.raises(Gone):
        run(batches(7), [Counting(), Averaging(), Slow(), saving(tmp_path)])
    callbacks = counting, averaging, slow, new = Counting(), Averaging(), Slow(), New()
    run(batches(), callbacks, tmp_path, num_steps=9)
    assert (counting.count, slow.count, new.count) == (9, 3, 3)
    np.testing.assert_array_equal(averaging.sum, expected.sum)
    with pytest.raises(TypeError, match=r"got ndarray at data\['callbacks'\]\['.*Wrong'\]"):
        run(batches(), [Wrong(), saving(tmp_path / "other")])


def test_state_saved_with_other_trees_is_restored_alone(tmp_path):
    tree, other = {"a": jnp.arange(3)}, {"b": jnp.ones(2), "key": jax.random.key(3)}
    with train.CheckpointFolder(tmp_path) as folder:
        saved = folder.save(3, tree, beside={"other": other, "none": {}})
        assert eqx.tree_equal(train.restore(saved.path, like=tree).state, tree)
        like = {"b": jnp.zeros(2), "key": jax.random.key(0)}
        assert eqx.tree_equal(folder.restore_beside(3, "other", like), other)
        assert folder.restore_beside(3, "none", {}) == {}
        with pytest.raises(KeyError, match=r"no pytree named 'x' in .*are 'other', 'none'"):
            folder.restore_beside(3, "x", {})
        with pytest.raises(ValueError, match=r"like\['b'\] is an array of shape"):
            folder.restore_beside(3, "other", like | {"b": jnp.zeros(4)})
        folder.save(4, tree, beside={"best": make_state(OPTIMISER)})
        with pytest.raises(ValueError, match=r"like\.weight is missing"):
            folder.restore_beside(4, "best", make_state(OPTIMISER).model)
