import dataclasses
import functools

import equinox
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqxlike as eqx
from eqxlike import nn
from tests.nn.arrays import filled, normal

# Class, sizes, options.
LAYERS = {
    "Conv1d-lower": ("Conv1d", (2, 4, 3), {"stride": 2, "padding": "same_lower"}),
    "Conv1d-negative": ("Conv1d", (2, 4, 3), {"padding": (-1,), "use_bias": False}),
    "Conv2d-by-axis": (
        "Conv2d",
        (4, 4, (3, 3)),
        {"stride": (1, 2), "padding": ((0, 1), (2, 0)), "dilation": (2, 1), "groups": 2},
    ),
    "Conv2d-reflect": ("Conv2d", (2, 4, 3), {"padding": "SAME", "padding_mode": "reflect"}),
    "Conv2d-replicate": ("Conv2d", (2, 4, 3), {"padding": 3, "padding_mode": "REPLICATE"}),
    "Conv2d-circular": (
        "Conv2d",
        (2, 4, 3),
        {"padding": ((0, 9), (2, 1)), "stride": 2, "padding_mode": "CIRCULAR"},
    ),
    "Conv3d": ("Conv3d", (1, 2, 2), {"padding": (0, 1, 2)}),
    "Conv": ("Conv", (1, 2, 4, 3), {"padding": "VALID"}),
}


def assert_as_in_equinox(layers, drawn, sizes, getkey):
    """Fields and outputs of `layers`, of the same arrays; and what one key draws for some.

    `sizes` are those of the inputs.
    """
    made = {
        name: [
            functools.partial(getattr(module, layer), *arguments, **options)
            for module in (nn, equinox.nn)
        ]
        for name, (layer, arguments, options) in layers.items()
    }
    pairs = [[filled(make, key=jr.key(0)) for make in both] for both in made.values()]
    xs = [
        normal(getkey(), (ours.in_channels, *sizes[: ours.num_spatial_dims])) for ours, _ in pairs
    ]

    @eqx.filter_jit
    def outputs_and_drawn(pairs, key):
        outputs = [[each(x) for each in pair] for pair, x in zip(pairs, xs, strict=True)]
        return outputs, [[make(key=jr.clone(key)) for make in made[name]] for name in drawn]

    outputs, drawn = outputs_and_drawn(pairs, getkey())
    for found, expected in outputs:
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    for ours, theirs in [*pairs, *drawn]:
        for own, their in zip(dataclasses.fields(ours), dataclasses.fields(theirs), strict=True):
            assert own.name == their.name
            values = [getattr(each, own.name) for each in (ours, theirs)]
            # To compare NumPy's arrays compiles nothing.
            values = [np.asarray(each) if isinstance(each, jax.Array) else each for each in values]
            assert equinox.tree_equal(*values), own.name


def test_fields_outputs_and_what_a_key_draws_are_those_of_equinox(getkey):
    drawn = ["Conv1d-negative", "Conv2d-by-axis"]
    assert_as_in_equinox(LAYERS, drawn, (5, 6, 4), getkey)


@pytest.mark.parametrize(
    ("cls", "out_shape"), [(nn.Conv2d, (3, 3)), (nn.ConvTranspose2d, (12, 10))]
)
def test_jaxpr_is_one_convolution_and_the_bias_also_for_an_empty_batch(cls, out_shape, getkey):
    layer = cls(2, 4, 3, 2, padding="SAME", key=getkey())
    jaxpr = jax.make_jaxpr(lambda layer, x: layer(x))(layer, jnp.ones((2, 6, 6)))
    names = [equation.primitive.name for equation in jaxpr.eqns]
    # The first and the third add and take away a batch axis of length one.
    assert names == ["broadcast_in_dim", "conv_general_dilated", "squeeze", "add"]
    assert jax.vmap(layer)(jnp.ones((0, 2, 6, 5))).shape == (0, 4, *out_shape)


