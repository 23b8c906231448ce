import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import eqxlike as eqx
from eqxlike import nn, train
from tests.train.sharding import trainings

FSDP = train.fsdp(min_size=1)


def spec(array):
    return array.sharding.spec


def test_arrays_lie_as_the_sharding_says():
    state = train.shard(trainings.start(loss_scale=train.DynamicLossScale()), FSDP)
    assert spec(state.model.first.weight) == spec(state.optimiser_state[1][0].mu.first.weight)
    assert spec(state.model.first.weight) == P("data")
    assert state.model.first.weight.addressable_shards[0].data.shape == (8, 4)
    rest = state.step, state.key, state.is_halted, state.loss_scale, state.model_state
    assert {each.spec for each in trainings.shardings_of(rest)} == {P()}
    assert {each.num_devices for each in trainings.shardings_of(state)} == {2}


def test_numbers_stay():
    state = trainings.start()
    sharded = train.shard(state, FSDP)
    assert eqx.tree_equal(jax.device_get(state.model), jax.device_get(sharded.model))
    assert jax.random.key_data(sharded.key).tolist() == jax.random.key_data(state.key).tolist()


def test_state_that_was_given_stays_usable_after_a_step_that_donates_the_other():
    state, sharding = trainings.start(), train.data_parallel()
    step = train.make_step(trainings.squares, trainings.OPTIMISER, sharding=sharding)
    step(train.shard(state, sharding), trainings.batches(1)[0])
    arrays = [leaf for leaf in jax.tree.leaves(state) if eqx.is_array(leaf)]
    assert not any(array.is_deleted() for array in arrays)
    jax.block_until_ready([array + 0 for array in arrays if array.dtype == jnp.float32])


def test_state_that_lies_otherwise_is_moved():
    sharded = train.shard(trainings.start(), FSDP)
    moved = train.shard(sharded, train.data_parallel(jax.devices()[:1]))
    assert {each.num_devices for each in trainings.shardings_of(moved)} == {1}
    assert eqx.tree_equal(jax.device_get(moved.model), jax.device_get(sharded.model))


def test_state_is_made_in_its_parts_within_compiled_code():
    made = eqx.filter_jit(lambda: train.shard(trainings.start(), FSDP))()
    placed = train.shard(trainings.start(), FSDP)
    assert trainings.shardings_of(made) == trainings.shardings_of(placed)
    assert eqx.tree_equal(jax.device_get(made.model), jax.device_get(placed.model), rtol=1e-6)


def test_old_style_keys_are_placed():
    state = dataclasses.replace(trainings.start(), key=jax.random.PRNGKey(0))
    assert spec(train.shard(state, FSDP).key) == P()


def test_tied_parameters_stay_tied(getkey):
    pair = nn.Embedding(8, 4, key=getkey()), nn.Linear(4, 8, key=getkey())
    shared = nn.Shared(pair, where=lambda pair: pair[1].weight, get=lambda pair: pair[0].weight)
    state = train.TrainState.create(shared, optax.sgd(0.1), key=getkey())
    embedding, linear = train.shard(state, FSDP).model()
    assert embedding.weight is linear.weight
    assert spec(linear.weight) == P("data")


def test_array_at_two_places_may_be_split_in_two_ways(getkey):
    weight = jnp.arange(8.0)
    state = train.TrainState.create((weight, weight), optax.sgd(0.1), key=getkey())
    mesh = jax.make_mesh((2,), ("data",))
    first, second = train.shard(state, train.Sharding(mesh, {"[0]": P("data")})).model
    assert (spec(first), spec(second)) == (P("data"), P())
    np.testing.assert_array_equal(first, second)


def test_donated_state_is_refused():
    state = trainings.start()
    state.model.first.weight.delete()
    expected = "shard expected a state whose arrays are there; .*: state.model.first.weight"
    with pytest.raises(RuntimeError, match=expected):
        train.shard(state, FSDP)


def test_abstract_mesh_is_refused():
    with pytest.raises(ValueError, match=r"this one has an AbstractMesh, which is for train\.plan"):
        train.shard(trainings.start(), train.fsdp(AbstractMesh((4,), ("data",))))


@pytest.mark.parametrize(
    "call",
    [
        lambda where: train.shard(trainings.start(), where),
        lambda where: train.make_step(trainings.squares, trainings.OPTIMISER, sharding=where),
        lambda where: train.plan(jnp.ones(2), trainings.OPTIMISER, where),
    ],
)
def test_shardings_of_jax_are_refused(call):
    expected = "expected a train.Sharding, as train.data_parallel and train.fsdp return, got Named"
    with pytest.raises(TypeError, match=expected):
        call(FSDP.batch)


def test_what_is_no_state_is_refused():
    with pytest.raises(TypeError, match="expected a TrainState, and got Network"):
        train.shard(trainings.start().model, FSDP)
