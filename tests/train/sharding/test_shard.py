"""The shardings of a state. The arrays of the optimiser are sharded like their parameters."""

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


def test_arrays_follow_the_sharding():
    state = trainings.start(loss_scale=train.DynamicLossScale())
    sharded = train.shard(state, FSDP)
    first = sharded.model.first.weight
    assert spec(first) == spec(sharded.optimiser_state[1][0].mu.first.weight) == P("data")
    assert first.addressable_shards[0].data.shape == (8, 4)
    rest = sharded.step, sharded.key, sharded.is_halted, sharded.loss_scale, sharded.model_state
    assert {each.spec for each in trainings.shardings_of(rest)} == {P()}
    assert {each.num_devices for each in trainings.shardings_of(sharded)} == {2}
    assert eqx.tree_equal(jax.device_get(state.model), jax.device_get(sharded.model))
    assert jax.random.key_data(sharded.key).tolist() == jax.random.key_data(state.key).tolist()
    # An array with another sharding is moved.
    moved = train.shard(sharded, train.data_parallel(jax.devices()[:1]))
    assert {each.num_devices for each in trainings.shardings_of(moved)} == {1}
    assert eqx.tree_equal(jax.device_get(moved.model), jax.device_get(sharded.model))


def test_donating_the_sharded_state_keeps_the_original_state():
    state = make_state(linear())
    old_style = dataclasses.replace(state, key=jax.random.PRNGKey(0))
    assert spec(train.shard(old_style, FSDP).key) == P()
    jax.jit(lambda tree: tree, donate_argnums=0)(train.shard(state, train.data_parallel()))
    arrays = [leaf for leaf in jax.tree.leaves(state) if eqx.is_array(leaf)]
    assert not any(array.is_deleted() for array in arrays)
    jax.block_until_ready([array + 0 for array in arrays if array.dtype == jnp.float32])


def test_shard_places_a_state_that_is_made_within_jit():
    made = eqx.filter_jit(lambda: train.shard(make_state(linear()), FSDP))()
    placed = train.shard(make_state(linear()), FSDP)
    assert trainings.shardings_of(made) == trainings.shardings_of(placed)
    assert eqx.tree_equal(jax.device_get(made.model), jax.device_get(placed.model), rtol=1e-6)


def test_tied_parameters_stay_tied_and_equal_parameters_may_have_different_shardings(getkey):
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


def test_bad_states_and_shardings_are_refused():
    state, optimiser = make_state(linear()), optax.adam(0.1)
    abstract, named = train.fsdp(AbstractMesh((4,), ("data",))), FSDP.batch
    of_jax = r"expected a train\.Sharding, such as .* returns; got Named"
    make_step, make_evaluate = train.make_step, train.make_evaluate
    deleted = make_state(linear())
    deleted.model.weight.delete()
    donated = "shard got a state with arrays that were donated .*: state.model.weight"
    of_model = "Sharding expected a TrainState, got Linear"
    for call, error, message in [
        (lambda: train.shard(state, abstract), ValueError, "got one with an AbstractMesh: create"),
        (lambda: train.shard(state, named), TypeError, f"shard {of_jax}"),
        (lambda: make_step(max, optimiser, sharding=named), TypeError, f"make_step {of_jax}"),
        (lambda: make_evaluate(max, [], sharding=named), TypeError, f"make_evaluate {of_jax}"),
        (lambda: train.shard(state.model, FSDP), TypeError, of_model),
        (lambda: train.shard(deleted, FSDP), RuntimeError, donated),
    ]:
        with pytest.raises(error, match=message):
            call()


# --- the optimiser state ---


def of_state(model, optimiser, rules):
    mesh = AbstractMesh((4,), ("data",))
    found = Sharding(mesh, rules).of_state(make_state(model, optimiser))
    return jax.tree.map(lambda sharding: sharding.spec, found)


def test_moments_are_sharded_like_their_parameters_and_other_arrays_are_replicated():
    found = of_state(linear(), None, {"weight": P(None, "data")})
    adam = found.optimiser_state[0]
    assert adam.mu.weight == adam.nu.weight == found.model.weight == P(None, "data")
    assert adam.mu.bias == adam.count == found.step == found.key == found.is_halted == P()
    # Frozen parameters have no moments.
    frozen = nn.freeze(linear(), lambda linear: linear.weight)
    found = of_state(frozen, None, P("data"))
    assert jax.tree.leaves(found.optimiser_state[0].mu) == [P("data")]
    # A model may be a single array.
    adam = of_state(jnp.ones(4), None, P("data")).optimiser_state[0]
    assert (adam.mu, adam.count) == (P("data"), P())


def test_moments_within_multi_transform_are_sharded():
    def labels(model):
        return jax.tree.map(lambda leaf: "matrix" if leaf.ndim == 2 else "rest", model)

    inner = {"matrix": optax.adam(0.1), "rest": optax.sgd(0.1, 0.9)}
    found = of_state(linear(), optax.multi_transform(inner, labels), P("data"))
    states = found.optimiser_state.inner_states
    assert states["matrix"].inner_state[0].nu.weight == P("data")
    assert states["rest"].inner_state[0].trace.bias == P("data")


def test_histories_are_sharded_after_their_first_axis_and_factors_are_replicated():
    found = of_state(linear(), optax.scale_by_lbfgs(memory_size=3), {"weight": P("data")})
    assert found.optimiser_state.diff_params_memory.weight == P(None, "data")
    assert found.optimiser_state.params.weight == P("data")
    square = nn.Linear(128, 128, key=jax.random.key(0))
    rms = optax.scale_by_factored_rms()
    assert of_state(square, rms, {"weight": P("data")}).optimiser_state.v_row.weight == P()
    assert of_state(square, rms, {"bias": P("data")}).optimiser_state.v.bias == P("data")


def test_parameters_named_like_optimiser_fields_are_distinguished():
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
