"""Batches from loaders of other libraries, and positions for resumed runs."""

import functools
import itertools
import json
import types

import numpy as np
import optax
import pytest

import eqxlike as eqx
from eqxlike import train
from tests.train.linear import make_state, make_step

LENGTH = 4
ARRAYS = np.random.default_rng(0).normal(size=(3, LENGTH, 3, 2)).astype("f")
"""The batches, indexed by epoch and position in the epoch."""


class Loader:
    """A loader whose epochs differ if `set_epoch` is called.

    `num_drawn` is the number of batches that it has made.
    """

    def __init__(self):
        self.epoch = self.num_drawn = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for batch in ARRAYS[self.epoch]:
            self.num_drawn += 1
            yield batch


class Sampled(Loader):
    """A loader whose sampler has `set_epoch`, like `DistributedSampler` of PyTorch."""

    set_epoch = None

    @property
    def sampler(self):
        return types.SimpleNamespace(set_epoch=functools.partial(setattr, self, "epoch"))


class OfHuggingFace(Loader):
    """Has a state like `datasets.IterableDataset`, with NumPy arrays and numbers."""

    def __init__(self):
        super().__init__()
        self.start = self.index = 0

    def state_dict(self):
        return {"index": np.int64(self.index), "order": np.arange(2, dtype="u1")}

    def load_state_dict(self, state):
        assert state["order"].dtype == np.uint8
        self.start = state["index"]

    def __iter__(self):
        self.index, self.start = self.start, 0
        for batch in ARRAYS[self.epoch][self.index :]:
            self.num_drawn += 1
            self.index += 1
            yield batch


class OfGrain(Loader):
    """Its iterator has a state in bytes, like the iterator of `grain.DataLoader`."""

    def __iter__(self):
        return GrainIterator(self)


class GrainIterator:
    def __init__(self, loader):
        self.loader, self.index = loader, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.index == LENGTH:
            raise StopIteration
        self.loader.num_drawn += 1
        self.index += 1
        return ARRAYS[self.loader.epoch][self.index - 1]

    def get_state(self):
        return json.dumps({"next": self.index}).encode()

    def set_state(self, state):
        self.index = json.loads(state)["next"]


class Unsaved(Loader):
    """Has a state that JSON does not support, so that the state is ignored."""

    def state_dict(self):
        return {"function": print}

    def load_state_dict(self, state):
        raise AssertionError


def of_minibatches():
    return train.minibatches(ARRAYS.reshape(-1, 2), 3, seed=0)


def flat():
    return itertools.chain(*ARRAYS)


# Pairs of a function that makes a source, and the batches that `seek` draws after six batches.
SOURCES = {
    "loader": (Loader, 6),
    "sampler": (Sampled, 6),
    "state of the source": (OfHuggingFace, 0),
    "state of the iterator": (OfGrain, 0),
    "state that is not JSON": (Unsaved, 6),
    "position": (of_minibatches, None),
    "function": (lambda: flat, None),
    "function of a loader": (lambda: OfHuggingFace, None),
    "iterator": (flat, None),
}


def opened(name):
    make, _ = SOURCES[name]
    source = make()
    epochs = None if name in ("position", "iterator") else 3
    return source, train.batches_from(source, epochs=epochs)


@pytest.mark.parametrize("name", SOURCES)
def test_batches_continue_at_a_position(name):
    (source, again), (_, first) = opened(name), opened(name)
    list(itertools.islice(first, 6))
    again.seek(json.loads(json.dumps(first.position)))
    if (num_drawn := SOURCES[name][1]) is not None:
        assert source.num_drawn == num_drawn
    np.testing.assert_array_equal(
        list(itertools.islice(again, 4)), list(itertools.islice(first, 4))
    )


@pytest.mark.parametrize("name", SOURCES)
def test_a_resumed_run_continues_with_the_next_batches(name, tmp_path):
    optimiser = optax.sgd(0.1)
    simple = make_state(optimiser), make_step(optimiser)
    whole = train.fit(*simple, opened(name)[1], num_steps=10)
    callbacks = [train.Checkpoint(tmp_path, every=3)]
    train.fit(*simple, opened(name)[1], num_steps=6, callbacks=callbacks)
    for wrap in (lambda batches: batches, train.prefetch):
        batches = wrap(opened(name)[1])
        resumed = train.fit(*simple, batches, num_steps=10, resume_from=tmp_path)
        assert resumed.history == whole.history[6:]
        assert eqx.tree_equal(resumed.state, whole.state)


