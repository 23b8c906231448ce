"""`minibatches`, and `prefetch`, which makes and moves batches ahead of time."""

import contextvars
import gc
import itertools
import json
import threading
import time
import traceback
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eqxlike import train
from eqxlike.train import minibatches
from tests.train.linear import BATCH, make_state, make_step

SIZES = st.integers(1, 30).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n)))


@given(SIZES, st.integers(0, 1000))
def test_epochs_have_each_example_at_most_once_and_keep_shapes_dtypes_and_rows(sizes, seed):
    length, batch_size = sizes
    x = np.arange(2 * length, dtype=np.float32).reshape(length, 2)
    batches = minibatches({"x": x, "y": np.arange(length, dtype=np.int8)}, batch_size, seed=seed)
    for _ in range(3):
        epoch = [next(batches) for _ in range(length // batch_size)]
        for batch in epoch:
            assert (batch["x"].shape, batch["x"].dtype) == ((batch_size, 2), np.float32)
            assert (batch["y"].shape, batch["y"].dtype) == ((batch_size,), np.int8)
            np.testing.assert_array_equal(batch["x"][:, 0], 2 * batch["y"])
        examples = np.concatenate([batch["y"] for batch in epoch]).tolist()
        assert len(set(examples)) == len(examples)


def taken(batches, number):
    return [batch.tolist() for batch in itertools.islice(batches, number)]


def test_the_seed_decides_the_order_and_epochs_differ():
    def order(seed):
        return taken(minibatches(np.arange(50), 50, seed=seed), 2)

    assert order(0) == order(0) != order(1)
    first, second = order(0)
    assert sorted(first) == sorted(second)
    assert first != second


ARRAY = np.arange(5)
POISONED = np.zeros((5, 2), np.float32)
POISONED[3, 1] = POISONED[4, 0] = np.inf


def test_bad_data_and_settings_are_refused_immediately():
    at_least = "must be an integer of at least"
    size, seed = f"batch_size {at_least} 1", f"seed {at_least} 0"
    for (arrays, batch_size, *seeds), message in [
        ((ARRAY, 0), f"{size}, got 0"),
        ((ARRAY, 2.0), f"{size}, got 2.0"),
        ((ARRAY, 6), "at most 5, the number of examples, got 6"),
        ((ARRAY, 2, -1), seed),
        ((ARRAY, 2, None), seed),
        (
            ({"x": np.zeros(5), "y": np.zeros(4)}, 2),
            r"one length, .*\(5,\), \['y'\] of shape \(4,\)",
        ),
        (((), 1), "at least one"),
        (((np.float32(1),), 1), r"leading axis of examples, .*got \[0\] of shape \(\)"),
        ((np.zeros(0), 1), r"at least one example; got arrays of shape \(0,\)"),
        (((ARRAY, POISONED), 2), r"2 NaN or infinite values in \[1\], .* index \(3, 1\)"),
        # NumPy does not know this dtype.
        ((jnp.array([0, 1, jnp.nan], jnp.bfloat16), 2), r"1 NaN or infinite .* arrays, .* \(2,\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            minibatches(arrays, batch_size, seed=seeds[0] if seeds else 0)
    one_by_one = r"all arrays in one argument.* `minibatches\(\(x, y\), batch_size, seed=0\)`"
    for arguments, message in [
        ((ARRAY, ARRAY, 2), one_by_one),
        ((ARRAY, ARRAY), one_by_one),
        (((ARRAY, np.array(["a"] * 5)), 2), r"arrays of numbers; got \[1\] \(<U1\)\. Convert str"),
        (({"x": np.array([None] * 5)}, 2), r"arrays of numbers; got \['x'\] \(object\)"),
    ]:
        with pytest.raises(TypeError, match=message):
            minibatches(*arguments, seed=0)
    batches = minibatches(np.full(4, np.nan), 4, seed=0, check_finite=False)
    assert np.isnan(next(batches)).all()


# --- positions ---


def test_seek_continues_at_a_position():
    """Tests positions within an epoch of two batches and at its end."""
    for number in (0, 1, 2, 3, 7):
        batches = minibatches(np.arange(7), 3, seed=1)
        taken(batches, number)
        position = batches.position
        # The position is stored as JSON.
        text = json.dumps(position)
        expected = taken(batches, 6)
        assert json.dumps(position) == text
        assert taken(batches, 6) != expected
        for each in (batches, minibatches(np.arange(7), 3, seed=1)):
            each.seek(json.loads(text))
            assert taken(each, 6) == expected


def test_wrong_position_is_refused_and_the_position_does_not_change():
    batches = minibatches(np.arange(7), 3, seed=1)
    taken(batches, 3)
    before = batches.position
    keys, generator = (
        "seek expected a position of minibatches, with seed",
        "is not a state of NumPy",
    )
    for position, message in [
        ({**before, "seed": 2}, "with seed=2, but these have seed=1"),
        ({**before, "batch_size": 2}, "with batch_size=2, but these have batch_size=3"),
        ({**before, "num_examples": 8}, "with num_examples=8, but these have num_examples=7"),
        ({**before, "index": 3}, "index must be at most 2"),
        ({**before, "index": -1}, "index must be an integer of at least 0"),
        ({**before, "epoch": 1.5}, "epoch must be an integer"),
        ({**before, "generator": {}}, f"{generator}'s generator"),
        ({**before, "generator": 3}, f"{generator}'s generator"),
        ({**before, "other": 1}, keys),
        (3, keys),
    ]:
        with pytest.raises(ValueError, match=message):
            batches.seek(position)
    expected = taken(batches, 6)
    batches.seek({**before, "index": 2})
    assert taken(batches, 1) == expected[1:2]
    batches.seek(before)
    assert taken(batches, 6) == expected


# --- prefetch ---


def num_threads():
    return sum(thread.name == "eqxlike-prefetch" for thread in threading.enumerate())


@pytest.fixture(autouse=True)
def leaves_no_thread():
    yield
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "eqxlike-prefetch":
            thread.join(timeout=5)
    assert num_threads() == 0


def stream():
    return minibatches((np.arange(16), np.ones(16, np.float32)), 4, seed=0)


class Slow:
    """A stream whose batches take so long that `prefetch` starts a thread."""

    def __init__(self, batches):
        self._batches, self._lock, self.threads = iter(batches), threading.Lock(), []

    def __iter__(self):
        return self

    def __next__(self):
        # Two threads never call this method at the same time.
        assert self._lock.acquire(blocking=False)
        try:
            self.threads.append(threading.current_thread().name)
            time.sleep(0.002)
            return next(self._batches)
        finally:
            self._lock.release()

    def __getattr__(self, name):
        return getattr(self._batches, name)


@pytest.mark.parametrize("source", [stream, lambda: Slow(stream())])
def test_batches_and_positions_equal_the_source(source):
    own = stream()
    with train.prefetch(source(), 3) as ahead:
        start, first = ahead.position, []
        for _ in range(6):
            assert ahead.position == own.position
            batch = next(ahead)
            jax.tree.map(np.testing.assert_array_equal, batch, next(own))
            first.append(np.asarray(batch[0]))
        # `seek` discards the prefetched batches.
        ahead.seek(start)
        np.testing.assert_array_equal([next(ahead)[0] for _ in range(6)], first)


def test_arrays_are_moved_to_the_sharding_and_other_leaves_are_unchanged():
    names = object()
    batch = {"x": np.ones(2), "y": jnp.ones(4), "name": "a", "count": 3, "none": None, "of": names}
    split = train.data_parallel().batch
    for sharding in (jax.devices()[1], split):
        (found,) = train.prefetch([batch], sharding=sharding)
        assert [found[name] for name in ("name", "count", "none", "of")] == ["a", 3, None, names]
        assert found["y"].tolist() == [1, 1, 1, 1]
        expected = split if sharding is split else jax.device_put(0.0, sharding).sharding
        assert found["x"].sharding == found["y"].sharding == expected


@jax.tree_util.register_pytree_node_class
class Pair:
    """A node that accepts only arrays of equal shape."""

    def __init__(self, x, y):
        assert x.shape == y.shape
        self.x, self.y = x, y

    def tree_flatten(self):
        return (self.x, self.y), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_nodes_that_accept_only_arrays_are_moved():
    (found,) = train.prefetch([Pair(np.ones(2), np.zeros(2))], sharding=jax.devices()[1])
    assert found.x.devices() == found.y.devices() == {jax.devices()[1]}


@pytest.mark.parametrize("ready", [[np.ones(2)] * 3, (np.ones(2),) * 3, stream()])
def test_existing_batches_need_a_thread_only_for_placement(ready):
    with train.prefetch(ready) as ahead:
        assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(next(ahead)))
        assert num_threads() == 0
    for batches, sharding in ((ready, jax.devices()[1]), ((each for each in ready), None)):
        with train.prefetch(batches, sharding=sharding) as ahead:
            leaves = jax.tree.leaves(next(ahead))
            assert num_threads() == 1
            assert all(isinstance(leaf, jax.Array) == (sharding is not None) for leaf in leaves)


def test_source_in_the_thread_has_the_context_of_the_caller():
    variable = contextvars.ContextVar("variable", default=0)
    variable.set(1)
    source = Slow(np.full(1, variable.get()) for _ in range(4))
    assert [int(batch[0]) for batch in train.prefetch(source)] == [1] * 4
    assert set(source.threads) == {"eqxlike-prefetch"}


def test_stream_may_write_all_batches_to_the_same_array():
    # XLA only aliases memory whose address is a multiple of 64 bytes.
    numbers = np.zeros(64 + 16, np.float32)
    start = -numbers.ctypes.data % 64 // 4
    buffer = numbers[start : start + 64]

    def source():
        for number in range(3):
            buffer[...] = number
            yield buffer

    for sharding in (None, jax.devices()[0]):
        ahead = train.prefetch(source(), 3, sharding=sharding)
        assert [float(batch[-1]) for batch in ahead] == [0, 1, 2]


def test_at_most_size_batches_are_prefetched():
    size, made, all_made = 3, [], threading.Event()

    def source():
        for number in itertools.count():
            made.append(number)
            if len(made) == size + 1:
                all_made.set()
            yield np.asarray(number)

    with train.prefetch(Slow(source()), size) as ahead:
        assert int(next(ahead)) == 0
        assert all_made.wait(5)
        # The thread waits until a batch is read.
        assert not ahead._ahead.room.acquire(timeout=0.1)
        assert made == list(range(size + 1))
        assert [int(next(ahead)) for _ in range(5)] == [1, 2, 3, 4, 5]


def test_exception_of_a_batch_is_raised_at_that_batch_with_its_traceback():
    def source():
        yield np.zeros(1)
        raise OSError("the disk is gone")

    ahead = train.prefetch(source())
    next(ahead)
    with pytest.raises(OSError, match="the disk is gone") as caught:
        next(ahead)
    assert "in source" in "".join(traceback.format_tb(caught.value.__traceback__))
    with pytest.raises(StopIteration):
        next(ahead)


def test_thread_ends_with_the_loop_with_fit_and_with_close():
    def has_ended():
        gc.collect()
        return num_threads() == 0

    for _ in train.prefetch(Slow(itertools.repeat(np.zeros(1)))):
        assert num_threads() == 1
        break
    assert has_ended()
    batches, optimiser = train.prefetch(Slow(itertools.repeat(BATCH))), optax.sgd(0.1)
    step = make_step(optimiser)
    train.fit(make_state(optimiser), step, batches, num_steps=3, steps_per_call=2)
    del batches
    assert has_ended()
    for source in (itertools.repeat(np.zeros(1)), [np.zeros(1)] * 2):
        ahead = train.prefetch(source)
        next(ahead)
        ahead.close()
        assert num_threads() == 0
        assert list(ahead) == []
        ahead.close()


def test_close_does_not_wait_for_a_source_that_hangs():
    event, ended = threading.Event(), threading.Event()

    def source():
        yield np.zeros(1)
        event.wait()

    ahead = train.prefetch(Slow(source()))
    next(ahead)
    thread = ahead._ahead.thread
    join = thread.join
    # `close` waits for at most a second. A twentieth is enough in this test.
    thread.join = lambda timeout: join(timeout / 20)

    def rest():
        assert list(ahead) == []
        ended.set()

    threading.Thread(target=rest).start()
    ahead.close()
    assert ended.wait(5)
    event.set()


def test_unread_batches_are_freed():
    array = np.zeros(3)
    gone = weakref.ref(array)
    ahead = train.prefetch(iter([array, np.zeros(2)]))
    del array
    next(ahead)
    del ahead
    gc.collect()
    assert gone() is None


def test_position_of_a_plain_iterator_is_none_and_size_must_be_a_positive_integer():
    x = np.arange(3, dtype="f4")
    # Arrays with another byte order are converted.
    with train.prefetch(iter([x, x.astype(">f4")])) as ahead:
        assert ahead.position is None
        with pytest.raises(TypeError, match="list_iterator has no `seek`"):
            ahead.seek({})
        assert [jnp.asarray(batch).tolist() for batch in ahead] == [[0, 1, 2]] * 2
    for size in (0, 1.5):
        with pytest.raises(ValueError, match="size must be an integer of at least 1"):
            train.prefetch([], size)


def test_arrays_are_placed_explicitly_in_the_context_of_the_caller():
    device = jax.devices()[1]
    before = jax.config.jax_transfer_guard_host_to_device
    # This setting applies to all threads, unlike the context manager of the same name.
    jax.config.update("jax_transfer_guard_host_to_device", "disallow")
    try:
        with jax.enable_x64(True), jax.debug_nans(True):
            (array,) = train.prefetch([np.full(2, np.nan)], sharding=device)
    finally:
        jax.config.update("jax_transfer_guard_host_to_device", before)
    assert (array.dtype, array.devices()) == (np.float64, {device})
    assert np.isnan(array).all()


def test_batches_are_moved_to_an_accelerator_and_stay_in_numpy_on_a_cpu(monkeypatch):
    batches = [np.arange(3.0, dtype=np.float32), np.ones(2, np.float32)]
    with train.prefetch(batches) as ahead:
        assert [type(batch) for batch in ahead] == [np.ndarray, np.ndarray]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with train.prefetch(batches) as ahead:
        moved = list(ahead)
    assert all(isinstance(batch, jax.Array) and not batch.committed for batch in moved)
    np.testing.assert_array_equal(moved[0], batches[0])