def test_no_channels_give_the_bias(getkey):
    layer = nn.Conv1d(0, 4, 3, key=getkey())
    np.testing.assert_array_equal(
        layer(jnp.ones((0, 5))), jnp.broadcast_to(layer.bias, (4, 3)), strict=True
    )


def test_initializers_see_the_fan_in_of_the_kernel_and_the_shape_of_the_bias(getkey):
    initializers = jax.nn.initializers
    options = {"weight_init": initializers.he_normal(), "bias_init": initializers.constant(0.5)}
    layer = nn.Conv2d(50, 60, 3, **options, key=getkey())
    assert layer.weight.shape == (60, 50, 3, 3)
    np.testing.assert_allclose(layer.weight.std(), (2 / (50 * 9)) ** 0.5, rtol=0.02)
    assert layer.bias.tolist() == [[[0.5]]] * 60


def test_wrong_shape_is_named(getkey):
    layer = nn.Conv2d(2, 4, 3, key=getkey())
    for shape in ((3, 6, 6), (2, 6), (5, 2, 6, 6)):
        with pytest.raises(
            ValueError, match=r"Conv2d expected x of shape \(2, height, width\), got"
        ):
            layer(jnp.ones(shape))


def test_small_input_is_named_with_the_path_of_the_layer(getkey):
    class Encoder(eqx.Module):
        layers: list

        def encode(self, x):
            return self.layers[0](x)

    model = Encoder([nn.Conv2d(2, 4, 3, padding=(0, 1), dilation=2, key=getkey())])
    with pytest.raises(
        ValueError,
        match=r"Conv2d at Encoder\.layers\[0\] .* as its window, \(5, 5\); got x of shape "
        r"\(2, 4, 6\), whose spatial axes have sizes \(4, 8\) after padding",
    ):
        model.encode(jnp.ones((2, 4, 6)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"in_channels": -1}, "in_channels must be an integer of at least 0, got -1"),
        ({"groups": 0}, "groups must be an integer of at least 1, got 0"),
        ({"groups": 4}, "in_channels must be divisible by groups, got in_channels=2 and groups=4"),
        ({"groups": 2}, "out_channels must be divisible by groups, got out_channels=3"),
        ({"kernel_size": (3, 3, 3)}, r"kernel_size must .* of 2 such integers, .* got \(3, 3, 3\)"),
        ({"kernel_size": 0}, "kernel_size must be an integer of at least 1, .* got 0"),
        ({"stride": (1, 0)}, r"stride must be an integer of at least 1, .* got \(1, 0\)"),
        ({"dilation": "two"}, "dilation must be an integer of at least 1, .* got 'two'"),
        ({"padding": "LARGE"}, "padding must be .* 'VALID', 'SAME', 'SAME_LOWER'; got 'LARGE'"),
        ({"padding": (1,)}, r"padding must be .* a sequence of 2 integers .* got \(1,\)"),
        ({"padding": ((1, 2, 3), 1)}, "padding must be .* pairs of integers"),
        ({"padding_mode": "MIRROR"}, "padding_mode must be one of 'ZEROS', .* got 'MIRROR'"),
        ({"padding_mode": 3}, "padding_mode must be one of 'ZEROS', .* got 3"),
        (
            {"padding": -1, "padding_mode": "REFLECT"},
            "padding must not be negative for padding_mode='REFLECT'",
        ),
    ],
)
def test_bad_argument_is_named(options, message, getkey):
    sizes = {"in_channels": 2, "out_channels": 3, "kernel_size": 3}
    with pytest.raises(ValueError, match=message):
        nn.Conv2d(**(sizes | options), key=getkey())


def test_number_of_axes_of_a_layer_is_not_for_its_subclasses_to_say():
    with pytest.raises(TypeError, match="no keyword arguments"):

        class Other(nn.Conv2d, num_axes=3):  # pyright: ignore
            pass
