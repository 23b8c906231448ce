"""Many steps in one call are what single steps are."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqxlike as eqx
from eqxlike import nn, train
from eqxlike.train._loop import _pace


def squared_error(model, batch, key):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def plain(key):
    return nn.Linear(3, "scalar", key=key), None, squared_error


def with_dropout(key):
    model = nn.Sequential([nn.Linear(3, "scalar", key=key), nn.Dropout(0.5)])

    def loss(model, batch, key):
        x, y = batch
        outputs = jax.vmap(lambda x, key: model(x, key=key))(x, jax.random.split(key, len(x)))
        return jnp.mean((outputs - y) ** 2)

    return model, None, loss


def with_batch_norm(key):
    def make(key):
        layers = [nn.Linear(3, 2, key=key), nn.BatchNorm(2, "batch", mode="batch")]
        return nn.Sequential([*layers, nn.Lambda(jnp.sum)])

    def loss(model, state, batch, key):
        x, y = batch
        in_batch = jax.vmap(model, in_axes=(0, None), out_axes=(0, None), axis_name="batch")
        outputs, state = in_batch(x, state)
        return jnp.mean((outputs - y) ** 2), state

    return *nn.make_with_state(make)(key), loss


def with_a_frozen_layer(key):
    keys = jax.random.split(key)
    model = nn.Sequential([nn.Linear(3, 2, key=keys[0]), nn.Linear(2, "scalar", key=keys[1])])
    return nn.freeze(model, lambda model: model.layers[0]), None, squared_error


CASES = {
    "plain": (plain, optax.adam(0.1), None),
    "dropout": (with_dropout, optax.adam(0.1), None),
    "state": (with_batch_norm, optax.sgd(0.1), None),
    "frozen": (with_a_frozen_layer, optax.adam(0.1), None),
    "schedule": (plain, optax.sgd(optax.cosine_decay_schedule(0.1, 20)), None),
    "loss scale": (
        plain,
        optax.sgd(0.01),
        train.DynamicLossScale(2.0**126, period=3, maximum=2.0**126),
    ),
}


@pytest.fixture(scope="module", params=CASES)
def case(request):
    """A state, and its step."""
    make, optimiser, loss_scale = CASES[request.param]
    model, model_state, loss = make(jax.random.key(0))
    state = train.TrainState.create(
        model, optimiser, key=jax.random.key(1), loss_scale=loss_scale, model_state=model_state
    )
    return state, train.make_step(loss, optimiser)


def batches(length=8, *, bad_at=None):
    random = np.random.default_rng(0)
    for number in itertools.count(1):
        x = random.normal(size=(length, 3)).astype(np.float32)
        yield (x * np.nan if number == bad_at else x), x.sum(axis=1)


def on_device(source):
    return (jax.tree.map(jnp.asarray, batch) for batch in source)


def assert_same(result, expected):
    assert (result.stopped, result.message) == (expected.stopped, expected.message)
    np.testing.assert_allclose(result.history, expected.history, rtol=1e-5)
    assert eqx.tree_equal(result.state, expected.state, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("places", [iter, on_device])
def test_state_after_many_is_that_after_single_ones(case, places):
    state, step = case
    expected = train.fit(state, step, batches(), num_steps=11)
    result = train.fit(state, step, places(batches()), num_steps=11, steps_per_call=4)
    assert_same(result, expected)
    assert int(result.state.step) == 11
    assert result.steps_per_call == 4


@pytest.fixture(scope="module")
def simple():
    optimiser = optax.sgd(0.1)
    model, _, loss = plain(jax.random.key(0))
    state = train.TrainState.create(model, optimiser, key=jax.random.key(1))
    return state, train.make_step(loss, optimiser)


@pytest.mark.parametrize("bad_at", [1, 4, 6, 11])
def test_a_halted_step_in_the_middle(simple, bad_at):
    runs = (
        train.fit(*simple, batches(bad_at=bad_at), num_steps=11, steps_per_call=each)
        for each in (4, 1)
    )
    assert_same(*runs)


def test_a_loss_that_is_not_finite_where_steps_do_not_look(simple):
    state, _ = simple
    step = train.make_step(squared_error, optax.sgd(0.1), check_finite=False)
    single, many = (
        train.fit(state, step, batches(bad_at=6), num_steps=11, steps_per_call=each)
        for each in (1, 4)
    )
    assert (many.stopped, many.message) == (single.stopped, single.message)
    np.testing.assert_allclose(many.history, single.history, rtol=1e-5)


def test_batches_that_end(simple):
    runs = (
        train.fit(*simple, itertools.islice(batches(), 6), num_steps=11, steps_per_call=each)
        for each in (4, 1)
    )
    assert_same(*runs)


def test_batches_of_other_shapes_are_in_calls_of_their_own(simple):
    def source():
        sizes = [8, 8, 4, 8, 8, 8, 4, 4, 8]
        return (next(batches(size)) for size in sizes)

    runs = (train.fit(*simple, source(), num_steps=9, steps_per_call=each) for each in (4, 1))
    assert_same(*runs)


class Recorder(train.Callback):
    every = 3

    def __init__(self):
        self.moments = []

    def on_log(self, run):
        self.moments.append(("log", run.steps, run.loss, run.state.step.item()))

    def on_evaluate(self, run):
        self.moments.append(("evaluate", run.steps, run.metrics["at"], run.state.step.item()))

    def on_step(self, run):
        self.moments.append(("step", run.steps, 0.0, run.state.step.item()))


def test_what_is_due_in_the_middle_is_not_late(simple):
    moments = []
    for steps_per_call in (1, 4):
        recorder = Recorder()
        train.fit(
            *simple,
            batches(),
            num_steps=13,
            steps_per_call=steps_per_call,
            evaluate=lambda state: {"at": state.step},
            evaluate_every=6,
            log_every=5,
            callbacks=[recorder],
        )
        moments.append(recorder.moments)
    single, many = moments
    assert [(name, steps) for name, steps, *_ in many] == [
        *[("step", 3), ("log", 5), ("evaluate", 6), ("step", 6), ("step", 9), ("log", 10)],
        *[("evaluate", 12), ("step", 12), ("log", 13), ("evaluate", 13)],
    ]
    assert all(steps == of_state for _, steps, _, of_state in many)
    for one, other in zip(single, many, strict=True):
        assert one[:2] == other[:2]
        np.testing.assert_allclose(one[2], other[2], rtol=1e-5)


def interrupted_at(number, ctrl_c):
    for index, batch in enumerate(batches(), start=1):
        if index == number:
            ctrl_c()
        yield batch


def test_ctrl_c_ends_after_the_call_with_all_that_was_taken(simple, ctrl_c):
    result = train.fit(*simple, interrupted_at(6, ctrl_c), num_steps=20, steps_per_call=4)
    expected = train.fit(*simple, batches(), num_steps=8)
    assert (result.stopped, result.exit_status) == ("interrupted", 130)
    assert result.message == "Interrupted after 8 of 20 steps."
    assert eqx.tree_equal(result.state, expected.state, rtol=1e-5, atol=1e-6)


def test_batches_that_raise_keyboard_interrupt_lose_none_that_they_gave(simple):
    def source():
        yield from itertools.islice(batches(), 6)
        raise KeyboardInterrupt

    result = train.fit(*simple, source(), num_steps=20, steps_per_call=4)
    assert (result.stopped, len(result.history)) == ("interrupted", 6)


def stepped(measured):
    """A step that changes nothing, and what it measures of a batch as its loss."""
    state = train.TrainState.create(jnp.zeros(()), optax.sgd(0.1), key=jax.random.key(1))

    def step(state, batch):
        return eqx.tree_at(lambda state: state.step, state, state.step + 1), measured(batch)

    return state, eqx.filter_jit(step)


def into_one_array():
    buffer = np.zeros(3, np.float32)
    for number in range(7):
        buffer[...] = number
        # Another shape at the fourth: it waits for the next call.
        yield buffer[: 2 if number == 3 else 3]


class Batch(eqx.Module):
    x: np.ndarray
    power: float = eqx.field(static=True)


def by_type(value):
    return {int: 0.0, bool: 1.0, float: 2.0}[type(value)]


X = np.ones(3, np.float32)
SOURCES = {
    "one array for all": (into_one_array, jnp.max),
    "numbers of NumPy": (lambda: ((X, np.float32(number)) for number in range(7)), lambda b: b[1]),
    "zeros of both signs": (
        lambda: ((X, zero) for zero in (0.0, -0.0) * 3),
        lambda b: jnp.float32(np.signbit(b[1])),
    ),
    "static fields that are equal": (
        lambda: (Batch(X, power) for power in (1, True, 1.0, 1.0)),
        lambda b: jnp.float32(by_type(b.power)),
    ),
    "keys of a dict that are equal": (
        lambda: ({key: X} for key in (1, True, 1.0, 1.0)),
        lambda b: jnp.float32(by_type(*b)),
    ),
    "weak types": (
        lambda: (jnp.asarray(1.0, dtype) for dtype in (None, jnp.float32, None)),
        lambda b: jnp.float32(b.weak_type),
    ),
    "keys of two kinds": (
        lambda: (jax.random.key(0, impl=impl) for impl in ("rbg", "threefry2x32") * 2),
        lambda b: jax.random.key_data(b).size * jnp.ones(()),
    ),
}


@pytest.mark.parametrize("name", SOURCES)
def test_each_step_gets_its_own_batch(name):
    source, measured = SOURCES[name]
    single, many = (
        train.fit(*stepped(measured), source(), num_steps=7, steps_per_call=each).history
        for each in (1, 3)
    )
    assert many == single
    assert len(set(single)) > 1


def test_masks_are_not_lost(simple):
    x, y = next(batches())
    with pytest.raises(ValueError, match="masked arrays are not supported"):
        train.fit(*simple, [(np.ma.masked_array(x), y)] * 4, num_steps=4, steps_per_call=4)


def test_an_iterator_that_has_ended_is_not_asked_again(simple):
    class Epochs:
        def __init__(self):
            self.made = 0

        def __iter__(self):
            return self

        def __next__(self):
            self.made += 1
            if self.made % 4 == 0:
                raise StopIteration
            return next(batches())

    assert len(train.fit(*simple, Epochs(), num_steps=9, steps_per_call=2).history) == 3


def test_no_batch_is_taken_that_no_step_is_made_on(simple):
    source = train.minibatches((np.ones((16, 3), np.float32), np.ones(16, np.float32)), 4, seed=0)
    train.fit(*simple, source, num_steps=6, steps_per_call=4)
    assert (source.position["epoch"], source.position["index"]) == (1, 2)


def test_one_program_serves_for_any_number_of_steps(simple):
    state, _ = simple
    traces = []

    def loss(model, batch, key):
        traces.append(batch)
        return squared_error(model, batch, key)

    step = train.make_step(loss, optax.sgd(0.1))
    for num_steps in (4, 7, 9):
        train.fit(state, step, batches(), num_steps=num_steps, steps_per_call=4)
    assert len(traces) == 1


def test_auto_measures_both_and_says_what_it_chose(simple, monkeypatch):
    def run(num_steps):
        return train.fit(*simple, batches(), num_steps=num_steps, steps_per_call="auto")

    assert "too short to measure" in run(30).message
    ticks = itertools.count()
    monkeypatch.setattr(_pace.time, "perf_counter", lambda: float(next(ticks)))
    # A call takes one tick whatever it does.
    result = run(100)
    assert result.steps_per_call == 16
    assert result.message == (
        "Made 100 of 100 steps. Chose 16 a call: a step took 1000000.0 us by itself, and 62500.0 "
        "us among 16."
    )
    np.testing.assert_allclose(
        *(result.history, train.fit(*simple, batches(), num_steps=100).history),
        rtol=1e-4,
        atol=1e-9,
    )


@pytest.mark.parametrize("value", [0, -1, 1.5, "all", True, None])
def test_other_numbers_are_refused(simple, value):
    with pytest.raises(ValueError, match="steps_per_call must be an integer of at least 1"):
        train.fit(*simple, batches(), num_steps=3, steps_per_call=value)


def test_a_step_that_changes_more_than_arrays_is_refused():
    model = nn.Linear(3, "scalar", key=jax.random.key(0))
    state = train.TrainState.create(
        model, optax.sgd(0.1), key=jax.random.key(1), model_state="before"
    )

    def changing(state, batch):
        return eqx.tree_at(lambda state: state.model_state, state, "after"), jnp.mean(batch[0])

    with pytest.raises(TypeError, match="can change the arrays of a state only"):
        train.fit(state, changing, batches(), num_steps=3, steps_per_call=2)


def test_a_step_that_changes_the_shape_of_an_array_is_refused_with_its_path():
    state = train.TrainState.create(
        jnp.zeros(()), optax.sgd(0.1), key=jax.random.key(1), model_state=jnp.zeros(1)
    )

    def growing(state, batch):
        grown = jnp.zeros(len(state.model_state) + 1)
        return eqx.tree_at(lambda state: state.model_state, state, grown), jnp.zeros(())

    message = r"state\.model_state is an array of shape \(1,\) .* \(2,\) .* Give `steps_per_call=1`"
    with pytest.raises(TypeError, match=message):
        train.fit(state, growing, batches(), num_steps=3, steps_per_call=2)


@pytest.mark.parametrize("steps_per_call", [1, 2])
@pytest.mark.parametrize("compiled", [eqx.filter_jit, lambda step: step])
def test_a_loss_that_is_no_number_is_refused(simple, compiled, steps_per_call):
    state, step = simple

    def of_two(state, batch):
        state, loss = step(state, batch)
        return state, jnp.stack([loss, loss])

    with pytest.raises(TypeError, match=r"a real loss of shape \(\); got float32 of shape \(2,\)"):
        train.fit(state, compiled(of_two), batches(), num_steps=3, steps_per_call=steps_per_call)


@pytest.mark.parametrize("steps_per_call", [1, 2])
def test_models_whose_static_fields_are_equal_have_programs_of_their_own(steps_per_call):
    class Model(eqx.Module):
        weight: jax.Array
        power: float = eqx.field(static=True)

    def loss(model, batch, key):
        return model.weight * 0 + by_type(model.power)

    step = train.make_step(loss, optax.sgd(0.1))
    for power in (1, True, 1.0):
        state = train.TrainState.create(
            Model(jnp.ones(()), power), optax.sgd(0.1), key=jax.random.key(1)
        )
        result = train.fit(state, step, [X] * 2, num_steps=2, steps_per_call=steps_per_call)
        assert result.history == (by_type(power),) * 2
        assert type(result.state.model.power) is type(power)


@pytest.mark.parametrize("steps_per_call", [1, 2])
def test_what_a_plain_step_reads_is_that_of_the_run(steps_per_call):
    state, _ = stepped(jnp.mean)
    number = np.zeros((), np.float32)

    def step(state, batch):
        return eqx.tree_at(lambda state: state.step, state, state.step + 1), jnp.asarray(number)

    for value in (1.0, 2.0):
        number[...] = value
        result = train.fit(state, step, [X] * 2, num_steps=2, steps_per_call=steps_per_call)
        assert result.history == (value, value)


@pytest.mark.parametrize("steps_per_call", [1, 2])
def test_arrays_of_the_step_itself_are_those_of_now(simple, steps_per_call):
    state, _ = simple
    target = np.zeros((), np.float32)

    class Step(eqx.Module):
        target: np.ndarray

        def __call__(self, state, batch):
            new = eqx.tree_at(lambda state: state.step, state, state.step + 1)
            return new, jnp.mean(batch[0]) * 0 + self.target

    step = eqx.filter_jit(Step(target))
    for value in (1.0, 2.0):
        target[...] = value
        result = train.fit(state, step, batches(), num_steps=2, steps_per_call=steps_per_call)
        assert result.history == (value, value)
