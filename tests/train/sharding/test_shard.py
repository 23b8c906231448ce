"""Where the arrays of a state lie; what the optimiser keeps of a parameter is split as that is."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import eqxlike as eqx
from eqxlike import Module, nn, train
from eqxlike.train import Sharding
from tests.train.sharding import trainings

FSDP = train.fsdp(min_size=1)


def spec(array):
    return array.sharding.spec


def make_state(model, optimiser=None):
    return train.TrainState.create(model, optimiser or optax.adam(0.1), key=jax.random.key(1))


def linear():
    return nn.Linear(8, 4, key=jax.random.key(0))


def test_arrays_lie_as_the_sharding_says():
    state = trainings.start(loss_scale=train.DynamicLossScale())
    sharded = train.shard(state, FSDP)
    first = sharded.model.first.weight
    assert spec(first) == spec(sharded.optimiser_state[1][0].mu.first.weight) == P("data")
    assert first.addressable_shards[0].data.shape == (8, 4)
    rest = (
        *(sharded.step, sharded.key, sharded.is_halted, sharded.loss_scale),
        sharded.model_state,
    )
    assert {each.spec for each in trainings.shardings_of(rest)} == {P()}
    assert {each.num_devices for each in trainings.shardings_of(sharded)} == {2}
    assert eqx.tree_equal(jax.device_get(state.model), jax.device_get(sharded.model))
    assert jax.random.key_data(sharded.key).tolist() == jax.random.key_data(state.key).tolist()
    # One that lies otherwise is moved.
    moved = train.shard(sharded, train.data_parallel(jax.devices()[:1]))
    assert {each.num_devices for each in trainings.shardings_of(moved)} == {1}
    assert eqx.tree_equal(jax.device_get(moved.model), jax.device_get(sharded.model))


def test_state_that_was_given_stays_usable_where_the_other_is_donated():
    state = make_state(linear())
    old_style = dataclasses.replace(state, key=jax.random.PRNGKey(0))
    assert spec(train.shard(old_style, FSDP).key) == P()
    jax.jit(lambda tree: tree, donate_argnums=0)(train.shard(state, train.data_parallel()))
    arrays = [leaf for leaf in jax.tree.leaves(state) if eqx.is_array(leaf)]
    assert not any(array.is_deleted() for array in arrays)
    jax.block_until_ready([array + 0 for array in arrays if array.dtype == jnp.float32])


def test_state_is_made_in_its_parts_within_compiled_code():
    made = eqx.filter_jit(lambda: train.shard(make_state(linear()), FSDP))()
    placed = train.shard(make_state(linear()), FSDP)
    assert trainings.shardings_of(made) == trainings.shardings_of(placed)
    assert eqx.tree_equal(jax.device_get(made.model), jax.device_get(placed.model), rtol=1e-6)


def test_tied_parameters_stay_tied_and_equal_ones_may_be_split_in_two_ways(getkey):
    pair = nn.Embedding(8, 4, key=getkey()), nn.Linear(4, 8, key=getkey())
    shared = nn.Shared(pair, where=lambda pair: pair[1].weight, get=lambda pair: pair[0].weight)
    embedding, layer = train.shard(make_state(shared), FSDP).model()
    assert embedding.weight is layer.weight
    assert spec(layer.weight) == P("data")
    weight, mesh = jnp.arange(8.0), jax.make_mesh((2,), ("data",))
    split = Sharding(mesh, {"[0]": P("data")})
    with pytest.warns(UserWarning, match=r"one array at several places: model\[0\] = model\[1\]"):
        state = make_state((weight, weight))
    first, second = train.shard(state, split).model
    assert (spec(first), spec(second)) == (P("data"), P())
    np.testing.assert_array_equal(first, second)


def test_what_cannot_be_placed_is_refused():
    state = make_state(linear())
    with pytest.raises(ValueError, match=r"got one with an AbstractMesh: create"):
        train.shard(state, train.fsdp(AbstractMesh((4,), ("data",))))
    optimiser = optax.adam(0.1)
    of_jax = r"expected a train\.Sharding, such as .* returns; got Named"
    for taker, call in {
        "shard": lambda where: train.shard(state, where),
        "make_step": lambda where: train.make_step(max, optimiser, sharding=where),
        "make_evaluate": lambda where: train.make_evaluate(max, [], sharding=where),
    }.items():
        with pytest.raises(TypeError, match=f"{taker} {of_jax}"):
            call(FSDP.batch)
    with pytest.raises(TypeError, match="Sharding expected a TrainState, got Linear"):
        train.shard(state.model, FSDP)
    state.model.weight.delete()
    expected = "shard got a state with arrays that were donated .*: state.model.weight"
    with pytest.raises(RuntimeError, match=expected):
        train.shard(state, FSDP)


# --- what the optimiser keeps ---


def of_state(model, optimiser, rules):
    mesh = AbstractMesh((4,), ("data",))
    found = Sharding(mesh, rules).of_state(make_state(model, optimiser))
    return jax.tree.map(lambda sharding: sharding.spec, found)


def test_moments_lie_as_their_parameters_and_all_else_is_whole():
    found = of_state(linear(), None, {"weight": P(None, "data")})
    adam = found.optimiser_state[0]
    assert adam.mu.weight == adam.nu.weight == found.model.weight == P(None, "data")
    assert adam.mu.bias == adam.count == found.step == found.key == found.is_halted == P()
    # Frozen parameters have none.
    frozen = nn.freeze(linear(), lambda linear: linear.weight)
    found = of_state(frozen, None, P("data"))
    assert jax.tree.leaves(found.optimiser_state[0].mu) == [P("data")]
    # A model may be one array.
    adam = of_state(jnp.ones(4), None, P("data")).optimiser_state[0]
    assert (adam.mu, adam.count) == (P("data"), P())


def test_moments_within_other_states_follow():
    def labels(model):
        return jax.tree.map(lambda leaf: "matrix" if leaf.ndim == 2 else "rest", model)

    inner = {"matrix": optax.adam(0.1), "rest": optax.sgd(0.1, 0.9)}
    found = of_state(linear(), optax.multi_transform(inner, labels), P("data"))
    states = found.optimiser_state.inner_states
    assert states["matrix"].inner_state[0].nu.weight == P("data")
    assert states["rest"].inner_state[0].trace.bias == P("data")


def test_histories_have_axes_of_their_own_before_and_factors_are_whole():
    found = of_state(linear(), optax.scale_by_lbfgs(memory_size=3), {"weight": P("data")})
    assert found.optimiser_state.diff_params_memory.weight == P(None, "data")
    assert found.optimiser_state.params.weight == P("data")
    square = nn.Linear(128, 128, key=jax.random.key(0))
    rms = optax.scale_by_factored_rms()
    assert of_state(square, rms, {"weight": P("data")}).optimiser_state.v_row.weight == P()
    assert of_state(square, rms, {"bias": P("data")}).optimiser_state.v.bias == P("data")


def test_parameters_with_names_of_the_optimiser_are_told_apart():
    class Inner(Module):
        weight: jax.Array

    class Confusing(Module):
        mu: Inner
        weight: jax.Array
        count: jax.Array

    model = Confusing(Inner(jnp.ones(4)), jnp.ones(4), jnp.ones(4))
    adam = of_state(model, None, {"mu.weight": P("data")}).optimiser_state[0]
    assert (adam.mu.mu.weight, adam.mu.weight, adam.nu.weight) == (P("data"), P(), P())
    adam = of_state(model, None, {"count": P("data")}).optimiser_state[0]
    assert (adam.count, adam.mu.count) == (P(), P("data"))
