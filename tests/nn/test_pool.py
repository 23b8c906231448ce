import dataclasses
import io
import math

import equinox
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax import lax
from jax.test_util import check_grads

import eqxlike as eqx
from eqxlike import nn

POOLS = {
    "Avg1d-ceil": ("AvgPool1d", (3, 2), {"use_ceil": True}),
    "Avg2d": ("AvgPool2d", (2,), {}),
    "Avg3d-by-axis": ("AvgPool3d", ((1, 2, 2), (1, 2, 1)), {"padding": (0, 1, 0)}),
    "Max1d-wide-stride": ("MaxPool1d", (2, 4), {"padding": 1}),
    "Max2d-pairs": ("MaxPool2d", (3, 2, ((0, 1), (2, 0))), {}),
    "Max2d-ceil": ("MaxPool2d", (3, 2, 0, True), {}),
    "Max3d": ("MaxPool3d", (2,), {"stride": 2}),
    "Pool-min": ("Pool", (math.inf, lax.min, 1, 2, 1, 1), {}),
    "Pool-product": ("Pool", (1.0, lax.mul, 2, (2, 3), 2, 1), {}),
    "Pool-array": ("Pool", (jnp.array(-jnp.inf), lax.max, 1, 2, 2), {}),
}
SIZES = (4, 5, 3)


@pytest.mark.parametrize("name", POOLS)
def test_fields_and_outputs_are_those_of_equinox(name, getkey):
    layer, sizes, options = POOLS[name]
    ours, theirs = (getattr(module, layer)(*sizes, **options) for module in (nn, equinox.nn))
    own_fields = [each.name for each in dataclasses.fields(ours)]
    assert own_fields[:7] == [each.name for each in dataclasses.fields(theirs)]
    for each in own_fields[:7]:
        assert getattr(ours, each) == getattr(theirs, each)
    x = jr.normal(getkey(), (2, *SIZES[: ours.num_spatial_dims]))
    np.testing.assert_allclose(
        eqx.filter_jit(ours)(x), equinox.filter_jit(theirs)(x), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int32, jnp.complex64])
@pytest.mark.parametrize("name", ["AvgPool1d", "MaxPool1d"])
def test_dtype_of_output_is_that_of_equinox(name, dtype):
    x = jnp.array([[1, 0, 3, 2]], dtype)
    ours, theirs = (
        eqx.filter_jit(getattr(module, name)(2, padding=1))(x) for module in (nn, equinox.nn)
    )
    assert ours.dtype == theirs.dtype
    np.testing.assert_array_equal(ours, theirs)


def test_file_is_read_by_equinox_and_back():
    there, here = equinox.nn.Pool(2, lax.add, 1, 2), nn.Pool(0, lax.add, 1, 2)
    written, back = io.BytesIO(), io.BytesIO()
    equinox.tree_serialise_leaves(written, there)
    written.seek(0)
    here = eqx.tree_deserialise_leaves(written, here)
    assert here.init == 2
    eqx.tree_serialise_leaves(back, here)
    assert back.getvalue() == written.getvalue()


def test_average_of_small_floats_is_summed_in_float32():
    ones = jnp.ones((1, 1000), jnp.bfloat16)
    assert nn.AvgPool1d(1000)(ones).tolist() == [[1]]


def test_average_of_small_integers_does_not_overflow():
    assert nn.AvgPool1d(4)(jnp.full((1, 4), 255, jnp.uint8)).tolist() == [[255]]


def test_average_of_booleans_is_how_often_they_are_true():
    assert nn.AvgPool1d(2)(jnp.array([[True, False, False]])).tolist() == [[0.5, 0]]


def test_average_without_the_padding_is_the_mean_of_what_is_there():
    pool = nn.AvgPool1d(3, 2, padding=((1, 3),), count_include_pad=False)
    assert pool(jnp.array([[2.0, 4.0, 6.0]])).tolist() == [[3, 5, 0]]


