"""Pooling, compared with Equinox and with `jax.lax.reduce_window`."""

import dataclasses
import functools
import math

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.test_util import check_grads

import eqxlike as eqx
from eqxlike import nn
from tests.nn.arrays import assert_close, normal
from tests.nn.mistakes import each_mistake

POOLS = {
    "Avg1d-ceil": ("AvgPool1d", (3, 2), {"use_ceil": True}),
    "Avg2d": ("AvgPool2d", (2,), {}),
    "Avg3d-by-axis": ("AvgPool3d", ((1, 2, 2), (1, 2, 1)), {"padding": (0, 1, 0)}),
    "Max1d-wide-stride": ("MaxPool1d", (2, 4), {"padding": 1}),
    "Max2d-pairs": ("MaxPool2d", (3, 2, ((0, 1), (2, 0))), {}),
    "Max2d-ceil": ("MaxPool2d", (3, 2, 0, True), {}),
    "Max3d": ("MaxPool3d", (2,), {"stride": 2}),
    "Pool-min": ("Pool", (math.inf, lax.min, 1, 2, 1, 1), {}),
    "Pool-array": ("Pool", (jnp.array(-jnp.inf), lax.max, 1, 2, 2), {}),
}
SIZES = (4, 5, 3)


ADAPTIVE = {
    "AdaptiveAvgPool2d": ((2, 3),),
    "AdaptiveAvgPool3d": (2,),
    "AdaptiveMaxPool1d": (5,),
    "AdaptiveMaxPool3d": (1,),
    "AdaptivePool": ((3, 2), 2, jnp.median),
}


def test_fields_and_outputs_equal_equinox(getkey):
    pairs, xs = [], []
    layers = [*POOLS.values(), *((name, sizes, {}) for name, sizes in ADAPTIVE.items())]
    for layer, sizes, options in layers:
        ours, theirs = (getattr(module, layer)(*sizes, **options) for module in (nn, equinox.nn))
        names = [each.name for each in dataclasses.fields(theirs)]
        is_adaptive = layer in ADAPTIVE
        compared = 2 if is_adaptive else 7
        assert [each.name for each in dataclasses.fields(ours)][:compared] == names
        for name in names:
            assert getattr(ours, name) == getattr(theirs, name)
        num_axes = len(ours.target_shape) if is_adaptive else ours.num_spatial_dims
        xs.append(normal(getkey(), (2, *((5, 7, 4) if is_adaptive else SIZES)[:num_axes])))
        pairs.append((ours, theirs))
    outputs = eqx.filter_jit(
        lambda pairs: [[layer(x) for layer in pair] for pair, x in zip(pairs, xs, strict=True)]
    )
    for found, expected in outputs(pairs):
        assert_close(found, expected)


def test_average_is_summed_in_a_dtype_that_holds_it():
    small = np.full((1, 4), 255, np.uint8)
    pools, xs = zip(
        (nn.AvgPool1d(1000), np.ones((1, 1000), jnp.bfloat16)),
        (nn.AvgPool1d(2), np.array([[True, False, False]])),
        (nn.AvgPool1d(4), small),
        (nn.AdaptiveAvgPool1d(1), small),
        (nn.MaxPool1d(2, padding=1), np.array([[1, 0, 3, 2]], np.int32)),
        strict=True,
    )
    outputs = jax.jit(lambda xs: [pool(x) for pool, x in zip(pools, xs, strict=True)])(xs)
    half, booleans, mean, adaptive, whole = outputs
    assert (half.dtype, half.tolist()) == (jnp.bfloat16, [[1]])
    assert booleans.tolist() == [[0.5, 0]]
    assert mean.tolist() == adaptive.tolist() == [[255]]
    assert mean.dtype == jnp.float32
    assert (whole.dtype, whole.tolist()) == (jnp.int32, [[1, 1, 3, 3, 2]])


