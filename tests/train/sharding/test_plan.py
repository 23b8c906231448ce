"""What a training would need, by shapes alone, and what is read off a compiled program."""

import types

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import eqxlike as eqx
from eqxlike import nn, train
from eqxlike.train import Collective, Exchange, Memory, collectives

ADAM = optax.adam(1e-3)
FOUR = AbstractMesh((4,), ("data",))


@pytest.fixture(scope="module")
def linear():
    """A weight of 64 numbers and a bias of 8."""
    return eqx.filter_eval_shape(nn.Linear, 8, 8, key=jax.random.key(0))


def test_fsdp_divides_what_it_splits(linear):
    plan = train.plan(linear, ADAM, train.fsdp(FOUR, min_size=64))
    assert plan.mesh == {"data": 4}
    assert plan.parameters == plan.gradients == Memory(4 * 72, 4 * (16 + 8))
    # Two moments, and Adam's count.
    assert plan.moments == Memory(2 * 4 * 72 + 4, 2 * 4 * (16 + 8) + 4)
    assert plan.gathered == Memory(4 * 64, 4 * 64)
    assert plan.exchanges == (
        Exchange("all-gather", "parameters", 1, 4 * 64),
        Exchange("reduce-scatter", "gradients", 1, 4 * 64),
        Exchange("all-reduce", "gradients", 1, 4 * 8),
    )
    assert str(plan).splitlines() == [
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


def test_what_is_not_split_over_the_batch_is_not_gathered(linear):
    plan = train.plan(linear, ADAM, train.data_parallel(FOUR))
    assert plan.at_rest.in_all == plan.at_rest.a_device
    assert plan.gathered == Memory(0, 0)
    assert plan.exchanges == (Exchange("all-reduce", "gradients", 2, 4 * 72),)
    mesh = AbstractMesh((4, 2), ("data", "model"))
    plan = train.plan(linear, ADAM, train.Sharding(mesh, {"weight": P("model", "data")}))
    assert plan.parameters == Memory(4 * 72, 4 * (8 + 8))
    assert plan.exchanges == (
        Exchange("all-gather", "parameters", 1, 4 * 32),
        Exchange("reduce-scatter", "gradients", 1, 4 * 32),
        Exchange("all-reduce", "gradients", 1, 4 * 8),
    )


def test_where_no_batch_is_split_nothing_is_exchanged(linear):
    for mesh, axes in [
        (AbstractMesh((1,), ("data",)), ["data"]),
        (AbstractMesh((2,), ("model",)), []),
    ]:
        sharding = train.Sharding(mesh, {"weight": P(mesh.axis_names)}, batch_axes=axes)
        plan = train.plan(linear, ADAM, sharding)
        assert plan.exchanges == ()
        assert "a step" not in str(plan)


def test_frozen_arrays_have_no_gradients_but_are_gathered():
    def make(key):
        return nn.freeze(nn.Linear(8, 8, key=key), lambda linear: linear.weight)

    frozen = eqx.filter_eval_shape(make, jax.random.key(0))
    plan = train.plan(frozen, ADAM, train.fsdp(FOUR, min_size=64))
    assert plan.parameters == Memory(4 * 8, 4 * 8)
    assert plan.other_arrays.a_device - 4 * 16 == plan.other_arrays.in_all - 4 * 64
    assert [each.kind for each in plan.exchanges] == ["all-gather", "all-reduce"]


def test_mesh_alone_stands_for_fsdp_and_what_is_no_optimiser_is_refused():
    model = jax.ShapeDtypeStruct((2**16,), jnp.bfloat16)
    assert train.plan(model, ADAM, FOUR).parameters == Memory(2**17, 2**15)
    smaller = jax.ShapeDtypeStruct((2**16 - 4,), jnp.bfloat16)
    assert train.plan(smaller, ADAM, FOUR).parameters == Memory(2**17 - 8, 2**17 - 8)
    with pytest.raises(TypeError, match=r"plan expected an optax.GradientTransformation .* 0\.1"):
        train.plan(model, 0.1, FOUR)


# --- the text of a compiled program ---


def of_text(text):
    return collectives(types.SimpleNamespace(as_text=lambda: text))


def test_instructions_are_read():
    for line, expected in [
        (
            "%all-gather = f32[16,8]{1,0} all-gather(%param.6), channel_id=1",
            Collective("all-gather", ((16, 8),), 512),
        ),
        (
            "%all-reduce.7 = (bf16[16,8]{1,0}, s32[]) all-reduce(%dot.5, %wrapped), channel_id=2",
            Collective("all-reduce", ((16, 8), ()), 260),
        ),
        (
            "%ag = (f32[4,8]{1,0}, f32[16,8]{1,0}) all-gather-start(f32[4,8]{1,0} %p), dims={0}",
            Collective("all-gather", ((16, 8),), 512),
        ),
        (
            "ROOT %ar = (f32[3]{0}, pred[5]{0}) all-reduce-start(%a, %b), to_apply=%add",
            Collective("all-reduce", ((3,), (5,)), 17),
        ),
    ]:
        assert of_text(f"HloModule jit_step\n  {line}\n") == (expected,)
    # What only mentions a collective is none.
    for line in [
        "%done = f32[16,8]{1,0} all-gather-done(%all-gather-start)",
        "%get = f32[3]{0} get-tuple-element(%all-reduce.7), index=0",
        "%fusion = f32[3]{0} fusion(%all-gather.1), kind=kLoop",
    ]:
        assert of_text(line) == ()


def test_collectives_of_jax_are_found():
    def exchange(x):
        axis = "data"
        swapped = jax.lax.ppermute(x, axis, [(0, 1), (1, 0)])
        parts = jax.lax.psum_scatter(x, axis), jax.lax.all_to_all(x, axis, 0, 0)
        return jax.lax.psum(x, axis), jax.lax.all_gather(x, axis), swapped, parts

    mesh = train.data_parallel().mesh
    over = jax.shard_map(exchange, mesh=mesh, in_specs=P(), out_specs=P("data"), check_vma=False)
    found = collectives(jax.jit(over).lower(jnp.ones((2, 3))).compile())
    kinds = ["all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter"]
    assert sorted(each.kind for each in found) == kinds
    assert all(each.num_bytes > 0 for each in found)
    assert collectives(jax.jit(jnp.sum).lower(jnp.ones(3)).compile()) == ()
