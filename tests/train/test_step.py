import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest

from eqxlike import Module, is_array, nn, tree_at, tree_equal
from eqxlike.train import TrainState, keep_if_finite, make_step


def squared_error(model, batch, key):
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def snapshot(state):
    """A state that survives donation."""
    return jax.tree.map(lambda leaf: jnp.copy(leaf) if is_array(leaf) else leaf, state)


@pytest.fixture
def model(getkey):
    return nn.MLP(3, "scalar", 4, 1, key=getkey())


@pytest.fixture
def batch(getkey):
    return jr.normal(getkey(), (5, 3)), jr.normal(getkey(), (5,))


@pytest.mark.parametrize("optimiser", [optax.sgd(0.1), optax.adam(0.1), optax.adamw(0.1)])
def test_makes_the_updates_of_plain_jax_and_optax(optimiser, model, batch, getkey):
    state = TrainState.create(model, optimiser, key=getkey())
    step = make_step(squared_error, optimiser)
    leaves, treedef = jax.tree.flatten(model)
    parameters = [leaf for leaf in leaves if is_array(leaf)]

    def loss(parameters):
        rest = iter(parameters)
        filled = [next(rest) if is_array(leaf) else leaf for leaf in leaves]
        return squared_error(jax.tree.unflatten(treedef, filled), batch, None)

    plain_state = optimiser.init(parameters)
    for _ in range(3):
        expected, gradients = jax.value_and_grad(loss)(parameters)
        with jax.numpy_dtype_promotion("standard"):
            updates, plain_state = optimiser.update(gradients, plain_state, parameters)
        parameters = optax.apply_updates(parameters, updates)
        state, value = step(state, batch)
        np.testing.assert_allclose(value, expected, rtol=1e-5)
    trained = [leaf for leaf in jax.tree.leaves(state.model) if is_array(leaf)]
    for our, plain in zip(trained, parameters, strict=True):
        np.testing.assert_allclose(our, plain, rtol=1e-4, atol=1e-6)
    assert state.step == 3


def test_is_traced_once(model, batch, getkey):
    traces = []

    def loss(model, batch, key):
        traces.append(None)
        return squared_error(model, batch, key)

    step = make_step(loss, optax.adam(0.1))
    state = TrainState.create(model, optax.adam(0.1), key=getkey())
    for _ in range(4):
        state, _ = step(state, batch)
    state, _ = step(state, jax.tree.map(np.asarray, batch))
    assert len(traces) == 1


def test_is_traced_once_for_weakly_typed_parameters(getkey):
    class Scale(Module):
        scale: jax.Array

    traces = []

    def loss(model, batch, key):
        traces.append(None)
        return jnp.sum(model.scale * batch)

    step = make_step(loss, optax.sgd(0.1))
    state = TrainState.create(Scale(jnp.asarray(1.0)), optax.sgd(0.1), key=getkey())
    for _ in range(3):
        state, _ = step(state, jnp.ones(3))
    assert len(traces) == 1


def test_state_is_donated_and_the_model_it_came_from_is_not(model, batch, getkey):
    first = TrainState.create(model, optax.adam(0.1), key=getkey())
    second, _ = make_step(squared_error, optax.adam(0.1))(first, batch)
    assert first.model.layers[0].weight.is_deleted()
    assert not any(array.is_deleted() for array in batch)
    assert model(jnp.ones(3)).shape == second.model(jnp.ones(3)).shape == ()


def test_every_step_has_a_key_of_its_own_and_the_state_says_which(model, batch, getkey):
    def loss(model, batch, key):
        return squared_error(model, batch, key), jr.key_data(key)

    step = make_step(loss, optax.sgd(0.1), has_aux=True)
    start = TrainState.create(model, optax.sgd(0.1), key=getkey())

    def keys(state):
        found = []
        for _ in range(3):
            state, _, key = step(state, batch)
            found.append(tuple(key.tolist()))
        return found

    first = keys(snapshot(start))
    assert len(set(first)) == 3
    assert keys(snapshot(start)) == first


def test_model_in_mixed_precision_is_trained_in_float32(model, batch, getkey):
    mixed = nn.MixedPrecision(model, "params=float32,compute=bfloat16,output=float32")
    optimiser = optax.adam(0.1)
    step = make_step(squared_error, optimiser)
    first = TrainState.create(mixed, optimiser, key=getkey())
    moments = snapshot(first).optimiser_state[0]
    state, exact = first, TrainState.create(model, optimiser, key=getkey())
    for _ in range(10):
        state, loss = step(state, batch)
        exact, exact_loss = step(exact, batch)
    arrays = jax.tree.leaves((state.model, state.optimiser_state[0].mu, loss))
    assert {leaf.dtype.name for leaf in arrays if is_array(leaf)} == {"float32"}
    assert jax.tree.structure(state.optimiser_state[0]) == jax.tree.structure(moments)
    assert first.model.model.layers[0].weight.is_deleted()
    assert first.optimiser_state[0].mu.model.layers[0].weight.is_deleted()
    np.testing.assert_allclose(loss, exact_loss, rtol=0.05)