def test_padding_may_be_a_word_or_negative_and_need_not_count_in_the_average():
    x = jnp.array([[1.0, 2.0, 3.0, 4.0]])
    pools = [
        (nn.MaxPool1d(2, padding="SAME"), [2, 3, 4, 4]),
        (nn.MaxPool1d(2, padding="same_lower"), [1, 2, 3, 4]),
        (nn.MaxPool1d(2, padding="VALID"), [2, 3, 4]),
        # Negative padding crops the input, even for windows of size 1.
        (nn.MaxPool1d(1, padding=-1), [2, 3]),
        (nn.MaxPool1d(1, padding=((-2, 1),)), [3, 4, -math.inf]),
        # No window starts beyond the input.
        (nn.MaxPool1d(2, 4, use_ceil=True), [2]),
        (nn.MaxPool1d(2, 3, use_ceil=True), [2, 4]),
        (nn.AvgPool1d(3, 2, padding=((1, 3),), count_include_pad=False), [1.5, 3, 4]),
        (nn.Pool(0, lambda total, x: total + x * x, 1, 2), [5, 13, 25]),
    ]
    outputs = jax.jit(lambda x: [pool(x) for pool, _ in pools])(x)
    assert [each.tolist() for each in outputs] == [[expected] for _, expected in pools]
    pool = nn.AvgPool1d(3, 2, padding=((1, 3),), count_include_pad=False)
    assert pool(jnp.array([[2.0, 4.0, 6.0]])).tolist() == [[3, 5, 0]]


def test_derivatives_of_short_windows_equal_reduce_window(getkey):
    operations = ((lax.max, -jnp.inf), (lax.min, jnp.inf), (lax.add, 0.0))
    windows = ((2, 2, 0), (3, 2, 1), ((2, 4), (2, 4), (1, 0)), (2, 3, 0))
    pools = [nn.Pool(init, each, 2, *window) for each, init in operations for window in windows]
    # Most windows contain equal entries.
    x, tangent = jnp.round(normal(getkey(), (2, 7, 9))), normal(getkey(), (2, 7, 9))

    def reduce_window(pool, x):
        sizes = ((1, *each) for each in (pool.kernel_size, pool.stride))
        return lax.reduce_window(x, pool.init, pool.operation, *sizes, ((0, 0), *pool.padding))

    def derivatives(function, x, tangent):
        out, forward = jax.jvp(function, (x,), (tangent,))
        gradient = jax.grad(lambda x: jnp.sum(function(x) ** 3))
        return out, forward, *jax.jvp(gradient, (x,), (tangent,))

    @jax.jit
    def both(x, tangent):
        return [
            [derivatives(of, x, tangent) for of in (pool, functools.partial(reduce_window, pool))]
            for pool in pools
        ]

    for pool, (found, expected) in zip(pools, both(x, tangent), strict=True):
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-4, err_msg=str(pool))


def test_nan_is_the_maximum_and_the_minimum_of_its_window():
    x = jnp.array([[jnp.nan, 1.0, 2.0, jnp.nan, 3.0, 4.0]])
    for operation, init, last in ((jax.lax.max, -jnp.inf, 4), (jax.lax.min, jnp.inf, 3)):
        out = nn.Pool(init, operation, 1, 2, 2)(x)
        np.testing.assert_array_equal(out, [[jnp.nan, jnp.nan, last]])


def test_gradients_exist_for_any_operation_and_initial_value(getkey):
    pool = nn.Pool(1.0, lax.mul, 2, (2, 3), 2, 1)
    x = normal(getkey(), (2, 3, 4))
    check_grads(eqx.filter_jit(pool), (x,), order=1, rtol=1e-2, atol=1e-2)
    pool = nn.Pool(jnp.array(-jnp.inf), lax.max, 1, 2)
    gradient = eqx.filter_jit(eqx.filter_grad(lambda x, pool: jnp.sum(pool(x))))
    assert gradient(jnp.array([[1.0, 3.0, 2.0]]), pool).tolist() == [[0, 2, 0]]


def test_empty_batch_gives_an_empty_batch():
    pooled = jax.jit(lambda *xs: [jax.vmap(pool)(x) for pool, x in zip(pools, xs, strict=True)])
    pools = nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(2)
    outputs = pooled(np.ones((0, 2, 4, 3), "f"), np.ones((0, 3, 5, 4), "f"))
    assert [each.shape for each in outputs] == [(0, 2, 3, 2), (0, 3, 2, 2)]


