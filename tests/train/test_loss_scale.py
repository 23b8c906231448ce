import io

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqxlike as eqx
from eqxlike import nn, train

FLOAT16 = "params=float32,compute=float16,output=float32"


def snapshot(state):
    """A state that survives donation."""
    return jax.tree.map(lambda leaf: jnp.copy(leaf) if eqx.is_array(leaf) else leaf, state)


def squared_error(model, batch, key):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def root_of_squares(model, batch, key):
    """Of a finite loss and gradients that are not, at 0."""
    return jnp.sqrt(jnp.sum((model.weight * batch) ** 2))


@pytest.fixture
def batch(getkey):
    x = jax.random.normal(getkey(), (8, 3))
    return x, jnp.sum(x, 1) + 1


def start(model, optimiser, getkey, *args, **options):
    loss_scale = train.DynamicLossScale(*args, **options)
    return train.TrainState.create(model, optimiser, key=getkey(), loss_scale=loss_scale)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_loss_is_scaled_in_at_least_float32(dtype):
    scaled = train.DynamicLossScale(2.0**15).scale_loss(jnp.array(3, dtype))
    assert scaled.dtype == jnp.float32
    assert scaled == 3 * 2**15


def test_gradients_are_unscaled_exactly(getkey):
    loss_scale = train.DynamicLossScale(2.0**10)
    exact = jax.random.normal(getkey(), (100,))
    gradients = {
        "float32": exact * 2**10,
        "float16": jnp.array([2.0**10, 2.0**-14, jnp.inf], jnp.float16),
        "complex": jnp.array([2**10 + 2**9 * 1j]),
        "none": None,
        "integer": jnp.arange(2),
    }
    unscaled = loss_scale.unscale(gradients)
    assert eqx.tree_equal(unscaled["float32"], exact)
    assert eqx.tree_equal(unscaled["float16"], jnp.array([1, 2.0**-24, jnp.inf], jnp.float16))
    assert unscaled["complex"] == 1 + 0.5j
    assert unscaled["none"] is None
    assert eqx.tree_equal(unscaled["integer"], jnp.arange(2))


def test_scale_falls_at_each_overflow_and_grows_after_a_period_without():
    period, factor, minimum, maximum = 3, 4.0, 1.0, 64.0
    are_finite = np.random.default_rng(0).random(200) < 0.7
    scale, num_good, expected = 16.0, 0, []
    for is_finite in are_finite:
        num_good = num_good + 1 if is_finite else 0
        if not is_finite:
            scale = max(scale / factor, minimum)
        elif num_good == period:
            scale, num_good = min(scale * factor, maximum), 0
        expected.append(scale)
    loss_scale = train.DynamicLossScale(
        16, period=period, factor=factor, minimum=minimum, maximum=maximum
    )

    def adjust(loss_scale, is_finite):
        adjusted = loss_scale.adjust(is_finite)
        return adjusted, adjusted.scale

    _, scales = jax.lax.scan(adjust, loss_scale, are_finite)
    np.testing.assert_array_equal(scales, expected)
    assert set(expected) == {1, 4, 16, 64}


def test_gradients_that_underflow_train_with_it(batch, getkey):
    # In float16 the gradients, of 1e-9, are 0.
    def loss(model, batch, key):
        return 1e-9 * squared_error(model, batch, key)

    model, optimiser = nn.Linear(3, "scalar", key=getkey()), optax.sgd(2e8)
    mixed = nn.MixedPrecision(model, FLOAT16)
    step = train.make_step(loss, optimiser)
    plain = train.TrainState.create(mixed, optimiser, key=getkey())
    scaled = start(mixed, optimiser, getkey, 2.0**20)
    exact = train.TrainState.create(model, optimiser, key=getkey())
    curves = []
    for _ in range(10):
        plain, plain_loss = step(plain, batch)
        scaled, scaled_loss = step(scaled, batch)
        exact, exact_loss = step(exact, batch)
        curves.append((plain_loss, scaled_loss, exact_loss))
    plain_curve, curve, exact_curve = 1e9 * np.array(curves).T
    assert eqx.tree_equal(plain.model, mixed)
    assert np.ptp(plain_curve) == 0
    assert curve[-1] < 0.1 * curve[0]
    np.testing.assert_allclose(curve, exact_curve, atol=0.01 * curve[0])
    assert scaled.loss_scale.counter == 10