def test_optimiser_gets_the_loss_as_its_value(model, batch, getkey):
    optimiser = optax.polyak_sgd(max_learning_rate=0.1)
    state = TrainState.create(model, optimiser, key=getkey())
    step = make_step(squared_error, optimiser)
    losses = []
    for _ in range(20):
        state, loss = step(state, batch)
        losses.append(float(loss))
    assert losses[-1] < losses[0]


def test_integer_arrays_and_other_leaves_stay(getkey):
    class Mixed(Module):
        weight: jax.Array
        count: jax.Array
        name: str

    state = TrainState.create(
        Mixed(jnp.ones(2), jnp.arange(2), "name"), optax.sgd(1.0), key=getkey()
    )
    step = make_step(lambda model, batch, key: jnp.sum(model.weight * batch), optax.sgd(1.0))
    state, _ = step(state, jnp.ones(2))
    assert state.model.weight.tolist() == [0, 0]
    assert state.model.count.tolist() == [0, 1]
    assert state.model.name == "name"


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_loss_that_is_not_finite_leaves_the_state_as_it_was(bad, model, batch, getkey):
    state = TrainState.create(model, optax.adam(0.1), key=getkey())
    step = make_step(
        lambda model, batch, key: squared_error(model, batch[:2], key) + batch[2], optax.adam(0.1)
    )
    good, poisoned = (*batch, jnp.array(0.0)), (*batch, jnp.array(bad))
    state, _ = step(state, good)
    before = snapshot(state)
    state, loss = step(state, poisoned)
    np.testing.assert_array_equal(loss, bad)
    assert state.is_halted
    assert tree_equal(
        (state.model, state.optimiser_state, state.step, state.key),
        (before.model, before.optimiser_state, before.step, before.key),
    )
    state, _ = step(state, good)
    assert state.is_halted
    assert tree_equal((state.model, state.step), (before.model, before.step))


def test_parameters_that_are_not_finite_leave_the_state_as_it_was(getkey):
    model = nn.Linear(2, 2, key=getkey())
    # At 0 the root is finite and its gradient is not.
    step = make_step(
        lambda model, x, key: jnp.sqrt(jnp.sum((model.weight * x) ** 2)), optax.sgd(0.1)
    )
    state = TrainState.create(model, optax.sgd(0.1), key=getkey())
    state, loss = step(state, jnp.zeros((1, 2)))
    assert loss == 0
    assert state.is_halted
    assert tree_equal(state.model, model)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.complex64])
@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_any_parameter_that_is_not_finite_is_found(dtype, bad, getkey):
    old = TrainState.create(
        {"a": jnp.ones((3, 2)), "b": jnp.ones(4, dtype), "c": jnp.arange(2), "d": jnp.ones((0, 2))},
        optax.sgd(0.1),
        key=getkey(),
    )
    new = tree_at(lambda state: state.model["b"], old, old.model["b"].at[2].set(bad))
    kept = keep_if_finite(old, new, jnp.array(0.0))
    assert kept.is_halted
    assert tree_equal(kept.model, old.model)
    assert not keep_if_finite(new, old, jnp.array(0.0)).is_halted


def test_model_without_parameters_is_finite(getkey):
    state = TrainState.create({"count": jnp.arange(2)}, optax.sgd(0.1), key=getkey())
    assert not keep_if_finite(state, state, jnp.array(0.0)).is_halted


def test_check_can_be_left_out(model, batch, getkey):
    step = make_step(
        lambda model, batch, key: squared_error(model, batch, key) * jnp.nan,
        optax.sgd(0.1),
        check_finite=False,
    )
    state, _ = step(TrainState.create(model, optax.sgd(0.1), key=getkey()), batch)
    assert state.step == 1
    assert not state.is_halted
    assert jnp.isnan(state.model.layers[0].weight).all()


def test_loss_of_another_shape_is_refused(model, batch, getkey):
    step = make_step(lambda model, batch, key: jax.vmap(model)(batch[0]), optax.sgd(0.1))
    with pytest.raises(TypeError, match="scalar"):
        step(TrainState.create(model, optax.sgd(0.1), key=getkey()), batch)
