import itertools
import json

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eqxlike.train import minibatches

SIZES = st.integers(1, 30).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n)))


@given(SIZES, st.integers(0, 1000))
def test_each_epoch_holds_no_example_twice_and_as_many_as_fit(sizes, seed):
    length, batch_size = sizes
    batches = minibatches(np.arange(length), batch_size, seed=seed)
    per_epoch = length // batch_size
    for _ in range(3):
        epoch = np.concatenate(list(itertools.islice(batches, per_epoch)))
        assert len(set(epoch.tolist())) == len(epoch) == per_epoch * batch_size


@given(SIZES)
def test_shapes_and_dtypes_never_change(sizes):
    length, batch_size = sizes
    arrays = {"x": np.zeros((length, 2), np.float32), "y": np.zeros(length, np.int8)}
    for batch in itertools.islice(minibatches(arrays, batch_size, seed=0), 10):
        assert batch["x"].shape == (batch_size, 2)
        assert batch["x"].dtype == np.float32
        assert batch["y"].shape == (batch_size,)
        assert batch["y"].dtype == np.int8


def test_rows_stay_together():
    x = np.arange(20).reshape(10, 2)
    for batch_x, batch_y in itertools.islice(minibatches((x, x[:, 0]), 3, seed=1), 9):
        np.testing.assert_array_equal(batch_x[:, 0], batch_y)


def test_seed_decides_the_order():
    def order(seed):
        return [b.tolist() for b in itertools.islice(minibatches(np.arange(50), 10, seed=seed), 10)]

    assert order(0) == order(0) != order(1)


def test_epochs_are_shuffled_anew():
    batches = minibatches(np.arange(50), 50, seed=0)
    first, second = next(batches).tolist(), next(batches).tolist()
    assert sorted(first) == sorted(second)
    assert first != second


@pytest.mark.parametrize("batch_size", [0, -1, 2.0, True])
def test_batch_size_that_is_no_positive_integer_is_refused_at_once(batch_size):
    message = f"batch_size must be an integer of at least 1, got {batch_size}"
    with pytest.raises(ValueError, match=message):
        minibatches(np.arange(5), batch_size, seed=0)


def test_batch_size_above_the_number_of_examples_is_refused_at_once():
    with pytest.raises(ValueError, match="at most 5, the number of examples, got 6"):
        minibatches(np.arange(5), 6, seed=0)


def test_lengths_that_differ_are_refused_by_name():
    with pytest.raises(ValueError, match=r"one length, got \['x'\] 5, \['y'\] 4"):
        minibatches({"x": np.zeros(5), "y": np.zeros(4)}, 2, seed=0)


@pytest.mark.parametrize(
    ("arrays", "message"), [((), "at least one"), ((np.float32(1),), "leading axis")]
)
def test_data_without_examples_is_refused(arrays, message):
    with pytest.raises(ValueError, match=message):
        minibatches(arrays, 1, seed=0)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_data_that_is_not_finite_is_refused_with_its_place(bad):
    x = np.zeros((5, 2), np.float32)
    x[3, 1] = x[4, 0] = bad
    with pytest.raises(ValueError, match=r"2 NaN or infinite values in \[1\], .* index \(3, 1\)"):
        minibatches((np.arange(5), x), 2, seed=0)


def test_data_of_a_dtype_that_numpy_does_not_know_is_looked_at():
    with pytest.raises(ValueError, match=r"1 NaN or infinite values in arrays, .* index \(2,\)"):
        minibatches(jnp.array([0, 1, jnp.nan], jnp.bfloat16), 2, seed=0)


def test_data_that_is_not_finite_is_taken_on_request():
    batches = minibatches(np.full(4, np.nan), 2, seed=0, check_finite=False)
    assert np.isnan(next(batches)).all()


# --- positions ---


def taken(batches, number):
    return [batch.tolist() for batch in itertools.islice(batches, number)]


@pytest.mark.parametrize("number", [0, 1, 2, 3, 7])
def test_a_position_leads_to_the_batches_that_came_then(number):
    """Two batches an epoch: the position is one in an epoch, or at its end."""
    batches = minibatches(np.arange(7), 3, seed=1)
    taken(batches, number)
    # As a file would hold it.
    position = json.loads(json.dumps(batches.position))
    expected = taken(batches, 6)
    assert taken(batches, 6) != expected
    batches.seek(position)
    assert taken(batches, 6) == expected
    other = minibatches(np.arange(7), 3, seed=1)
    other.seek(position)
    assert taken(other, 6) == expected


def test_a_position_does_not_move_with_its_stream():
    batches = minibatches(np.arange(7), 3, seed=1)
    position = batches.position
    taken(batches, 5)
    assert position == minibatches(np.arange(7), 3, seed=1).position


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (minibatches(np.arange(7), 3, seed=2), "with seed 2, and these have 1"),
        (minibatches(np.arange(7), 2, seed=1), "with batch_size 2, and these have 3"),
        (minibatches(np.arange(8), 3, seed=1), "with num_examples 8, and these have 7"),
    ],
)
def test_a_position_of_another_stream_is_refused(other, message):
    with pytest.raises(ValueError, match=message):
        minibatches(np.arange(7), 3, seed=1).seek(other.position)


@pytest.mark.parametrize(
    "change",
    [{"index": 3}, {"index": -1}, {"epoch": 1.5}, {"generator": {}}, {"generator": 3}],
)
def test_a_position_that_is_none_is_refused_and_nothing_moves(change):
    batches = minibatches(np.arange(7), 3, seed=1)
    taken(batches, 3)
    before = batches.position
    with pytest.raises(ValueError, match=r"index must|epoch must|no state of NumPy's generator"):
        batches.seek({**before, **change})
    with pytest.raises(ValueError, match="seek expected a position of minibatches, with seed"):
        batches.seek({"seed": 1})
    expected = taken(batches, 6)
    batches.seek(before)
    assert taken(batches, 6) == expected


@pytest.mark.parametrize("seed", [-1, 1.5, None])
def test_seed_that_is_none_is_refused(seed):
    with pytest.raises(ValueError, match="seed must be an integer of at least 0"):
        minibatches(np.arange(5), 2, seed=seed)
