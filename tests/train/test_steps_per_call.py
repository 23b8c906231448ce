"""Several steps in a call give the same results as single steps."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqxlike as eqx
from eqxlike import nn, train
from eqxlike.train import _fit
from tests.nn.arrays import filled
from tests.train.linear import squared_error


def test_several_steps_in_a_call_equal_single_steps():
    """The training has a model state, dropout, a frozen layer and a loss scale."""
    keys = jax.random.split(jax.random.key(0))
    layers = [nn.Linear(3, 2, key=keys[0]), nn.Linear(2, "scalar", key=keys[1]), nn.Dropout(0.5)]

    def loss(model, state, batch, key):
        x, y = batch
        outputs = jax.vmap(lambda x, key: model(x, key=key))(x, jax.random.split(key, len(x)))
        value = jnp.mean((outputs - y) ** 2)
        return value, {"count": state["count"] + 1, "last": value}

    model = nn.freeze(nn.Sequential(layers), lambda model: model.layers[0])
    optimiser, loss_scale = optax.sgd(0.1, momentum=0.9), train.DynamicLossScale(2.0**15, period=3)
    model_state = {"count": jnp.zeros((), int), "last": jnp.ones(())}
    options = {"loss_scale": loss_scale, "model_state": model_state}
    state = train.TrainState.create(model, optimiser, key=jax.random.key(1), **options)
    step = train.make_step(loss, optimiser)
    expected = train.fit(state, step, batches(), num_steps=11)
    on_device = (jax.tree.map(jnp.asarray, batch) for batch in batches())
    result = train.fit(state, step, on_device, num_steps=11, steps_per_call=4)
    assert_same(result, expected)
    assert (int(result.state.step), result.steps_per_call) == (11, 4)


def batches(length=8, *, bad_at=None):
    random = np.random.default_rng(0)
    for number in itertools.count(1):
        x = random.normal(size=(length, 3)).astype(np.float32)
        yield (x * np.nan if number == bad_at else x), x.sum(axis=1)


def assert_same(result, expected):
    assert (result.stopped, result.message) == (expected.stopped, expected.message)
    np.testing.assert_allclose(result.history, expected.history, rtol=1e-5)
    assert eqx.tree_equal(result.state, expected.state, rtol=1e-5, atol=1e-6)


# --- the loop ---


@pytest.fixture(scope="module")
def simple():
    optimiser = optax.sgd(0.1)
    model = filled(nn.Linear, 3, "scalar", key=jax.random.key(0))
    state = train.TrainState.create(model, optimiser, key=jax.random.key(1))
    return state, train.make_step(squared_error, optimiser)


def test_several_steps_in_a_call_end_a_run_early_like_single_steps(simple):
    def of_several_shapes():
        return (next(batches(size)) for size in [8, 8, 4, 8, 8, 8, 4, 4, 8])

    sources = [lambda bad_at=bad_at: batches(bad_at=bad_at) for bad_at in (1, 4, 6, 11)]
    sources += [lambda: itertools.islice(batches(), 6), of_several_shapes]
    for source in sources:
        runs = (train.fit(*simple, source(), num_steps=11, steps_per_call=n) for n in (4, 1))
        assert_same(*runs)
    # The steps do not check their loss.
    step = train.make_step(squared_error, optax.sgd(0.1), check_finite=False)
    run = functools.partial(train.fit, simple[0], step, num_steps=11)
    single, many = (run(batches(bad_at=6), steps_per_call=n) for n in (1, 4))
    assert (many.stopped, many.message) == (single.stopped, single.message)
    np.testing.assert_allclose(many.history, single.history, rtol=1e-5)


def test_callbacks_and_evaluations_are_not_delayed_to_the_end_of_a_call(simple):
    moments = []

    class Recorder(train.Callback):
        every = 3

        def on_evaluate(self, run):
            moments.append(("evaluate", run.steps, run.metrics["at"]))

        def on_step(self, run):
            moments.append(("step", run.steps, run.state.step.item()))

    evaluate = {"evaluate": lambda state: {"at": state.step}, "evaluate_every": 6}
    log = {"on_log": lambda number, loss: moments.append(("log", number, loss)), "log_every": 5}
    options = {**evaluate, **log, "callbacks": [Recorder()]}
    result = train.fit(*simple, batches(), num_steps=13, steps_per_call=4, **options)
    assert [(name, steps) for name, steps, _ in moments] == [
        *[("step", 3), ("log", 5), ("evaluate", 6), ("step", 6), ("step", 9), ("log", 10)],
        *[("evaluate", 12), ("step", 12), ("evaluate", 13), ("log", 13)],
    ]
    assert all(steps == at for name, steps, at in moments if name != "log")
    logged = [loss for name, _, loss in moments if name == "log"]
    parts = (slice(0, 5), slice(5, 10), slice(10, 13))
    expected = [np.mean(result.history[part]) for part in parts]
    np.testing.assert_allclose(logged, expected, rtol=1e-6)


def test_ctrl_c_ends_the_run_after_steps_on_all_drawn_batches(simple, ctrl_c):
    def interrupted():
        for index, batch in enumerate(batches(), start=1):
            if index == 6:
                ctrl_c()
            yield batch

    def raising():
        yield from itertools.islice(batches(), 6)
        raise KeyboardInterrupt

    for source, made in ((interrupted, 8), (raising, 6)):
        result = train.fit(*simple, source(), num_steps=20, steps_per_call=4)
        expected = train.fit(*simple, batches(), num_steps=made)
        assert (result.stopped, result.exit_status) == ("interrupted", 130)
        assert result.message == f"Interrupted after {made} of 20 steps."
        assert eqx.tree_equal(result.state, expected.state, rtol=1e-5, atol=1e-6)


def test_each_drawn_batch_is_used_in_a_step(simple):
    source = train.minibatches((np.ones((16, 3), np.float32), np.ones(16, np.float32)), 4, seed=0)
    train.fit(*simple, source, num_steps=6, steps_per_call=4)
    assert (source.position["epoch"], source.position["index"]) == (1, 2)

    class Epochs:
        """An iterator that starts again after its end."""

        def __init__(self):
            self.ends = itertools.cycle([False] * 3 + [True])

        def __iter__(self):
            return self

        def __next__(self):
            if next(self.ends):
                raise StopIteration
            return next(batches())

    assert len(train.fit(*simple, Epochs(), num_steps=9, steps_per_call=2).history) == 3


def test_one_program_is_used_for_any_number_of_steps(simple):
    traces = []

    def loss(model, batch, key):
        traces.append(batch)
        return squared_error(model, batch, key)

    step = train.make_step(loss, optax.sgd(0.1))
    for num_steps in (4, 7, 9):
        train.fit(simple[0], step, batches(), num_steps=num_steps, steps_per_call=4)
    assert len(traces) == 1


@pytest.mark.parametrize(("ticks_of_many", "chosen"), [(1, 16), (99, 1)])
def test_auto_measures_both_and_reports_its_choice(simple, monkeypatch, ticks_of_many, chosen):
    def run(num_steps):
        return train.fit(*simple, batches(), num_steps=num_steps, steps_per_call="auto")

    assert "too short to measure" in run(30).message
    # A call takes one tick. From the twenty-second call on, it takes `ticks_of_many` ticks.
    durations = itertools.chain([1.0] * 42, itertools.cycle([1.0, float(ticks_of_many)]))
    monkeypatch.setattr(_fit.time, "perf_counter", itertools.accumulate(durations).__next__)
    result = run(100)
    assert result.steps_per_call == chosen
    assert result.message == (
        f"Made 100 of 100 steps. Chose steps_per_call={chosen}: a step took 1000000.0 us in calls "
        f"of one, and {1e6 * ticks_of_many / 16:.1f} us in calls of 16."
    )
    expected = train.fit(*simple, batches(), num_steps=100).history
    np.testing.assert_allclose(result.history, expected, rtol=1e-4, atol=1e-9)


# --- the right program for each batch and step ---


def stepped(measured):
    """A step that changes nothing and returns `measured(batch)` as its loss."""
    state = train.TrainState.create(jnp.zeros(()), optax.sgd(0.1), key=jax.random.key(1))

    def step(state, batch):
        return eqx.tree_at(lambda state: state.step, state, state.step + 1), measured(batch)

    return state, eqx.filter_jit(step)


def into_one_array():
    buffer = np.zeros(3, np.float32)
    for number in range(7):
        buffer[...] = number
        # The fourth batch has another shape and starts a new call.
        yield buffer[: 2 if number == 3 else 3]


class Batch(eqx.Module):
    x: np.ndarray
    power: float = eqx.field(static=True)


def by_type(value):
    return {int: 0.0, bool: 1.0, float: 2.0}[type(value)]


X = np.ones(3, np.float32)


def with_x(values):
    return lambda: ((X, value) for value in values)


ONE_TYPES = (1, True, 1.0, 1.0)
WEAK = (jnp.asarray(1.0, dtype) for dtype in (None, jnp.float32, None))
SOURCES = {
    "one array for all": (into_one_array, jnp.max, range(7)),
    "numbers of NumPy": (with_x(map(np.float32, range(7))), lambda b: b[1], range(7)),
    "zeros of both signs": (
        with_x((0.0, -0.0) * 3),
        lambda b: jnp.float32(np.signbit(b[1])),
        [0, 1] * 3,
    ),
    "static fields that are equal": (
        lambda: (Batch(X, power) for power in ONE_TYPES),
        lambda b: jnp.float32(by_type(b.power)),
        [0, 1, 2, 2],
    ),
    "keys of a dict that are equal": (
        lambda: ({key: X} for key in ONE_TYPES),
        lambda b: jnp.float32(by_type(*b)),
        [0, 1, 2, 2],
    ),
    "weak types": (lambda: WEAK, lambda b: jnp.float32(b.weak_type), [1, 0, 1]),
}


@pytest.mark.parametrize("name", SOURCES)
def test_each_step_gets_its_own_batch(name):
    source, measured, expected = SOURCES[name]
    result = train.fit(*stepped(measured), source(), num_steps=7, steps_per_call=3)
    assert result.history == tuple(expected)


@pytest.mark.parametrize("steps_per_call", [1, 2])
def test_a_run_has_the_program_of_its_own_model_and_step(simple, steps_per_call):
    class Model(eqx.Module):
        weight: jax.Array
        power: float = eqx.field(static=True)

    def loss(model, batch, key):
        return model.weight * 0 + by_type(model.power)

    def fit(state, step):
        return train.fit(state, step, [X] * 2, num_steps=2, steps_per_call=steps_per_call)

    # Static fields that are equal but of different types.
    step = train.make_step(loss, optax.sgd(0.1))
    for power in (1, True, 1.0):
        model = Model(jnp.ones(()), power)
        result = fit(train.TrainState.create(model, optax.sgd(0.1), key=jax.random.key(1)), step)
        assert result.history == (by_type(power),) * 2
        assert type(result.state.model.power) is type(power)

    class Step(eqx.Module):
        target: np.ndarray

        def __call__(self, state, batch):
            new = eqx.tree_at(lambda state: state.step, state, state.step + 1)
            return new, jnp.mean(batch) * 0 + self.target

    # Steps use the current values of their arrays, and of arrays that a plain function reads.
    number = np.zeros((), np.float32)
    for step in (eqx.filter_jit(Step(number)), lambda *args: Step(jnp.asarray(number))(*args)):
        for value in (1.0, 2.0):
            number[...] = value
            assert fit(simple[0], step).history == (value, value)


# --- errors ---


def test_a_step_that_changes_more_than_the_values_of_arrays_is_refused():
    def start(model_state):
        options = {"key": jax.random.key(1), "model_state": model_state}
        return train.TrainState.create(jnp.zeros(()), optax.sgd(0.1), **options)

    def changing(new):
        def step(state, batch):
            new_state = new(state.model_state)
            return eqx.tree_at(lambda s: s.model_state, state, new_state), jnp.zeros(())

        return step

    grown = r"state\.model_state is an array of shape \(1,\) .* \(2,\) .* Pass `steps_per_call=1`"
    for before, new, message in [
        ("before", lambda _: "after", "may change only the arrays of a state: .* 'after'"),
        (jnp.zeros(1), lambda old: jnp.zeros(len(old) + 1), grown),
    ]:
        with pytest.raises(TypeError, match=message):
            train.fit(start(before), changing(new), batches(), num_steps=3, steps_per_call=2)
    # With single steps it is accepted.
    step = eqx.filter_jit(changing(lambda old: old + "!"))
    assert train.fit(start("a"), step, batches(), num_steps=2).state.model_state == "a!!"


def test_masks_and_other_numbers_of_steps_are_refused(simple):
    x, y = next(batches())
    with pytest.raises(ValueError, match="masked arrays are not supported"):
        train.fit(*simple, [(np.ma.masked_array(x), y)] * 4, num_steps=4, steps_per_call=4)
    for value in (0, 1.5, "all", True, None):
        with pytest.raises(ValueError, match="steps_per_call must be an integer of at least 1"):
            train.fit(*simple, batches(), num_steps=3, steps_per_call=value)
