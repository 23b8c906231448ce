import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import eqxlike as eqx
from eqxlike import nn, train
from eqxlike.train import Exchange, Memory
from tests.train.sharding import trainings

ADAM = optax.adam(1e-3)
FOUR = AbstractMesh((4,), ("data",))


@pytest.fixture(scope="module")
def linear():
    """A weight of 64 numbers and a bias of 8."""
    return eqx.filter_eval_shape(nn.Linear, 8, 8, key=jax.random.key(0))


def test_fsdp_divides_what_it_splits(linear):
    plan = train.plan(linear, ADAM, train.fsdp(FOUR, min_size=64))
    assert plan.mesh == {"data": 4}
    assert plan.parameters == Memory(4 * 72, 4 * (16 + 8))
    assert plan.gradients == plan.parameters
    # Two moments, and Adam's count.
    assert plan.moments == Memory(2 * 4 * 72 + 4, 2 * 4 * (16 + 8) + 4)
    assert plan.gathered == Memory(4 * 64, 4 * 64)
    assert plan.exchanges == (
        Exchange("all-gather", "parameters", 1, 4 * 64),
        Exchange("reduce-scatter", "gradients", 1, 4 * 64),
        Exchange("all-reduce", "gradients", 1, 4 * 8),
    )


def test_data_parallel_has_all_on_each_device(linear):
    plan = train.plan(linear, ADAM, train.data_parallel(FOUR))
    assert plan.at_rest.in_all == plan.at_rest.a_device
    assert plan.gathered == Memory(0, 0)
    assert plan.exchanges == (Exchange("all-reduce", "gradients", 2, 4 * 72),)


def test_split_over_another_axis_than_the_batch_stays_split(linear):
    mesh = AbstractMesh((4, 2), ("data", "model"))
    plan = train.plan(linear, ADAM, train.Sharding(mesh, {"weight": P("model", "data")}))
    assert plan.parameters == Memory(4 * 72, 4 * (8 + 8))
    assert plan.exchanges == (
        Exchange("all-gather", "parameters", 1, 4 * 32),
        Exchange("reduce-scatter", "gradients", 1, 4 * 32),
        Exchange("all-reduce", "gradients", 1, 4 * 8),
    )


@pytest.mark.parametrize("mesh", [AbstractMesh((1,), ("data",)), AbstractMesh((2,), ("model",))])
def test_where_no_batch_is_split_nothing_is_exchanged(mesh, linear):
    axes = [name for name in mesh.axis_names if name == "data"]
    sharding = train.Sharding(mesh, {"weight": P(mesh.axis_names)}, batch_axes=axes)
    assert train.plan(linear, ADAM, sharding).exchanges == ()


def test_frozen_arrays_have_no_gradients_but_are_gathered():
    def make(key):
        return nn.freeze(nn.Linear(8, 8, key=key), lambda linear: linear.weight)

    frozen = eqx.filter_eval_shape(make, jax.random.key(0))
    plan = train.plan(frozen, ADAM, train.fsdp(FOUR, min_size=64))
    assert plan.parameters == Memory(4 * 8, 4 * 8)
    assert plan.other_arrays.a_device - 4 * 16 == plan.other_arrays.in_all - 4 * 64
    assert [each.kind for each in plan.exchanges] == ["all-gather", "all-reduce"]


def test_mesh_alone_stands_for_fsdp():
    model = jax.ShapeDtypeStruct((2**16,), jnp.bfloat16)
    assert train.plan(model, ADAM, FOUR).parameters == Memory(2**17, 2**15)


def test_plan_is_what_devices_hold_and_send():
    sharding = train.fsdp(min_size=16)
    state = trainings.start()
    plan = train.plan(state.model, trainings.OPTIMISER, sharding)
    state = train.shard(state, sharding)
    held = sum(
        leaf.addressable_shards[0].data.nbytes
        for leaf in jax.tree.leaves((state.model, state.optimiser_state))
        if eqx.is_array(leaf)
    )
    step = train.make_step(trainings.squares, trainings.OPTIMISER, sharding=sharding)
    # Beside these lie the step, the flag and the key.
    assert plan.at_rest.a_device - (4 + 1 + state.key.dtype.itemsize) == held
    compiled = step.lower(state, trainings.batches(1)[0]).compile()
    sent = [each for each in train.collectives(compiled) if each.kind == "all-gather"]
    planned = plan.exchanges[0]
    assert planned.kind == "all-gather"
    # In the text there is one turn of a loop, and there are two loops over the stacked layers.
    weight = state.model.stack.layers.weight
    twice = [each for each in sent if each.shapes == (weight.shape[1:],)]
    assert len(twice) == 2
    assert planned.num_arrays == sum(len(each.shapes) for each in sent) - 1
    in_other_turns = 2 * (weight.nbytes - weight.nbytes // len(state.model.stack))
    assert planned.num_bytes == sum(each.num_bytes for each in sent) + in_other_turns


def test_seven_billion_parameters_are_planned_without_an_array():
    def block(key):
        attention_key, key = jax.random.split(key)
        mlp = nn.MLP(4096, 4096, 4 * 4096, 1, use_bias=False, use_final_bias=False, key=key)
        return nn.Sequential([nn.MultiheadAttention(32, 4096, key=attention_key), mlp])

    def make(key):
        embedding_key, key = jax.random.split(key)
        blocks = nn.ScanStack(block, 35, key=key)
        return nn.Sequential([nn.Embedding(32000, 4096, key=embedding_key), blocks])

    before = len(jax.live_arrays())
    model = eqx.filter_eval_shape(make, jax.random.key(0))
    plan = train.plan(model, ADAM, AbstractMesh((16, 16), ("host", "device")))
    count = 32000 * 4096 + 35 * (4 + 8) * 4096**2
    assert plan.parameters == Memory(4 * count, 4 * count // 256)
    assert len(jax.live_arrays()) <= before + 1


def test_plan_is_printed_as_tables(linear):
    printed = str(train.plan(linear, ADAM, train.fsdp(FOUR, min_size=64)))
    assert printed.splitlines() == [
        "4 devices: data=4",
        "",
        "bytes              in all  a device",
        "parameters            288        96",
        "moments               580       196",
        "other arrays           13        13",
        "at rest               881       305",
        "gradients             288        96",
        "gathered, at most     256       256",
        "",
        "a step          of          arrays  bytes",
        "all-gather      parameters       1    256",
        "reduce-scatter  gradients        1    256",
        "all-reduce      gradients        1     32",
    ]


def test_plan_of_one_device_is_one_table(linear):
    assert "a step" not in str(train.plan(linear, ADAM, train.fsdp(AbstractMesh((1,), ("data",)))))


def test_what_is_no_optimiser_is_refused(linear):
    with pytest.raises(TypeError, match=r"plan expected an optax.GradientTransformation .* 0\.1"):
        train.plan(linear, 0.1, FOUR)