def test_adaptive_windows_are_disjoint_and_longer_windows_come_first_unless_they_overlap():
    x = jnp.arange(10.0)[None]
    image = jnp.asarray(np.arange(12.0, dtype=np.float32).reshape(1, 3, 4))

    @jax.jit
    def outputs(x, image):
        disjoint, overlapping = nn.AdaptiveMaxPool1d(4), nn.AdaptiveMaxPool1d(4, overlap=True)
        # There are more windows than entries.
        more = nn.AdaptiveAvgPool1d(3, overlap=True)
        return disjoint(x), overlapping(x), more(x[:, 1:3]), nn.AdaptiveMaxPool2d(3)(image)

    disjoint, overlapping, more, of_image = outputs(x, image)
    assert disjoint.tolist() == [[2, 5, 7, 9]]
    assert overlapping.tolist() == [[2, 4, 7, 9]]
    assert more.tolist() == [[1, 1.5, 2]]
    assert of_image.tolist() == [[[1, 2, 3], [5, 6, 7], [9, 10, 11]]]
    assert nn.AdaptiveAvgPool2d([2, 3]).target_shape == (2, 3)


def test_jaxpr_has_one_reduction_and_moves_the_channels_once():
    jaxpr = jax.make_jaxpr(nn.MaxPool2d(5, 2, 1))(jnp.ones((2, 6, 6)))
    names = [equation.primitive.name for equation in jaxpr.eqns]
    assert names == ["transpose", "reduce_window_max", "transpose"]
    assert jaxpr.eqns[1].params["window_dimensions"] == (5, 5, 1)
    # For short windows, entries are reduced one by one, and the gradient has no scatter.
    gradient = jax.make_jaxpr(jax.grad(lambda x: nn.MaxPool2d(2, 2)(x).sum()))(jnp.ones((2, 6, 6)))
    assert not {"reduce_window_max", "select_and_scatter_add"} & set(str(gradient).split())
    assert "concatenate" in str(gradient)
    jaxpr = jax.make_jaxpr(nn.AdaptiveMaxPool2d(2))(jnp.ones((3, 4, 7)))
    names = {equation.primitive.name for equation in jaxpr.eqns}
    assert names == {"slice", "reshape", "reduce_max", "concatenate"}


def max_pool(**options):
    return lambda: nn.MaxPool2d(**({"kernel_size": 2} | options))


MISTAKES = {
    ValueError: {
        r"MaxPool2d .* \(channels, height, width\), got": lambda: nn.MaxPool2d(2)(jnp.ones((4, 4))),
        r"AvgPool1d at Sequential\.layers\[0\] .* its window, \(3,\); got .* 2\)": (
            lambda: nn.Sequential([nn.AvgPool1d(3)])(jnp.ones((1, 2)))
        ),
        r"AdaptiveAvgPool2d .* \(channels, hei": (
            lambda: nn.AdaptiveAvgPool2d(2)(jnp.ones((4, 4)))
        ),
        r"AdaptiveAvgPool2d expected at least 3 entries along axis 2 of x, .* 2\)": (
            lambda: nn.AdaptiveAvgPool2d(3)(jnp.ones((1, 4, 2)))
        ),
        r"kernel_size must .* of 2 such integers, .* got \(2,\)": max_pool(kernel_size=(2,)),
        "stride must be an integer of at least 1": max_pool(stride=0),
        "padding must be .* got 'LARGE'": max_pool(padding="LARGE"),
    },
    RuntimeError: {
        r"no larger than its window, .* padding=\(\(3, 3\),\)": (
            lambda: nn.MaxPool1d(2, padding=3)(jnp.ones((1, 4)))
        )
    },
}


@each_mistake(MISTAKES)
def test_mistakes_are_refused(error, words, call):
    with pytest.raises(error, match=words):
        call()


def test_wrong_targets_are_refused():
    for target in (0, (2,), 2.0, (2, None)):
        with pytest.raises(ValueError, match="target_shape must be an integer of at least 1"):
            nn.AdaptiveAvgPool2d(target)


def test_dtype_without_infinity_is_padded():
    x = jnp.array([[1.0, 2.0]]).astype(jnp.float8_e4m3fn)
    assert nn.MaxPool1d(2, 2, 1)(x).astype(jnp.float32).tolist() == [[1, 2]]
