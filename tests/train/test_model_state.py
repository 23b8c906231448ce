"""Training a model with state."""

import io

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqxlike as eqx
from eqxlike import nn, train


def make_model(key):
    return nn.Sequential(
        [nn.Linear(3, 2, key=key), nn.BatchNorm(2, "batch", mode="batch"), nn.Lambda(jnp.sum)]
    )


def squares(model, state, batch, key):
    out, state = jax.vmap(model, in_axes=(0, None), out_axes=(0, None), axis_name="batch")(
        batch, state
    )
    return jnp.mean((out - 1) ** 2), state


OPTIMISER = optax.sgd(0.1)


@pytest.fixture(scope="module")
def step():
    return train.make_step(squares, OPTIMISER)


@pytest.fixture
def batch(getkey):
    return jax.random.normal(getkey(), (8, 3))


def start(getkey, **options):
    model, state = nn.make_with_state(make_model)(getkey())
    return train.TrainState.create(model, OPTIMISER, key=getkey(), model_state=state, **options)


def copied(state):
    return jax.tree.map(lambda leaf: jnp.copy(leaf) if eqx.is_array(leaf) else leaf, state)


def statistics(state):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state.model_state)]


def test_steps_are_those_of_a_loop_by_hand(step, batch, getkey):
    state = start(getkey)
    model, model_state = copied((state.model, state.model_state))
    for _ in range(3):
        state, loss = step(state, batch)
        (expected, model_state), gradient = eqx.filter_value_and_grad(squares, has_aux=True)(
            model, model_state, batch, None
        )
        model = eqx.apply_updates(model, jax.tree.map(lambda leaf: -0.1 * leaf, gradient))
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert state.model_state.get(state.model[1].batch_counter) == 3
    for one, other in zip(statistics(state), jax.tree.leaves(model_state), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_fit_carries_the_state_and_leaves_the_first_one_usable(step, batch, getkey):
    first = start(getkey)
    result = train.fit(first, step, [batch] * 3, num_steps=3)
    assert result.state.model_state.get(first.model[1].batch_counter) == 3
    assert first.model_state.get(first.model[1].batch_counter) == 0


def test_state_that_the_train_state_was_made_from_stays_usable(step, batch, getkey):
    model, model_state = nn.make_with_state(make_model)(getkey())
    state = train.TrainState.create(model, OPTIMISER, key=getkey(), model_state=model_state)
    step(state, batch)
    assert model_state.get(model[1].batch_counter) == 0


def test_refused_update_leaves_the_statistics_of_the_last_good_one(step, batch, getkey):
    state, _ = step(start(getkey), batch)
    before = statistics(state)
    state, _ = step(state, jnp.full_like(batch, jnp.nan))
    assert state.is_halted
    for one, other in zip(statistics(state), before, strict=True):
        np.testing.assert_array_equal(one, other)


def test_statistics_that_are_not_finite_halt_though_the_loss_is(getkey):
    class Remember(nn.StatefulLayer):
        weight: jax.Array
        index: nn.StateIndex

        def __init__(self):
            self.weight = jnp.ones(())
            self.index = nn.StateIndex(jnp.zeros(()))

        def __call__(self, x, state, *, key=None):
            return self.weight, state.set(self.index, x)

    model, model_state = nn.make_with_state(Remember)()
    state = train.TrainState.create(model, OPTIMISER, key=getkey(), model_state=model_state)
    step = train.make_step(lambda model, state, x, key: model(x, state), OPTIMISER)
    state, loss = step(state, jnp.array(jnp.inf))
    assert state.is_halted
    assert loss == 1
    assert state.model_state.get(model.index) == 0


def test_skipped_update_leaves_the_statistics(batch, getkey):
    # The gradient of the root at 0 is not finite, whatever the scale.
    def loss(model, state, batch, key):
        value, state = squares(model, state, batch, key)
        return jnp.sqrt(0 * value), state

    state = start(getkey, loss_scale=train.DynamicLossScale())
    before = statistics(state)
    state, _ = train.make_step(loss, OPTIMISER)(state, batch)
    assert not state.is_halted
    assert state.loss_scale.scale == 2.0**14
    for one, other in zip(statistics(state), before, strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_comes_beside_comes_after_the_state(batch, getkey):
    def loss(model, state, batch, key):
        value, state = squares(model, state, batch, key)
        return value, (state, "beside")

    state, _, aux = train.make_step(loss, OPTIMISER, has_aux=True)(start(getkey), batch)
    assert aux == "beside"
    assert state.model_state.get(state.model[1].batch_counter) == 1


def test_steps_are_one_trace(batch, getkey):
    traces = []

    def loss(*arguments):
        traces.append(None)
        return squares(*arguments)

    step, state = train.make_step(loss, OPTIMISER), start(getkey)
    for _ in range(3):
        state, _ = step(state, batch)
    assert len(traces) == 1


def test_is_saved_and_loaded_with_the_train_state(step, batch, getkey):
    fresh = start(getkey)
    state, _ = step(copied(fresh), batch)
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, state)
    file.seek(0)
    assert eqx.tree_equal(eqx.tree_deserialise_leaves(file, fresh), state)


def other_state(model, state, batch, key):
    return squares(model, state, batch, key)[0], nn.State(())


@pytest.mark.parametrize(
    ("loss", "has_aux", "message"),
    [
        (lambda *args: squares(*args)[0], False, r"to return \(loss, model_state\), got f32\[\]"),
        (squares, True, r"to return \(loss, \(model_state, aux\)\), got \("),
        (
            other_state,
            False,
            r"(?s)of the form that it got, State.*Sequential.*; got State\(\): the old",
        ),
    ],
)
def test_loss_that_returns_something_else_is_refused(loss, has_aux, message, batch, getkey):
    step = train.make_step(loss, OPTIMISER, has_aux=has_aux)
    with pytest.raises(TypeError, match=message):
        step(start(getkey), batch)


@pytest.mark.parametrize(
    ("old", "new", "shown"),
    [
        (1, True, ("1", "True")),
        (1.0, 1, ("1.0", "1")),
        (lambda: 0, lambda: 0, ("<function .*", "<function .*")),
        (
            jnp.ones(2),
            jnp.ones(3),
            (r"an array of shape \(2,\) .*", r"an array of shape \(3,\) .*"),
        ),
        (jnp.ones(2), jnp.ones(2, int), ("an array .* dtype float32", "an array .* dtype int32")),
        (jnp.ones(2), [jnp.ones(2)], ("an array .*", "a list of length 1")),
    ],
    ids=["bool", "int", "function", "shape", "dtype", "node"],
)
def test_model_state_is_compared_by_what_it_is_and_not_by_how_it_prints(old, new, shown, getkey):
    def loss(model, model_state, batch, key):
        return jnp.sum(model.weight), {"a": jnp.ones(2), "b": new}

    model, model_state = nn.Linear(2, 1, key=getkey()), {"a": jnp.zeros(2), "b": old}
    state = train.TrainState.create(model, OPTIMISER, key=getkey(), model_state=model_state)
    before, after = (rf"the {each} model_state\['b'\] is " for each in ("old", "new"))
    with pytest.raises(TypeError, match=f": {before}{shown[0]}, and {after}{shown[1]}\\."):
        train.make_step(loss, OPTIMISER)(state, None)


def test_model_state_may_come_back_as_numpy_arrays(getkey):
    def loss(model, model_state, batch, key):
        return jnp.sum(model.weight), {"a": np.ones(2, np.float32)}

    state = train.TrainState.create(
        nn.Linear(2, 1, key=getkey()), OPTIMISER, key=getkey(), model_state={"a": jnp.zeros(2)}
    )
    state, _ = train.make_step(loss, OPTIMISER)(state, None)
    assert state.model_state["a"].tolist() == [1, 1]