def test_padding_words_are_those_of_convolutions():
    x = jnp.array([[1.0, 2.0, 3.0, 4.0]])
    assert nn.MaxPool1d(2, padding="SAME")(x).tolist() == [[2, 3, 4, 4]]
    assert nn.MaxPool1d(2, padding="same_lower")(x).tolist() == [[1, 2, 3, 4]]
    assert nn.MaxPool1d(2, padding="VALID")(x).tolist() == [[2, 3, 4]]


def test_negative_padding_cuts_off_even_for_a_window_of_one():
    x = jnp.array([[1.0, 2.0, 3.0, 4.0]])
    assert nn.MaxPool1d(1, padding=-1)(x).tolist() == [[2, 3]]
    assert nn.MaxPool1d(1, padding=((-2, 1),))(x).tolist() == [[3, 4, -math.inf]]


def test_no_window_begins_beyond_the_input():
    x = jnp.array([[1.0, 2.0, 3.0, 4.0]])
    assert nn.MaxPool1d(2, 4, use_ceil=True)(x).tolist() == [[2]]
    assert nn.MaxPool1d(2, 3, use_ceil=True)(x).tolist() == [[2, 4]]


def test_any_operation_can_be_differentiated(getkey):
    pool = nn.Pool(1.0, lax.mul, 2, (2, 3), 2, 1)
    x = jr.normal(getkey(), (2, 3, 4))
    check_grads(eqx.filter_jit(pool), (x,), order=1, rtol=1e-2, atol=1e-2)


def test_an_initial_value_that_is_an_array_can_be_differentiated_under_jit():
    pool = nn.Pool(jnp.array(-jnp.inf), lax.max, 1, 2)
    gradient = eqx.filter_jit(eqx.filter_grad(lambda x, pool: jnp.sum(pool(x))))
    assert gradient(jnp.array([[1.0, 3.0, 2.0]]), pool).tolist() == [[0, 2, 0]]


def test_a_number_takes_the_dtype_of_the_input():
    squares = nn.Pool(0, lambda total, x: total + x * x, 1, 2)
    assert squares(jnp.array([[1.0, 2.0, 3.0]])).tolist() == [[5, 13]]


@pytest.mark.parametrize("name", ["AvgPool2d", "MaxPool2d"])
def test_jaxpr_is_one_reduction_with_the_channels_last(name):
    jaxpr = jax.make_jaxpr(getattr(nn, name)(3, 2, 1))(jnp.ones((2, 6, 6)))
    equations = {each.primitive.name: each for each in jaxpr.eqns}
    average = ["transpose", "reduce_window_sum", "transpose", "div"]
    maximum = ["transpose", "reduce_window_max", "transpose"]
    expected = {"AvgPool2d": average, "MaxPool2d": maximum}[name]
    assert [each.primitive.name for each in jaxpr.eqns] == expected
    assert equations[expected[1]].params["window_dimensions"] == (3, 3, 1)


def test_empty_batch_gives_an_empty_batch():
    assert jax.vmap(nn.AvgPool2d(2))(jnp.ones((0, 2, 4, 3))).shape == (0, 2, 3, 2)


def test_wrong_number_of_axes_is_named():
    with pytest.raises(
        ValueError, match=r"MaxPool2d expected x of shape \(channels, height, width\), got"
    ):
        nn.MaxPool2d(2)(jnp.ones((4, 4)))


def test_small_input_is_named_with_the_path_of_the_layer():
    model = nn.Sequential([nn.AvgPool1d(3)])
    with pytest.raises(
        ValueError, match=r"AvgPool1d at Sequential\.layers\[0\] .* its window, \(3,\); got .* 2\)"
    ):
        model(jnp.ones((1, 2)))


def test_padding_longer_than_the_window_is_named():
    with pytest.raises(RuntimeError, match=r"no longer than its window, .* padding=\(\(3, 3\),\)"):
        nn.MaxPool1d(2, padding=3)(jnp.ones((1, 4)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel_size": (2,)}, r"kernel_size must .* of 2 such, .* got \(2,\)"),
        ({"stride": 0}, "stride must be an integer of at least 1"),
        ({"padding": "LARGE"}, "padding must be .* got 'LARGE'"),
    ],
)
def test_bad_argument_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        nn.MaxPool2d(**({"kernel_size": 2} | options))
