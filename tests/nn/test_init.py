"""What layers draw when they are built: the same numbers in whatever way they are asked for."""

import functools

import equinox
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from eqxlike import nn
from eqxlike.nn._common import _parameters
from eqxlike.nn._common._parameters import Parameter, draw

FLOAT32 = jnp.dtype("float32")
SHAPES = ((), (2, 3, 5))
DTYPES = ("bfloat16", "complex64")


def parameters(dtype="float32"):
    """One uniform parameter of each shape."""
    return [Parameter(shape, jnp.dtype(dtype), 0.5) for shape in SHAPES]


def drawn_one_by_one(key, dtype="float32"):
    """What JAX draws for `parameters`, by a call each."""
    keys = jr.split(jr.clone(key), len(SHAPES))
    if dtype != "complex64":
        pairs = zip(keys, SHAPES, strict=True)
        return [jr.uniform(key, shape, dtype, -0.5, 0.5) for key, shape in pairs]
    parts = [jr.split(key) for key in keys]
    draw_part = functools.partial(jr.uniform, minval=-0.5, maxval=0.5)
    return [
        jax.lax.complex(draw_part(real, shape), draw_part(imaginary, shape))
        for (real, imaginary), shape in zip(parts, SHAPES, strict=True)
    ]


def assert_same(some, others):
    for one, other in zip(some, others, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_are_those_of_jax_random_uniform_to_the_last_bit(dtype, getkey):
    key = getkey()
    assert_same(draw(key, *parameters(dtype)), drawn_one_by_one(key, dtype))


KEYS = {
    "rbg": functools.partial(jr.key, 3, impl="rbg"),
    "uint32": functools.partial(jr.PRNGKey, 3),
}


@pytest.mark.parametrize("kind", KEYS)
def test_arrays_are_the_same_for_every_kind_of_key(kind):
    key = KEYS[kind]()
    assert_same(draw(key, *parameters()), drawn_one_by_one(key))


@pytest.mark.parametrize("is_partitionable", [False])
def test_arrays_are_the_same_whichever_way_threefry_counts(is_partitionable, getkey):
    key = getkey()
    with jax.threefry_partitionable(is_partitionable):
        assert_same(draw(key, *parameters()), drawn_one_by_one(key))


def test_arrays_are_the_same_under_jit_and_vmap_and_without_jit(getkey):
    keys = jr.split(getkey(), 2)
    key = jr.clone(keys)[0]
    expected = drawn_one_by_one(key)

    def function(key):
        return draw(jr.clone(key), *parameters())

    assert_same(jax.jit(function)(key), expected)
    assert_same([array[0] for array in jax.vmap(function)(keys)], expected)
    with jax.disable_jit():
        assert_same(function(key), expected)


def test_no_key_is_used_twice(getkey):
    with jax.debug_key_reuse(True):
        draw(getkey(), *parameters())
        nn.LSTMCell(2, 3, key=getkey())
        nn.Conv2d(1, 2, 3, weight_init=jax.nn.initializers.normal(), key=getkey())


def test_equal_layers_are_drawn_by_one_compiled_program(getkey):
    def count() -> int:
        return _parameters._draw_at_once._cache_size()  # pyright: ignore[reportAttributeAccessIssue]

    nn.Conv2d(2, 3, kernel_size=5, key=getkey())
    before = count()
    for _ in range(3):
        nn.Conv2d(2, 3, kernel_size=5, key=getkey())
    assert count() == before


def compiled_text(function, *arguments) -> str:
    text = function.lower(*arguments).compile().as_text()
    assert text is not None
    return text


def test_kernel_is_counted_along_one_axis(getkey):
    # Along four axes its program takes three times as long to compile, and to run.
    options = (Parameter((2, 3, 4, 5), FLOAT32), Parameter((2, 1, 1), FLOAT32)), True
    program = compiled_text(_parameters._draw_at_once, getkey(), *options)
    assert "u32[120]" in program
    assert "u32[2,3,4,5]" not in program


def test_arrays_of_a_layer_are_drawn_one_after_another(getkey):
    # Side by side they wait for each other's threads, on jax 0.12 longer than they take.
    program = jax.make_jaxpr(_parameters._draw_at_once, static_argnums=(1, 2))
    options = (Parameter((4, 4), FLOAT32), Parameter((4,), FLOAT32), Parameter((3,), FLOAT32))
    assert str(program(getkey(), options, True)).count("optimization_barrier") == 2
    assert str(program(getkey(), options, False)).count("optimization_barrier") == 0


@pytest.mark.parametrize("axis", [0, 1])
def test_sharded_layer_is_drawn_in_parts(axis, getkey):
    mesh = jax.make_mesh((2,), ("x",))
    spec = PartitionSpec(*("x" if each == axis else None for each in range(2)))

    def make(key):
        return nn.Linear(64, 64, key=key).weight

    function = jax.jit(make, out_shardings=NamedSharding(mesh, spec))
    program = compiled_text(function, getkey())
    assert ("f32[32,64]", "f32[64,32]")[axis] in program
    assert "[64,64]" not in program
    assert "[4096]" not in program


NORMS = {
    "LayerNorm": lambda: nn.LayerNorm(3),
    "RMSNorm": lambda: nn.RMSNorm(3),
    "GroupNorm": lambda: nn.GroupNorm(1, 3),
    "BatchNorm": lambda: nn.BatchNorm(3, axis_name="batch", mode="batch"),
}


@pytest.mark.parametrize("name", NORMS)
def test_norm_without_initializers_draws_nothing_and_starts_as_that_of_equinox(name):
    program = str(jax.make_jaxpr(lambda: (NORMS[name]().weight, NORMS[name]().bias))())
    assert "random" not in program
    assert "threefry" not in program
    sizes = {"GroupNorm": (1, 3)}.get(name, (3,))
    options = {"BatchNorm": {"axis_name": "batch", "mode": "batch"}}.get(name, {})
    theirs = getattr(equinox.nn, name)(*sizes, **options)
    ours = NORMS[name]()
    assert_same([ours.weight, ours.bias], [theirs.weight, theirs.bias])
    assert not ours.weight.weak_type
