"""Convolutions on CPUs: faster programs than XLA's, with the same results."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.jet import jet
from jax.sharding import PartitionSpec as P

import eqxlike as eqx
from eqxlike import internal
from eqxlike.nn import _conv_cpu
from tests.nn.arrays import assert_close, normal

# Tuples (shape of x with a batch axis, shape of the weight, options). On a CPU the cases use
# different programs, in the forward pass or in a gradient.
CASES = {
    "one point": ((3, 4, 5, 4), (2, 4, 1, 1), {"window_strides": (2, 1), "padding": [(1, 0)] * 2}),
    "one point, large weight": ((2, 8, 1), (9, 8, 1), {}),
    "kernel larger than x": ((2, 3, 2, 2), (4, 3, 3, 3), {"padding": [(1, 1), (2, 1)]}),
    "gradient in parts": (
        (5, 2, 7, 6),
        (3, 2, 3, 2),
        {"window_strides": (2, 1), "padding": [(1, -1), (0, 2)], "rhs_dilation": (1, 2)},
    ),
    "groups": (
        (4, 4, 6),
        (6, 2, 3),
        {"window_strides": (2,), "feature_group_count": 2, "padding": [(1, 2)]},
    ),
    "depthwise": ((4, 3, 3, 3, 4), (3, 1, 2, 1, 2), {"feature_group_count": 3}),
    "transposed": ((3, 2, 4, 3), (2, 2, 3, 2), {"lhs_dilation": (2, 3), "padding": [(2, 1)] * 2}),
}


def with_defaults(weight, options):
    num_axes = weight.ndim - 2
    return {"window_strides": (1,) * num_axes, "padding": [(0, 0)] * num_axes, **options}


def derivatives(convolve, x, weight, options):
    """Derivatives of several modes and orders of a convolution under `vmap`."""

    def run(x, weight):
        one = functools.partial(convolve, **with_defaults(weight, options))
        return jax.vmap(lambda x: one(x[None], weight)[0])(x)

    def loss(x, weight):
        return jnp.sum(run(x, weight) ** 3)

    gradient = jax.grad(loss, (0, 1), holomorphic=True)
    dots = jnp.sin(x), jnp.cos(weight)
    pullback = jax.linear_transpose(lambda weight: run(x, weight), weight)
    return {
        "gradient, and forward over reverse": jax.jvp(gradient, (x, weight), dots),
        "reverse over reverse": jax.vjp(gradient, x, weight)[1](dots),
        "transpose": pullback(run(dots[0], weight)),
        "by examples": jax.vmap(gradient, (0, None))(x[:, None], weight),
        "ensemble": jax.vmap(gradient, (None, 0))(x, jnp.stack([weight, 2 * weight])),
    }


def test_derivatives_equal_jax(monkeypatch, getkey):
    monkeypatch.setattr(_conv_cpu, "_PART", 100)
    with jax.enable_x64():
        keys = [getkey() for _ in CASES]
        arrays = {
            name: [normal(key, shape, jnp.complex128) for shape in case[:2]]
            for (name, case), key in zip(CASES.items(), keys, strict=True)
        }

        @jax.jit
        def both(arrays):
            return [
                {name: derivatives(each, *arrays[name], CASES[name][2]) for name in CASES}
                for each in (_conv_cpu.conv, jax.lax.conv_general_dilated)
            ]

        found, expected = both(arrays)
    assert list(found) == list(expected)
    for name in CASES:
        assert_close(found[name], expected[name], 1e-9, 1e-9, err_msg=name, strict=True)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_parts_are_summed_in_float32(dtype, monkeypatch):
    monkeypatch.setattr(_conv_cpu, "_PART", 1)
    x = jnp.ones((600, 2, 4), dtype)
    for size, groups in ((3, 1), (3, 2), (4, 1)):
        options = {"window_strides": (1,), "padding": [(0, 0)], "feature_group_count": groups}
        weight = jnp.ones((2, 2 // groups, size), dtype)
        run = functools.partial(_conv_cpu.conv, x, **options)
        y, pullback = jax.vjp(run, weight)
        (found,) = jax.jit(pullback)(jnp.full_like(y, 1.0))
        rtol = 2 * float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(found.astype(jnp.float32), 600 * (5 - size), rtol)


@pytest.mark.parametrize("name", CASES)
def test_program_for_gpus_has_the_convolutions_of_jax(name):
    x_shape, weight_shape, options = CASES[name]

    def convolutions(convolve, platform):
        def loss(x, weight):
            return jnp.sum(convolve(x, weight, **with_defaults(weight, options)) ** 2)

        traced = jax.jit(jax.grad(loss, (0, 1))).trace(jnp.ones(x_shape), jnp.ones(weight_shape))
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert "stablehlo.case" not in text
        return re.findall(r"stablehlo\.convolution\(.*?\) (.*)", text)

    of_jax = convolutions(jax.lax.conv_general_dilated, "cuda")
    assert convolutions(_conv_cpu.conv, "cuda") == of_jax
    assert len(of_jax) == 3


@pytest.mark.parametrize("name", CASES)
def test_program_for_cpus_has_the_channels_last(name):
    """XLA is slow with other layouts inside loops."""
    x_shape, weight_shape, options = CASES[name]

    def loss(x, weight):
        return jnp.sum(_conv_cpu.conv(x, weight, **with_defaults(weight, options)) ** 2)

    def both(x, weight):
        return loss(x, weight), jax.grad(loss, (0, 1))(x, weight)

    text = jax.jit(both).lower(jnp.ones(x_shape), jnp.ones(weight_shape)).as_text()
    axes = ", ".join(map(str, range(len(x_shape) - 2)))
    for numbers in re.findall(r"dim_numbers = (.*?), window", text):
        assert numbers == f"[b, {axes}, f]x[{axes}, i, o]->[b, {axes}, f]"
    assert text.count("stablehlo.convolution") + text.count("stablehlo.dot_general") >= 4


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_policies_of_checkpoint_save_convolutions_on_other_platforms(platform, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    layer = eqx.nn.Conv1d(2, 4, 3, key=jax.random.key(0))
    run = jax.checkpoint(lambda x: jnp.sin(layer(x)), policy=jax.checkpoint_policies.dots_saveable)
    jaxpr = jax.make_jaxpr(jax.grad(lambda x: jnp.sum(run(x))))(jnp.ones((2, 5)))
    saved = [each.primitive for each in jaxpr.eqns].count(jax.lax.conv_general_dilated_p)
    assert saved == (0 if platform == "cpu" else 1)


def test_jet_equals_jax(getkey):
    x, weight = normal(getkey(), (2, 3, 6)), normal(getkey(), (4, 3, 2))

    def run(convolve):
        def powers(x, weight):
            y = convolve(jnp.sin(x), weight**2, **with_defaults(weight, {}))
            return jnp.sin(y)

        series = [[jnp.cos(each), each] for each in (x, weight)]
        return jet(powers, (x, weight), series)

    assert_close(run(_conv_cpu.conv), run(jax.lax.conv_general_dilated), atol=0)


def test_gradient_inside_shard_map_and_of_sharded_arrays(getkey):
    sizes = [(1, 1), (3, 1), (3, 2)]
    layers = [eqx.nn.Conv1d(2, 4, size, groups=groups, key=getkey()) for size, groups in sizes]
    x = normal(getkey(), (4, 2, 8))

    def gradient(layers, x):
        loss = lambda layers: sum(jnp.sum(jax.vmap(each)(x) ** 2) for each in layers)
        return jax.grad(loss)(layers)

    mesh = jax.make_mesh((2,), ("device",), axis_types=(jax.sharding.AxisType.Auto,))
    expected = jax.jit(gradient)(layers, x)
    # The gradient of the shared layers is the sum over devices.
    mapped = jax.shard_map(gradient, mesh=mesh, in_specs=(P(), P("device")), out_specs=P())
    placed = jax.device_put(x, jax.sharding.NamedSharding(mesh, P("device")))
    for found in (jax.jit(mapped)(layers, x), jax.jit(gradient)(layers, placed)):
        assert_close(found, expected, atol=0)


def test_finalised_program_has_the_convolution_of_jax():
    layer = eqx.nn.Conv1d(2, 4, 3, key=jax.random.key(0))
    jaxpr = internal.finalise_make_jaxpr(layer)(jnp.ones((2, 5)))
    assert jax.lax.conv_general_dilated_p in [each.primitive for each in jaxpr.eqns]
