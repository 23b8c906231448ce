"""Batches that are made and moved ahead of time."""

import gc
import itertools
import queue
import threading
import traceback
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxlike import train


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


def stream(length=16):
    return train.minibatches((np.arange(length), np.ones(length, np.float32)), 4, seed=0)


def test_batches_are_those_of_the_stream_on_the_device():
    with train.prefetch(stream()) as ahead:
        for batch, expected in zip(itertools.islice(ahead, 9), stream(), strict=False):
            assert all(isinstance(leaf, jax.Array) for leaf in batch)
            jax.tree.map(np.testing.assert_array_equal, batch, expected)


def test_what_is_no_array_stays():
    names = object()
    batch = {"x": np.ones(2), "y": jnp.ones(3), "name": "a", "count": 3, "none": None, "of": names}
    (found,) = train.prefetch([batch])
    assert (found["name"], found["count"], found["none"], found["of"]) == ("a", 3, None, names)
    assert isinstance(found["x"], jax.Array)


def aligned(length):
    """An array that lies in memory as XLA likes it."""
    numbers = np.zeros(length + 16, np.float32)
    start = -numbers.ctypes.data % 64 // 4
    return numbers[start : start + length]


@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_stream_may_write_each_batch_into_the_same_array(is_sharded):
    buffer = aligned(64)

    def source():
        for number in range(3):
            buffer[...] = number
            yield buffer

    sharding = train.data_parallel() if is_sharded else None
    batches = list(train.prefetch(source(), 3, sharding=sharding))
    assert [float(batch[-1]) for batch in batches] == [0, 1, 2]


@pytest.mark.parametrize("size", [1, 3])
def test_no_more_are_made_ahead_than_asked_for(size):
    made = []
    all_made = threading.Event()

    def source():
        for number in itertools.count():
            made.append(number)
            if len(made) == size:
                all_made.set()
            yield np.asarray(number)

    with train.prefetch(source(), size) as ahead:
        assert all_made.wait(5)
        # The thread asks for no other one: it waits for room.
        with pytest.raises(queue.Empty):
            ahead._ahead.room.get(timeout=0.1)
        assert made == list(range(size))
        assert [int(next(ahead)) for _ in range(5)] == [0, 1, 2, 3, 4]


def test_an_exception_arrives_in_its_place_with_its_traceback():
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


def test_the_thread_ends_with_the_loop():
    for _ in train.prefetch(itertools.repeat(np.zeros(1))):
        break
    gc.collect()
    assert num_threads() == 0


def test_the_thread_ends_with_fit():
    import optax

    from eqxlike import nn

    optimiser = optax.sgd(0.1)
    state = train.TrainState.create(
        nn.Linear(1, 1, key=jax.random.key(0)), optimiser, key=jax.random.key(1)
    )
    step = train.make_step(lambda model, x, key: jnp.mean(jax.vmap(model)(x) ** 2), optimiser)
    batches = itertools.repeat(np.ones((4, 1), np.float32))
    train.fit(state, step, train.prefetch(batches), num_steps=3, steps_per_call=2)
    gc.collect()
    assert num_threads() == 0


def test_nothing_holds_what_nobody_reads():
    array = np.zeros(3)
    gone = weakref.ref(array)
    ahead = train.prefetch(iter([array, np.zeros(2)]))
    del array
    next(ahead)
    del ahead
    gc.collect()
    assert gone() is None


def test_closed_it_has_ended():
    ahead = train.prefetch(itertools.repeat(np.zeros(1)))
    next(ahead)
    ahead.close()
    assert list(ahead) == []
    ahead.close()


def test_position_is_that_of_what_was_taken():
    own = stream()
    with train.prefetch(stream(), 3) as ahead:
        for _ in range(6):
            assert ahead.position == own.position
            next(ahead), next(own)


def test_seek_throws_away_what_was_made_ahead():
    with train.prefetch(stream(), 3) as ahead:
        start = ahead.position
        first = [np.asarray(next(ahead)[0]) for _ in range(5)]
        ahead.seek(start)
        np.testing.assert_array_equal([next(ahead)[0] for _ in range(5)], first)


def test_a_stream_without_places_has_none():
    with train.prefetch([np.zeros(1)]) as ahead:
        assert ahead.position is None
        with pytest.raises(TypeError, match="list_iterator has no `seek`"):
            ahead.seek({})


def test_arrays_are_moved_as_the_caller_would():
    device = jax.devices()[1]
    with jax.enable_x64(True), jax.default_device(device):
        (array,) = train.prefetch([np.ones(2)])
    assert (array.dtype, array.devices()) == (np.float64, {device})
    (array,) = train.prefetch([np.ones(2)])
    assert (array.dtype, array.devices()) == (np.float32, {jax.devices()[0]})


def test_moving_them_was_asked_for():
    before = jax.config.jax_transfer_guard_host_to_device
    # For all threads, unlike the context of that name.
    jax.config.update("jax_transfer_guard_host_to_device", "disallow")
    try:
        (array,) = train.prefetch([np.ones(2)])
    finally:
        jax.config.update("jax_transfer_guard_host_to_device", before)
    assert isinstance(array, jax.Array)


def test_arrays_go_where_they_are_to():
    mesh = jax.make_mesh((2,), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    (array,) = train.prefetch([np.ones(4)], sharding=sharding)
    assert array.sharding == sharding


@pytest.mark.parametrize("size", [0, -1, 1.5])
def test_a_size_that_is_none_is_refused(size):
    with pytest.raises(ValueError, match="size must be an integer of at least 1"):
        train.prefetch([], size)
