"""What callbacks keep comes back in a run that is resumed."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqxlike as eqx
from eqxlike import train
from tests.train.linear import BATCH, make_state, make_step

OPTIMISER = optax.adam(0.1)
SCORES = {2: 3.0, 4: 1.0, 6: 2.0, 8: 1.5, 10: 1.2, 12: 0.5}
"""By the steps made: the best of the first five is that of step 4."""


@pytest.fixture(scope="module")
def step():
    return make_step(OPTIMISER)


@pytest.fixture(scope="module")
def state():
    return make_state(OPTIMISER)


class Gone(Exception):
    pass


def batches(gone_after=None, with_error=Gone):
    yield from itertools.repeat(BATCH) if gone_after is None else [BATCH] * gone_after
    raise with_error


def run(state, step, stream, callbacks, folder=None, **options):
    defaults = {"num_steps": 20, "evaluate_every": 2}
    return train.fit(
        *(state, step, stream),
        **(defaults | options),
        evaluate=lambda state: {"score": SCORES.get(int(state.step), 9.0)},
        callbacks=callbacks,
        resume_from=folder,
    )


def stopping(**options):
    return train.EarlyStopping("score", **({"patience": 3} | options))


def saving(folder, **options):
    return train.Checkpoint(folder, **({"every": 3, "keep_last": 1} | options))


# --- early stopping ---


@pytest.fixture(scope="module")
def whole(state, step):
    callback = stopping()
    result = run(state, step, batches(), [callback])
    assert (len(result.history), callback.best, callback.best_step) == (10, 1.0, 4)
    return result


def same_end(result, callback, whole):
    assert eqx.tree_equal(result.state, whole.state)
    told = "Stopped after step 10: score was not better than 1, of step 4, in 3 evaluations."
    assert result.message.startswith(told)
    assert "The state is that after step 4, the best." in result.message
    assert (callback.best, callback.best_step) == (1.0, 4)


# From the checkpoints after 3, 6 and 9 steps: before the best, soon after it, and long after.
@pytest.mark.parametrize(
    ("gone_after", "steps_per_call", "left"), [(4, 1, 7), (7, 1, 4), (9, 1, 1), (7, 16, 4)]
)
def test_a_run_that_died_stops_where_it_would_have_with_the_same_best(
    state, step, tmp_path, whole, gone_after, steps_per_call, left
):
    options = {"folder": tmp_path, "steps_per_call": steps_per_call}
    with pytest.raises(Gone):
        run(state, step, batches(gone_after), [stopping(), saving(tmp_path)], **options)
    callback = stopping()
    result = run(state, step, batches(), [callback], **options)
    assert len(result.history) == left
    same_end(result, callback, whole)


@pytest.mark.parametrize("is_first", [True, False])
def test_what_is_saved_at_the_end_is_the_last_state_and_not_the_best(
    state, step, tmp_path, whole, is_first
):
    def callbacks():
        both = [stopping(), saving(tmp_path)]
        return both if is_first else both[::-1]

    first = run(state, step, batches(7, KeyboardInterrupt), callbacks(), tmp_path)
    assert first.stopped == "interrupted"
    assert int(first.state.step) == 4
    assert int(train.restore(tmp_path / "step_000000007", like=state).state.step) == 7
    callback = stopping()
    same_end(run(state, step, batches(), [callback], tmp_path), callback, whole)


def test_a_run_that_had_stopped_makes_no_step_and_has_the_same_result(state, step, tmp_path, whole):
    run(state, step, batches(), [stopping(), saving(tmp_path, every=99)])
    callback = stopping()
    result = run(state, step, batches(), [callback], tmp_path)
    assert result.history == ()
    same_end(result, callback, whole)


def test_with_more_patience_it_goes_on(state, step, tmp_path):
    run(state, step, batches(), [stopping(), saving(tmp_path, every=99)])
    callback = stopping(patience=4)
    run(state, step, batches(), [callback], tmp_path)
    assert (callback.best, callback.best_step) == (0.5, 12)


def test_of_another_metric_nothing_is_taken_over(state, step, tmp_path):
    run(state, step, batches(), [stopping(), saving(tmp_path, every=99)])
    callback = stopping(mode="max")
    run(state, step, batches(), [callback], tmp_path, num_steps=12)
    assert (callback.best, callback.best_step) == (0.5, 12)


def test_the_best_state_is_none_or_refused_where_it_was_not_kept(state, step, tmp_path):
    last = {"restore_best": False}
    with pytest.raises(Gone):
        run(state, step, batches(7), [stopping(**last), saving(tmp_path)])
    with pytest.raises(ValueError, match=r"the best state, of step 4, was not kept .* give that"):
        run(state, step, batches(), [stopping()], tmp_path)
    result = run(state, step, batches(), [stopping(**last)], tmp_path)
    assert int(result.state.step) == 10


def test_a_best_state_that_is_damaged_is_told_and_an_older_one_taken(state, step, tmp_path, whole):
    with pytest.raises(Gone):
        run(state, step, batches(9), [stopping(), saving(tmp_path, keep_last=2)])
    names = [path for path in tmp_path.glob("step_000000009/arrays-*/*") if path.is_dir()]
    # The state's own come first, and those of the best state after them.
    weights = sorted(path for path in names if path.name.endswith(".model.weight"))
    assert len(weights) == 2
    file = next(path for path in weights[1].iterdir() if not path.name.startswith("."))
    file.write_bytes(bytes(byte ^ 1 for byte in file.read_bytes()))
    callback = stopping()
    told = r"the values of EarlyStopping\('score', mode='min'\)\.model\.weight, was changed"
    with pytest.warns(UserWarning, match=told):
        result = run(state, step, batches(), [callback], tmp_path)
    assert len(result.history) == 4
    same_end(result, callback, whole)


def test_the_best_state_comes_back_where_it_lay(step, state, tmp_path):
    sharding = train.fsdp(min_size=1)
    sharded = train.shard(state, sharding)
    on_both = train.make_step(
        lambda model, x, key: jnp.mean(jax.vmap(model)(x) ** 2), OPTIMISER, sharding=sharding
    )

    def placed(gone_after=None):
        return train.prefetch(batches(gone_after), sharding=sharding)

    with pytest.raises(Gone):
        run(sharded, on_both, placed(7), [stopping(), saving(tmp_path)])
    result = run(sharded, on_both, placed(), [stopping()], tmp_path)
    assert int(result.state.step) == 4
    weight = result.state.model.weight
    assert weight.sharding == sharded.model.weight.sharding
    assert not weight.is_fully_replicated


# --- callbacks of one's own ---


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
    """The mean of all weights there were."""

    every = 1

    def on_start(self, run):
        self.sum = jnp.zeros_like(run.state.model.weight)

    def on_step(self, run):
        self.sum = self.sum + run.state.model.weight

    def save_arrays(self):
        return {"sum": self.sum}

    def load_arrays(self, run, read):
        self.sum = read({"sum": run.state.model.weight})["sum"]


def test_what_callbacks_keep_comes_back(state, step, tmp_path):
    expected = Averaging()
    run(state, step, batches(), [expected], num_steps=8)
    with pytest.raises(Gone):
        run(state, step, batches(5), [Counting(), Averaging(), saving(tmp_path)])
    counting, averaging = Counting(), Averaging()
    run(state, step, batches(), [counting, averaging], tmp_path, num_steps=8)
    assert counting.count == 8
    np.testing.assert_array_equal(averaging.sum, expected.sum)


def test_those_of_one_name_are_told_by_their_order(state, step, tmp_path):
    class Slow(Counting):
        every = 3
        state_name = "Counting"

    with pytest.raises(Gone):
        run(state, step, batches(7), [Counting(), Slow(), saving(tmp_path)])
    both = [Counting(), Slow()]
    run(state, step, batches(), both, tmp_path, num_steps=9)
    assert [callback.count for callback in both] == [9, 3]


def test_one_of_which_nothing_was_kept_begins_anew(state, step, tmp_path):
    run(state, step, batches(), [saving(tmp_path)], num_steps=4)
    callback = Counting()
    run(state, step, batches(), [callback], tmp_path, num_steps=6)
    assert callback.count == 2


def test_what_is_no_json_is_refused_with_its_path(state, step, tmp_path):
    class Wrong(Counting):
        def save_state(self):
            return {"count": np.ones(2)}

    with pytest.raises(TypeError, match=r"got ndarray at data\['callbacks'\]\['.*Wrong'\]"):
        run(state, step, batches(), [Wrong(), saving(tmp_path)])


def test_a_state_with_others_beside_it_is_restored_alone(tmp_path):
    tree, other = {"a": jnp.arange(3)}, {"b": jnp.ones(2), "key": jax.random.key(3)}
    with train.CheckpointFolder(tmp_path) as folder:
        saved = folder.save(3, tree, beside={"other": other, "none": {}})
        assert eqx.tree_equal(train.restore(saved.path, like=tree).state, tree)
        like = {"b": jnp.zeros(2), "key": jax.random.key(0)}
        assert eqx.tree_equal(folder.restore_beside(3, "other", like), other)
        assert folder.restore_beside(3, "none", {}) == {}
        with pytest.raises(KeyError, match=r"nothing named 'x' beside .*, but 'other', 'none'"):
            folder.restore_beside(3, "x", {})
        with pytest.raises(ValueError, match=r"like\['b'\] is an array of shape"):
            folder.restore_beside(3, "other", like | {"b": jnp.zeros(4)})
