"""Convolutions are compared with Equinox, transposed convolutions with `jax.linear_transpose`."""

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
from tests.nn.arrays import assert_close, filled, normal
from tests.nn.mistakes import each_mistake

CIRCULAR = {"padding_mode": "circular"}

# Tuples (class, arguments, options).
LAYERS = {
    "lower": ("Conv1d", (2, 4, 3, 2, "same_lower"), {}),
    "negative": ("Conv1d", (2, 4, 3), {"padding": (-1,), "use_bias": False}),
    "by axis": ("Conv2d", (4, 4, (3, 3), (1, 2), ((0, 1), (2, 0)), (2, 1), 2), {}),
    "reflect": ("Conv2d", (2, 4, 3), {"padding": "SAME", "padding_mode": "reflect"}),
    "replicate": ("Conv2d", (2, 4, 3), {"padding": 3, "padding_mode": "REPLICATE"}),
    "circular": ("Conv2d", (2, 4, 3, 2, ((0, 9), (2, 1))), {"padding_mode": "CIRCULAR"}),
    "3d": ("Conv3d", (1, 2, 2), {"padding": (0, 1, 2)}),
    "any number of axes": ("Conv", (1, 2, 4, 3), {"padding": "VALID"}),
}
TRANSPOSED = {
    "lower": ("ConvTranspose1d", (2, 4, 3, 3, 1, "SAME_LOWER"), {}),
    "wide stride": ("ConvTranspose1d", (2, 4, 3), {"stride": 5, "padding": "SAME"}),
    "any number of axes": ("ConvTranspose", (1, 2, 4, 3, 2, 1, 0), {}),
    "by axis": (
        "ConvTranspose2d",
        (4, 4, 3, (3, 2), (2, 0), ((0, 1), (2, -1)), (1, 2), 2),
        {},
    ),
    "circular": ("ConvTranspose2d", (2, 4, 3, (2, 1), 0, "SAME", (1, 2)), CIRCULAR),
    "3d": ("ConvTranspose3d", (1, 2, 2), {"padding": "VALID", "stride": (1, 2, 1)}),
}


@pytest.mark.parametrize("layers", [LAYERS, TRANSPOSED], ids=["plain", "transposed"])
def test_fields_outputs_and_draws_equal_equinox(layers, getkey):
    made = {
        name: [
            functools.partial(getattr(module, layer), *arguments, **options)
            for module in (nn, equinox.nn)
        ]
        for name, (layer, arguments, options) in layers.items()
    }
    pairs = [[filled(make, key=jr.key(0)) for make in both] for both in made.values()]
    sizes = [(ours.in_channels, *(5, 6, 4)[: ours.num_spatial_dims]) for ours, _ in pairs]
    xs = [normal(getkey(), size) for size in sizes]

    @eqx.filter_jit
    def outputs_and_drawn(pairs, key):
        outputs = [[each(x) for each in pair] for pair, x in zip(pairs, xs, strict=True)]
        drawn = [made[name] for name in ("negative", "lower", "by axis") if name in made]
        return outputs, [[make(key=jr.clone(key)) for make in both] for both in drawn]

    outputs, drawn = outputs_and_drawn(pairs, getkey())
    for found, expected in outputs:
        assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for ours, theirs in [*pairs, *drawn]:
        for own, their in zip(dataclasses.fields(ours), dataclasses.fields(theirs), strict=True):
            assert own.name == their.name
            values = [getattr(each, own.name) for each in (ours, theirs)]
            # Comparing NumPy arrays compiles nothing.
            values = [np.asarray(each) if isinstance(each, jax.Array) else each for each in values]
            assert equinox.tree_equal(*values), own.name


def test_jaxpr_is_one_convolution_and_the_bias(getkey):
    for cls, out_shape in ((nn.Conv2d, (3, 3)), (nn.ConvTranspose2d, (12, 10))):
        layer = cls(2, 4, 3, 2, padding="SAME", key=getkey())
        jaxpr = jax.make_jaxpr(lambda layer, x: layer(x))(layer, jnp.ones((2, 6, 6)))
        names = [equation.primitive.name for equation in jaxpr.eqns]
        # The first and the third operation add and remove a batch axis of length one.
        assert names == ["broadcast_in_dim", "conv_general_dilated", "squeeze", "add"]
        assert jax.vmap(layer)(jnp.ones((0, 2, 6, 5))).shape == (0, 4, *out_shape)


def test_input_without_channels_gives_the_bias(getkey):
    layer = nn.Conv1d(0, 4, 3, key=getkey())
    bias = jnp.broadcast_to(layer.bias, (4, 3))
    np.testing.assert_array_equal(layer(jnp.ones((0, 5))), bias, strict=True)


def test_initializers_are_called_with_the_fan_in_of_the_kernel_and_the_shape_of_the_bias(getkey):
    initializers = jax.nn.initializers
    options = {"weight_init": initializers.he_normal(), "bias_init": initializers.constant(0.5)}
    layer = nn.Conv2d(50, 60, 3, **options, key=getkey())
    assert layer.weight.shape == (60, 50, 3, 3)
    np.testing.assert_allclose(layer.weight.std(), (2 / (50 * 9)) ** 0.5, rtol=0.02)
    assert layer.bias.tolist() == [[[0.5]]] * 60


