"""What is read off the text of a compiled program."""

import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from eqxlike import train
from eqxlike.train import Collective, collectives

AXIS = "data"


def of_text(text):
    return collectives(types.SimpleNamespace(as_text=lambda: text))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
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
    ],
)
def test_instruction_is_read(line, expected):
    assert of_text(f"HloModule jit_step\n  {line}\n") == (expected,)


@pytest.mark.parametrize(
    "line",
    [
        "%done = f32[16,8]{1,0} all-gather-done(%all-gather-start)",
        "%get = f32[3]{0} get-tuple-element(%all-reduce.7), index=0",
        "%fusion = f32[3]{0} fusion(%all-gather.1), kind=kLoop",
    ],
)
def test_what_only_mentions_a_collective_is_none(line):
    assert of_text(line) == ()


@pytest.mark.parametrize(
    ("kind", "function"),
    [
        ("all-reduce", lambda x: jax.lax.psum(x, AXIS)),
        ("all-gather", lambda x: jax.lax.all_gather(x, AXIS)),
        ("reduce-scatter", lambda x: jax.lax.psum_scatter(x, AXIS)),
        ("all-to-all", lambda x: jax.lax.all_to_all(x, AXIS, 0, 0)),
        ("collective-permute", lambda x: jax.lax.ppermute(x, AXIS, [(0, 1), (1, 0)])),
    ],
)
def test_collectives_of_jax_are_found(kind, function):
    mesh = train.data_parallel().mesh
    over = jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P(AXIS), check_vma=False)
    (found,) = collectives(jax.jit(over).lower(jnp.ones((2, 3))).compile())
    assert found.kind == kind
    assert found.num_bytes > 0


def test_program_of_one_device_has_none():
    assert collectives(jax.jit(jnp.sum).lower(jnp.ones(3)).compile()) == ()