def test_overflow_skips_the_update_and_halves_the_scale(batch, getkey):
    mixed = nn.MixedPrecision(nn.Linear(3, "scalar", key=getkey()), FLOAT16)
    optimiser = optax.adam(0.1)
    step = train.make_step(squared_error, optimiser)
    state = start(mixed, optimiser, getkey, 2.0**20)
    before = snapshot(state)
    state, loss = step(state, batch)
    assert eqx.tree_equal((state.model, state.optimiser_state), (mixed, before.optimiser_state))
    assert state.loss_scale.scale == 2.0**19
    assert jnp.isfinite(loss)
    assert not state.is_halted
    # The number of the step is what makes the next one's key another.
    assert state.step == 1
    while state.loss_scale.counter == 0:
        state, _ = step(state, batch)
    assert 2.0**10 < state.loss_scale.scale < 2.0**18
    assert not eqx.tree_equal(state.model, mixed)


def test_steps_are_those_of_optax_apply_if_finite(getkey):
    model, optimiser = nn.Linear(2, 2, use_bias=False, key=getkey()), optax.adam(0.1)
    batches = [jnp.full((1, 2), value) for value in (1.0, 2.0, 0.0, 1.0, 0.0, 0.0, 3.0)]
    step = train.make_step(root_of_squares, optimiser)
    state = start(model, optimiser, getkey)
    cautious = optax.apply_if_finite(optimiser, max_consecutive_errors=5)
    cautious_step = train.make_step(root_of_squares, cautious, check_finite=False)
    expected = train.TrainState.create(model, cautious, key=getkey())
    for batch in batches:
        state, loss = step(state, batch)
        expected, expected_loss = cautious_step(expected, batch)
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    np.testing.assert_allclose(state.model.weight, expected.model.weight, rtol=1e-6)
    assert state.optimiser_state[0].count == expected.optimiser_state.inner_state[0].count == 4
    assert expected.optimiser_state.total_notfinite == 3
    assert state.loss_scale.scale == 2.0 ** (15 - 3)


@pytest.fixture(scope="module")
def root_step():
    return train.make_step(root_of_squares, optax.sgd(0.1))


@pytest.fixture
def linear(getkey):
    return nn.Linear(2, 2, use_bias=False, key=getkey())


GOOD, STEEP, BAD = (np.full((1, 2), value, np.float32) for value in (1, 0, np.nan))


def test_scale_doubles_after_a_period_of_good_steps(root_step, linear, getkey):
    state = start(linear, optax.sgd(0.1), getkey, 8.0, period=2, maximum=32.0)
    scales = []
    for batch in [GOOD, GOOD, GOOD, STEEP, GOOD, GOOD, GOOD, GOOD, GOOD, GOOD]:
        state, _ = root_step(state, batch)
        scales.append(float(state.loss_scale.scale))
    assert scales == [8, 16, 16, 8, 8, 16, 16, 32, 32, 32]


def test_steps_with_any_scale_are_one_trace(linear, getkey):
    traces = []

    def loss(model, batch, key):
        traces.append(None)
        return root_of_squares(model, batch, key)

    step = train.make_step(loss, optax.sgd(0.1))
    state = start(linear, optax.sgd(0.1), getkey, period=2)
    for batch in (GOOD, GOOD, GOOD, STEEP, GOOD):
        state, _ = step(state, batch)
    step(start(linear, optax.sgd(0.1), getkey, 2.0, period=2), GOOD)
    assert len(traces) == 1


def test_gradients_not_finite_at_the_smallest_scale_halt(root_step, linear, getkey):
    state = start(linear, optax.sgd(0.1), getkey, 4.0)
    for _ in range(2):
        state, _ = root_step(state, STEEP)
    assert not state.is_halted
    assert state.loss_scale.scale == 1
    before = snapshot(state)
    state, loss = root_step(state, STEEP)
    assert state.is_halted
    assert loss == 0
    assert eqx.tree_equal(state.model, linear)
    assert eqx.tree_equal(
        (state.loss_scale, state.step, state.key), (before.loss_scale, before.step, before.key)
    )
    state, _ = root_step(state, GOOD)
    assert eqx.tree_equal((state.model, state.step), (linear, before.step))


def test_loss_that_is_not_finite_halts(root_step, linear, getkey):
    state = start(linear, optax.sgd(0.1), getkey)
    state, loss = root_step(state, BAD)
    assert state.is_halted
    assert jnp.isnan(loss)
    assert state.loss_scale.scale == 2.0**15
    assert eqx.tree_equal(state.model, linear)