def test_wrong_input_is_refused_with_the_path_of_the_layer(getkey):
    class Encoder(eqx.Module):
        layers: list

        def encode(self, x):
            return self.layers[0](x)

    model = Encoder([nn.Conv2d(2, 4, 3, padding=(0, 1), dilation=2, key=getkey())])
    message = (
        r"Conv2d at Encoder\.layers\[0\] .* as its window, \(5, 5\); got x of shape "
        r"\(2, 4, 6\), whose spatial axes have sizes \(4, 8\) after padding"
    )
    with pytest.raises(ValueError, match=message):
        model.encode(jnp.ones((2, 4, 6)))
    for shape in ((3, 6, 6), (2, 6), (5, 2, 6, 6)):
        message = r"Conv2d at .* expected x of shape \(2, height, width\), got"
        with pytest.raises(ValueError, match=message):
            model.encode(jnp.ones(shape))


def conv(cls=nn.Conv2d, **options):
    sizes = {"in_channels": 2, "out_channels": 3, "kernel_size": 3}
    return lambda: cls(**(sizes | options), key=jr.key(0))


def transposed(**options):
    return conv(nn.ConvTranspose2d, stride=2, **options)


def call_transposed(*shape):
    return lambda: nn.ConvTranspose1d(2, 4, 3, padding=4, key=jr.key(0))(jnp.ones(shape))


MISTAKES = {
    ValueError: {
        "in_channels must be an integer of at least 0, got -1": conv(in_channels=-1),
        "groups must be an integer of at least 1, got 0": conv(groups=0),
        "in_channels must be divisible by groups, got in_channels=2 and gr": conv(groups=4),
        "out_channels must be divisible by groups, got out_channels=3": conv(groups=2),
        r"kernel_size must .* of 2 such .* got \(3, 3, 3\)": conv(kernel_size=(3, 3, 3)),
        "kernel_size must be an integer of at least 1, .* got 0": conv(kernel_size=0),
        r"stride must be an integer of at least 1, .* got \(1, 0\)": conv(stride=(1, 0)),
        "dilation must be an integer of at least 1, .* got 'two'": conv(dilation="two"),
        "padding must be .* 'VALID', 'SAME', 'SAME_LOWER'; got 'LARGE'": conv(padding="LARGE"),
        r"padding must be .* a sequence of 2 integers .* got \(1,\)": conv(padding=(1,)),
        "padding must be .* pairs of integers": conv(padding=((1, 2, 3), 1)),
        "padding_mode must be one of 'ZEROS', .* got 'MIRROR'": conv(padding_mode="MIRROR"),
        "padding_mode must be one of 'ZEROS', .* got 3": conv(padding_mode=3),
        "padding must not be negative for padding_mode='REFLECT'": (
            conv(padding=-1, padding_mode="REFLECT")
        ),
        r"output_padding=\(2, 2\) and stride=\(2, 2\)": transposed(output_padding=2),
        "output_padding must be an integer .* 0, .* got -1": transposed(output_padding=-1),
        "out_channels must be divisible by groups": transposed(groups=2),
        "padding_mode must be one of 'ZEROS'": transposed(padding_mode="MIRROR"),
        r"ConvTranspose1d expected x of shape \(2, length\), got": call_transposed(3, 5),
        r"ConvTranspose1d .* an output of sizes \(0,\)": call_transposed(2, 6),
    }
}


@each_mistake(MISTAKES)
def test_mistakes_are_refused(error, words, call):
    with pytest.raises(error, match=words):
        call()


def test_subclasses_cannot_change_the_number_of_axes():
    with pytest.raises(TypeError, match="no keyword arguments"):

        class Other(nn.Conv2d, num_axes=3):  # pyright: ignore
            pass


@pytest.mark.parametrize(
    ("mode", "padding"),
    [("ZEROS", (1, 2)), ("REFLECT", (1, 2)), ("REPLICATE", "SAME"), ("CIRCULAR", "SAME_LOWER")],
)
def test_transposed_layer_transposes_every_padding_mode(mode, padding, getkey):
    options = {"stride": (2, 3), "padding": padding, "padding_mode": mode, "dilation": (1, 2)}
    # The sizes are not multiples of the stride.
    x = jax.ShapeDtypeStruct((2, 5, 7), jnp.float32)
    there = nn.Conv2d(2, 2, 3, use_bias=False, **options, key=getkey())
    y_key, key = getkey(), getkey()

    @eqx.filter_jit
    def found_and_expected(there):
        transpose = functools.partial(nn.ConvTranspose2d, 2, 2, 3, use_bias=False, **options)
        y = normal(y_key, jax.eval_shape(there, x).shape)
        (expected,) = jax.linear_transpose(there, x)(y)
        smaller = jax.eval_shape(transpose(key=key), y).shape
        more = tuple(abs(size - base) for size, base in zip(x.shape[1:], smaller[1:], strict=True))
        back = transpose(output_padding=more, key=jr.clone(key))
        kernel = jnp.flip(there.weight, axis=(2, 3)).swapaxes(0, 1)
        return eqx.tree_at(lambda layer: layer.weight, back, kernel)(y), expected

    assert_close(*found_and_expected(there), rtol=1e-5, atol=1e-5)


def test_images_of_integers_become_floats():
    image = np.arange(3 * 8 * 8, dtype=np.uint8).reshape(3, 8, 8)
    for layer in (nn.Conv2d, nn.ConvTranspose2d):
        layer = layer(3, 2, 3, key=jax.random.key(0))
        found, expected = layer(jnp.asarray(image)), layer(jnp.asarray(image, jnp.float32))
        np.testing.assert_array_equal(found, expected)
