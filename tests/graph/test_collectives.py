"""Reading the collectives of a compiled program."""

import types

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from eqxlike import train
from eqxlike._programs import Collective, collectives


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
    # An instruction that only mentions a collective does not count.
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