def test_without_the_check_nothing_halts_and_nothing_is_spoilt(linear, getkey):
    step = train.make_step(root_of_squares, optax.sgd(0.1), check_finite=False)
    state = start(linear, optax.sgd(0.1), getkey, 2.0)
    for batch in (STEEP, BAD, STEEP):
        state, _ = step(state, batch)
    assert not state.is_halted
    assert eqx.tree_equal(state.model, linear)
    assert (int(state.step), float(state.loss_scale.scale)) == (3, 1)


def test_loss_and_what_comes_beside_are_those_of_the_model(linear, getkey):
    def loss(model, batch, key):
        return root_of_squares(model, batch, key).astype(jnp.float16), "beside"

    step = train.make_step(loss, optax.sgd(0.1), has_aux=True)
    _, value, aux = step(start(linear, optax.sgd(0.1), getkey), GOOD)
    assert value.dtype == jnp.float16
    np.testing.assert_allclose(value, root_of_squares(linear, GOOD, None), rtol=1e-3)
    assert aux == "beside"


def test_is_saved_and_loaded_with_the_state(root_step, linear, getkey):
    fresh = start(linear, optax.sgd(0.1), getkey, period=2)
    state = snapshot(fresh)
    for batch in (GOOD, STEEP, GOOD):
        state, _ = root_step(state, batch)
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, state)
    file.seek(0)
    loaded = eqx.tree_deserialise_leaves(file, fresh)
    assert eqx.tree_equal(loaded, state)
    assert (float(loaded.loss_scale.scale), int(loaded.loss_scale.counter)) == (2.0**14, 1)


def test_scale_that_a_state_was_made_with_stays_usable(root_step, linear, getkey):
    loss_scale = train.DynamicLossScale()
    optimiser = optax.sgd(0.1)
    for _ in range(2):
        state = train.TrainState.create(linear, optimiser, key=getkey(), loss_scale=loss_scale)
        root_step(state, GOOD)
        assert state.loss_scale.scale.is_deleted()
    assert loss_scale.scale == 2.0**15


def test_state_without_a_scale_is_stepped_as_before_there_was_one(linear, getkey):
    optimiser = optax.sgd(0.1)

    def step(state, batch):
        key = jax.random.fold_in(state.key, state.step)
        loss, gradients = eqx.filter_value_and_grad(root_of_squares)(state.model, batch, key)
        updates, optimiser_state = optimiser.update(gradients, state.optimiser_state)
        model = eqx.apply_updates(state.model, updates)
        new = train.TrainState(model, optimiser_state, state.step + 1, state.key, state.is_halted)
        return train.keep_if_finite(state, new, loss), loss

    state = train.TrainState.create(linear, optimiser, key=getkey())
    made = train.make_step(root_of_squares, optimiser)
    ours, theirs = (
        str(eqx.filter_make_jaxpr(each)(state, GOOD)[0])
        for each in (made, eqx.filter_jit(step, donate=("state",)))
    )
    assert "is_finite" in ours
    assert ours == theirs


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": 0.5}, "0 < minimum <= scale <= maximum.*scale=0.5"),
        ({"scale": 2.0**25}, "0 < minimum <= scale <= maximum"),
        ({"scale": float("nan")}, "0 < minimum <= scale <= maximum"),
        ({"minimum": 0}, "0 < minimum <= scale <= maximum.*minimum=0"),
        ({"maximum": float("inf")}, "maximum=inf"),
        ({"factor": 1}, "a factor above 1, got 1"),
        ({"period": 0}, "period must be an integer of at least 1, got 0"),
        ({"period": 2.5}, "period must be an integer of at least 1, got 2.5"),
        ({"period": True}, "period must be an integer of at least 1, got True"),
    ],
)
def test_errors_name_what_was_expected_and_what_came(options, message):
    with pytest.raises(ValueError, match=message):
        train.DynamicLossScale(**options)


def test_number_is_no_loss_scale(linear, getkey):
    with pytest.raises(TypeError, match=r"expected a train.DynamicLossScale .* got 1024"):
        train.TrainState.create(linear, optax.sgd(0.1), key=getkey(), loss_scale=1024)


@pytest.mark.parametrize("loss", [None, "text", jnp.array(1), jnp.ones(2), jnp.array(1j)])
def test_what_is_no_loss_is_refused_with_and_without_a_scale(loss, linear, getkey):
    optimiser = optax.sgd(0.1)
    step = train.make_step(lambda model, batch, key: loss, optimiser)
    messages = []
    for loss_scale in (None, train.DynamicLossScale()):
        state = train.TrainState.create(linear, optimiser, key=getkey(), loss_scale=loss_scale)
        with pytest.raises(TypeError) as error:
            step(state, GOOD)
        messages.append(str(error.value))
    assert messages[0] == messages[1]
