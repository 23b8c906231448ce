import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqxlike as eqx
from eqxlike import nn
from tests.nn.arrays import normal
from tests.nn.test_conv import assert_as_in_equinox

# Class, sizes, options.
LAYERS = {
    "ConvTranspose1d-lower": (
        "ConvTranspose1d",
        (2, 4, 3),
        {"stride": 3, "padding": "SAME_LOWER", "output_padding": 1},
    ),
    "ConvTranspose1d-wide-stride": ("ConvTranspose1d", (2, 4, 3), {"stride": 5, "padding": "SAME"}),
    "ConvTranspose-by-position": ("ConvTranspose", (1, 2, 4, 3, 2, 1, 0), {}),
    "ConvTranspose2d-by-axis": (
        "ConvTranspose2d",
        (4, 4, 3),
        {
            "stride": (3, 2),
            "padding": ((0, 1), (2, -1)),
            "output_padding": (2, 0),
            "dilation": (1, 2),
            "groups": 2,
        },
    ),
    "ConvTranspose2d-circular": (
        "ConvTranspose2d",
        (2, 4, 3),
        {"stride": (2, 1), "padding": "SAME", "dilation": (1, 2), "padding_mode": "circular"},
    ),
    "ConvTranspose3d": ("ConvTranspose3d", (1, 2, 2), {"padding": "VALID", "stride": (1, 2, 1)}),
}


def test_fields_outputs_and_what_a_key_draws_are_those_of_equinox(getkey):
    drawn = ["ConvTranspose1d-lower", "ConvTranspose2d-by-axis"]
    assert_as_in_equinox(LAYERS, drawn, (4, 5, 3), getkey)


@pytest.mark.parametrize(
    ("mode", "padding"),
    [("ZEROS", (1, 2)), ("REFLECT", (1, 2)), ("REPLICATE", "SAME"), ("CIRCULAR", "SAME_LOWER")],
)
def test_it_is_the_transpose_of_a_convolution_in_every_padding_mode(mode, padding, getkey):
    options = {
        "kernel_size": 3,
        "stride": (2, 3),
        "padding": padding,
        "padding_mode": mode,
        "dilation": (1, 2),
        "use_bias": False,
    }
    # Of sizes that are no multiples of the stride.
    x = jax.ShapeDtypeStruct((2, 5, 7), jnp.float32)
    there = nn.Conv2d(2, 2, **options, key=getkey())
    y_key, key = getkey(), getkey()

    @eqx.filter_jit
    def found_and_expected(there):
        y = normal(y_key, jax.eval_shape(there, x).shape)
        (expected,) = jax.linear_transpose(there, x)(y)
        smaller = jax.eval_shape(nn.ConvTranspose2d(2, 2, **options, key=key), y).shape
        more = tuple(abs(size - base) for size, base in zip(x.shape[1:], smaller[1:], strict=True))
        back = nn.ConvTranspose2d(2, 2, output_padding=more, **options, key=jr.clone(key))
        kernel = jnp.flip(there.weight, axis=(2, 3)).swapaxes(0, 1)
        return eqx.tree_at(lambda layer: layer.weight, back, kernel)(y), expected

    np.testing.assert_allclose(*found_and_expected(there), rtol=1e-5, atol=1e-5)


def test_wrong_shape_and_padding_that_leaves_no_output_are_named(getkey):
    layer = nn.ConvTranspose1d(2, 4, 3, padding=4, key=getkey())
    with pytest.raises(ValueError, match=r"ConvTranspose1d expected x of shape \(2, length\), got"):
        layer(jnp.ones((3, 5)))
    with pytest.raises(ValueError, match=r"ConvTranspose1d .* an output of sizes \(0,\)"):
        layer(jnp.ones((2, 6)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output_padding": 2}, r"output_padding=\(2, 2\) and stride=\(2, 2\)"),
        ({"output_padding": -1}, "output_padding must be an integer of at least 0, .* got -1"),
        ({"groups": 2}, "out_channels must be divisible by groups"),
        ({"padding_mode": "MIRROR"}, "padding_mode must be one of 'ZEROS'"),
    ],
)
def test_bad_argument_is_named(options, message, getkey):
    with pytest.raises(ValueError, match=message):
        nn.ConvTranspose2d(2, 3, 3, stride=2, **options, key=getkey())
