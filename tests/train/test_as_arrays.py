"""Batches with arrays of other libraries are converted once, or refused with the path."""

import collections
import itertools

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from eqxlike import train
from tests.train.linear import make_state

X = np.random.default_rng(0).normal(size=(4, 8, 2)).astype(np.float32)


class Foreign:
    """An array of another library."""

    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return self.array


@pytest.fixture
def run():
    """A function that calls `fit` and returns its result and the number of traces of the loss."""
    optimiser, traced = optax.sgd(0.1), []

    def loss(model, batch, key):
        traced.append(batch)
        x = batch if isinstance(batch, jnp.ndarray) else batch["x"]
        return jnp.mean((x @ model.weight.T) ** 2)

    step = train.make_step(loss, optimiser)

    def run(batches, **options):
        traced.clear()
        result = train.fit(make_state(optimiser), step, batches, num_steps=4, **options)
        return result, len(traced)

    run.step, run.state = step, make_state(optimiser)
    return run


def test_arrays_of_any_library_are_converted_and_traced_once(run):
    expected, _ = run([{"x": x} for x in X])
    # The data differ between batches, and the flag does not.
    forms = [
        lambda i, x: x.tolist(),
        lambda i, x: {"x": x.tolist(), "labels": [i, True], "is_training": True, "by": "rows"},
        lambda i, x: {"x": Foreign(x), "scale": np.float32(i), "rest": [(x, i)]},
        lambda i, x: {"x": x, "scale": np.float32(i), "labels": list(x[0].astype("f2"))},
        lambda i, x: collections.UserDict(x=tuple(x.tolist()) and x.tolist(), y=[Foreign(x)]),
    ]
    for form, steps_per_call, ahead in itertools.product(forms, (1, 2), (False, True)):
        batches = [form(i, x) for i, x in enumerate(X)]
        batches = train.prefetch(batches) if ahead else batches
        found, num_traces = run(batches, steps_per_call=steps_per_call)
        assert num_traces <= (1 if steps_per_call == 1 else 2)
        np.testing.assert_allclose(found.history, expected.history, rtol=1e-6)
    data = train.minibatches({"x": X[0].tolist(), "y": Foreign(X[0])}, 8, seed=0)
    batch = next(data)
    assert batch["x"].shape == (8, 2)
    np.testing.assert_array_equal(batch["x"].astype("f4"), batch["y"])


def test_leaves_that_are_not_arrays_are_refused_with_their_path_or_warn(run):
    class Opaque:
        def __array__(self, dtype=None, copy=None):
            raise RuntimeError("it is elsewhere")

    rows = r"rows of equal length, but rows of batch\['x'\] differ"
    string = r"numbers, but batch\['y'\]\[0\] is the string 'a'"
    for batch, error, message in [
        ({"x": [[1.0, 2.0], [3.0]]}, ValueError, rows),
        ({"x": X[0], "y": ["a", "b"]}, TypeError, string),
        ({"x": [Opaque()]}, TypeError, r"batch\['x'\]\[0\] is a Opaque .* it is elsewhere"),
    ]:
        with pytest.raises(error, match=message):
            run([batch])
    numbered = [{"x": x, "index": i} for i, x in enumerate(X)]
    with pytest.warns(UserWarning, match=r"batch\['index'\] is 3 in this batch, not an array"):
        run(numbered)
    # A step that is called without `fit` cannot convert them.
    expected = "The step expected a batch of arrays, but batch"
    for batch, path in [
        ({"x": X[0].tolist()}, r"\['x'\] is a list"),
        ({"x": X[0], "y": ["a"]}, r"\['y'\] is a list"),
        ((Foreign(X[0]),), r"\[0\] is a Foreign"),
    ]:
        with pytest.raises(TypeError, match=expected + path):
            run.step(run.state, batch)
    for batches in (Foreign(X), (Foreign(X), Foreign(X[:, 0]))):
        with pytest.raises(TypeError, match="fit expected an iterable of batches, but got arrays"):
            run(batches)


def test_a_step_that_is_not_compiled_gets_batches_unchanged(run):
    seen = []

    def step(state, batch):
        seen.append(batch)
        return run.step(state, {"x": np.asarray(batch["x"], np.float32)})

    batches = [{"x": x.tolist(), "text": ["a"]} for x in X]
    train.fit(run.state, step, batches, num_steps=4)
    assert seen == batches


def test_repeat_needs_batches_that_can_be_iterated_again():
    assert list(itertools.islice(train.repeat(lambda: iter("ab")), 5)) == list("ababa")
    with pytest.raises(TypeError, match="list_iterator can be used only once"):
        train.repeat(iter([1]))
    with pytest.raises(ValueError, match="got none"):
        next(train.repeat([]))
    endless = train.minibatches(X[0], 4, seed=0)
    assert train.repeat(endless) is endless
