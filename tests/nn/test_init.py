"""Layers draw the same parameters as JAX, with and without `jit`, with few programs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from eqxlike.nn import _parameters
from eqxlike.nn._parameters import Parameter, draw, split_key

FLOAT32 = jnp.dtype("float32")
SHAPES = ((), (2, 3, 5))


def parameters(dtype="float32"):
    """A uniform parameter of each shape."""
    return [Parameter(shape, jnp.dtype(dtype), 0.5) for shape in SHAPES]


def drawn_one_by_one(key, dtype="float32"):
    """Draws `parameters` with a call of JAX for each array."""
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


KEYS = {
    "bfloat16": functools.partial(jr.PRNGKey, 3),
    "float32": functools.partial(jr.key, 3, impl="rbg"),
    "complex64": functools.partial(jr.key, 3),
}


@pytest.mark.parametrize("dtype", KEYS)
def test_arrays_equal_jax_random_uniform_bit_by_bit(dtype):
    key = KEYS[dtype]()
    assert_same(draw(key, *parameters(dtype)), drawn_one_by_one(key, dtype))


def test_arrays_are_the_same_with_jit_and_vmap_and_without(getkey):
    keys = jr.split(getkey(), 2)
    key = jr.clone(keys)[0]
    expected = drawn_one_by_one(key)

    def function(key):
        return draw(jr.clone(key), *parameters())

    assert_same(jax.jit(function)(key), expected)
    assert_same([array[0] for array in jax.vmap(function)(keys)], expected)
    with jax.disable_jit():
        assert_same(function(key), expected)


@pytest.mark.usefixtures("plain_dispatch")
def test_arrays_of_many_shapes_are_drawn_by_few_programs(monkeypatch):
    shapes = [(7, 3), (256,), (9, 9, 9), (300, 300), (300, 301)]
    uniform = lambda key, shape=(7, 3): draw(key, Parameter(shape, FLOAT32, 0.5), None)[0]
    _parameters._num_draws.clear()
    num_compiled = 0

    def listen(event, duration_s, **_):
        nonlocal num_compiled
        num_compiled += event == "/jax/core/compile/backend_compile_duration"

    device = jax.devices()[1]
    key = jax.device_put(jr.key(5), device)
    jax.clear_caches()
    jax.monitoring.register_event_duration_secs_listener(listen)
    with jax.transfer_guard("disallow_explicit"):
        arrays = [uniform(key, shape) for shape in shapes]
        normals = [_parameters.normal(key, shape, FLOAT32) for shape in shapes[:3]]
        keys = [each for num in (2, 3) for each in split_key(key, num)]
        filled = draw(None, *(Parameter(shape, FLOAT32, fill=1) for shape in shapes[:3]))
    jax.monitoring.unregister_event_duration_listener(listen)
    assert num_compiled == 4  # uniform and normal small arrays, and two large arrays
    assert_same(normals, [jr.normal(key, shape) for shape in shapes[:3]])
    assert_same(
        map(jr.key_data, keys), [*jr.key_data(jr.split(key)), *jr.key_data(jr.split(key, 3))]
    )
    assert_same(filled, [jnp.ones(shape) for shape in shapes[:3]])
    monkeypatch.setattr(_parameters, "_MAX_HOST_DRAWS", 0)
    assert_same(arrays, [uniform(key, shape) for shape in shapes])
    assert {each for array in [*arrays, *normals, *keys] for each in array.devices()} == {device}
    key_of_numpy: Any = np.asarray(jr.PRNGKey(5))
    np.testing.assert_array_equal(uniform(key_of_numpy), arrays[0])
    draw_one = functools.partial(jr.uniform, minval=-0.5, maxval=0.5)
    assert_same(
        arrays, jax.jit(lambda: [draw_one(jr.split(jr.key(5))[0], shape) for shape in shapes])()
    )
    np.testing.assert_array_equal(jax.jit(lambda: uniform(key))(), arrays[0])


def test_large_arrays_are_drawn_along_one_axis(getkey):
    # A program for four axes takes three times as long to compile and to run.
    options = (Parameter((2, 3, 4, 5), FLOAT32), Parameter((2, 1, 1), FLOAT32)), True
    program = _parameters._draw_at_once.lower(getkey(), *options).compile().as_text()
    assert program is not None
    assert "u32[120]" in program
    assert "u32[2,3,4,5]" not in program


def test_arrays_of_a_layer_are_drawn_in_turn(getkey):
    # Parallel draws wait for each other's threads, on JAX 0.12 for longer than the draws take.
    program = jax.make_jaxpr(_parameters._draw_at_once, static_argnums=(1, 2))
    options = (Parameter((4, 4), FLOAT32), Parameter((4,), FLOAT32), Parameter((3,), FLOAT32))
    assert str(program(getkey(), options, True)).count("optimization_barrier") == 2
    # In a larger program the arrays may be sharded, so that each device draws its part.
    program = jax.make_jaxpr(lambda key: draw(key, *options))
    assert "optimization_barrier" not in str(program(getkey()))