def test_epochs_bounds_the_batches():
    def count(source, **options):
        batches = train.batches_from(source, **options)
        return len(list(itertools.islice(batches, 50))), next(batches, None) is None

    assert count(Loader(), epochs=2) == (2 * LENGTH, True)
    assert count(list(flat()), epochs=1) == (12, True)
    assert count(list(flat())) == (50, False)
    assert count(flat()) == (12, True)
    assert count(flat(), epochs=1) == (12, True)
    assert count(lambda: flat()) == (50, False)


def test_columns_and_convert_select_what_becomes_arrays():
    raw = {"x": [[1, 2], [3, 4]], "n": 2, "text": ["a", "b"], "y": np.ones(2)}

    def first(**options):
        return next(train.batches_from([raw], **options))

    found = {name: (type(leaf), leaf.shape) for name, leaf in first(columns=("n", "x")).items()}
    assert found == {"n": (np.ndarray, ()), "x": (np.ndarray, (2, 2))}
    convert = lambda batch: (batch["x"], [len(text) for text in batch["text"]])
    x, size = first(columns=["x", "text"], convert=convert)
    np.testing.assert_array_equal(x, raw["x"])
    np.testing.assert_array_equal(size, [1, 1])


class Empty:
    def __len__(self):
        return 0


def drawn(batch, **options):
    return lambda: next(train.batches_from([batch], **options))


STRINGS = r"got batch\['x'\]\[0\], a str, batch\['x'\]\[1\], a str\. Select other columns"


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: train.batches_from(3), TypeError, "expected an iterable of batches, .*got 3"),
        (lambda: train.batches_from({"train": []}), TypeError, "got {'train': .*minibatches"),
        (lambda: train.batches_from(ARRAYS), TypeError, r"got f32\[3,4,3,2\].*minibatches"),
        (lambda: train.batches_from([], epochs=0), ValueError, "epochs must be an integer"),
        (lambda: train.batches_from(flat(), epochs=2), ValueError, "a chain can be used only once"),
        (lambda: train.batches_from([], columns="x"), TypeError, "columns must be a sequence"),
        (lambda: train.batches_from([], convert=3), TypeError, r"convert\(batch\)"),
        (lambda: next(train.batches_from([])), ValueError, "no batches in epoch 0"),
        (drawn({"x": ["a", "b"]}), TypeError, STRINGS),
        (drawn((np.ones(2), np.array(["a"]))), TypeError, r"got batch\[1\] \(<U1\)"),
        (drawn(Empty()), TypeError, "got batch, a Empty"),
        (drawn({"x": [[1], [2, 3]]}), ValueError, r"rows of batch\['x"),
        (drawn({"x": 1}, columns=["x", "y"]), TypeError, "a batch with 'y'; it has 'x'"),
        (drawn((1,), columns=["x"]), TypeError, "that are dicts"),
        (lambda: train.batches_from([]).seek({"index": 3}), ValueError, "a position of batches_f"),
    ],
)
def test_sources_and_batches_that_are_not_numbers_are_refused_with_their_path(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_unreachable_position_is_refused():
    batches = train.batches_from(flat())
    start = batches.position
    next(batches)
    with pytest.raises(ValueError, match="0 batches, but 1 were already taken from this chain, wh"):
        batches.seek(start)
    far = {**start, "num_drawn": 20}
    with pytest.raises(ValueError, match="after 20 batches, but the source ended after 12"):
        train.batches_from(flat()).seek(far)
    # A loader without a state accepts the position of a loader with a state.
    first = train.batches_from(OfHuggingFace())
    next(first)
    for source in (flat(), Loader()):
        again = train.batches_from(source)
        again.seek(first.position)
        np.testing.assert_array_equal(next(again), ARRAYS[0, 1])
    # A loader can start again.
    batches = train.batches_from(Loader(), epochs=2)
    start, first = batches.position, list(batches)
    batches.seek(start)
    np.testing.assert_array_equal(next(batches), first[0])
