"""The networks of the layer benchmark for Flax NNX. Importing this needs flax.

They are called with a batch, with channels last. `load` copies eqxlike's parameters to a network.
The arrays come from `benchmarks.layer_models`, in tree order. NNX stores most of them transposed.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks import layer_models
from benchmarks.layer_models import (
    CNNSizes,
    LanguageSizes,
    LSTMSizes,
    MLPSizes,
    ResNetSizes,
    TransformerSizes,
)

EPSILON = 1e-5
"""The epsilon of `LayerNorm` in eqxlike and Equinox. NNX's default is 1e-6."""


class MLP(nnx.Module):
    """Linear layers with an activation between them."""

    def __init__(self, features: Sequence[int], rngs: nnx.Rngs, activation: Any = jax.nn.relu):
        pairs = itertools.pairwise(features)
        self.layers = nnx.List([nnx.Linear(*pair, rngs=rngs) for pair in pairs])
        self.activation = activation

    def __call__(self, x: jax.Array) -> jax.Array:
        *hidden, last = self.layers
        for layer in hidden:
            x = self.activation(layer(x))
        return last(x)

    def load(self, arrays: Iterator[jax.Array]) -> None:
        """Takes the next arrays for the parameters."""
        for layer in self.layers:
            load_linear(layer, arrays)


class CNN(nnx.Module):
    """Convolutions of images of shape (batch, height, width, channels). `BatchNorm` is optional."""

    def __init__(self, sizes: CNNSizes, rngs: nnx.Rngs, is_normalised: bool = False):
        kernel = (layer_models.KERNEL, layer_models.KERNEL)
        pairs = itertools.pairwise(sizes.channels)
        self.convs = nnx.List(
            [nnx.Conv(*pair, kernel, padding=layer_models.PADDING, rngs=rngs) for pair in pairs]
        )
        self.norms = nnx.List(
            [
                nnx.BatchNorm(channels, use_running_average=False, rngs=rngs)
                for channels in (sizes.channels[1:] if is_normalised else ())
            ]
        )
        channels, height, width = self.flat_shape = layer_models.flat_shape(sizes)
        self.head = nnx.Linear(channels * height * width, sizes.classes, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        window = (layer_models.WINDOW, layer_models.WINDOW)
        for place, conv in enumerate(self.convs):
            x = self.norms[place](conv(x)) if self.norms else conv(x)
            x = nnx.max_pool(jax.nn.relu(x), window, strides=window)
        return self.head(x.reshape(x.shape[0], -1))

    def load(self, arrays: Iterator[jax.Array]) -> None:
        """Takes the next arrays for the parameters."""
        for conv in self.convs:
            load_conv(conv, arrays)
        for norm in self.norms:
            load_norm(norm, arrays)
        weight = next(arrays)
        # In flattened features, channels come first in eqxlike and last in NNX.
        channels_last = jnp.moveaxis(weight.reshape(len(weight), *self.flat_shape), 1, -1)
        load_linear(self.head, iter((channels_last.reshape(weight.shape), next(arrays))))


class LSTM(nnx.Module):
    """NNX's optimised LSTM cell, over sequences of shape (batch, steps, features)."""

    def __init__(self, sizes: LSTMSizes, rngs: nnx.Rngs):
        cell = nnx.OptimizedLSTMCell(sizes.features, sizes.hidden, rngs=rngs)
        self.rnn = nnx.RNN(cell, return_carry=True, rngs=False)
        self.hidden = sizes.hidden

    def __call__(self, x: jax.Array) -> jax.Array:
        zeros = jnp.zeros((x.shape[0], self.hidden), x.dtype)
        (_, hidden), _ = self.rnn(x, initial_carry=(zeros, zeros))
        return hidden

    def load(self, arrays: Iterator[jax.Array]) -> None:
        """Takes the next arrays for the parameters."""
        cell: Any = self.rnn.cell
        cell.dense_i.kernel[...] = next(arrays).T
        load_linear(cell.dense_h, arrays)


class Block(nnx.Module):
    """A pre-norm block of a transformer."""

    def __init__(self, width: int, heads: int, rngs: nnx.Rngs):
        self.attention_norm = nnx.LayerNorm(width, epsilon=EPSILON, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            heads, width, use_bias=False, decode=False, deterministic=True, rngs=rngs
        )
        self.mlp_norm = nnx.LayerNorm(width, epsilon=EPSILON, rngs=rngs)
        features = (width, layer_models.EXPANSION * width, width)
        self.mlp = MLP(features, rngs, jax.nn.gelu)

    def __call__(self, x: jax.Array, is_causal: bool = False) -> jax.Array:
        x = x + self.attention(self.attention_norm(x), is_causal=is_causal)
        return x + self.mlp(self.mlp_norm(x))

    def load(self, arrays: Iterator[jax.Array]) -> None:
        """Takes the next arrays for the parameters."""
        load_norm(self.attention_norm, arrays)
        attention = self.attention
        for projection in (attention.query, attention.key, attention.value, attention.out):
            projection.kernel[...] = next(arrays).T.reshape(projection.kernel.shape)
        load_norm(self.mlp_norm, arrays)
        self.mlp.load(arrays)


class Transformer(nnx.Module):
    """Blocks of attention over sequences of shape (batch, sequence, width)."""

    def __init__(self, sizes: TransformerSizes, rngs: nnx.Rngs):
        blocks = [Block(sizes.width, sizes.heads, rngs) for _ in range(sizes.depth)]
        self.blocks = nnx.List(blocks)

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return x

    def load(self, arrays: Iterator[jax.Array]) -> None:
        """Takes the next arrays for the parameters."""
        for block in self.blocks:
            block.load(arrays)


class LanguageModel(nnx.Module):
    """An embedding, causal blocks over tokens of shape (batch, sequence), and a readout."""

    def __init__(self, sizes: LanguageSizes, rngs: nnx.Rngs):
        width = sizes.blocks.width
        self.embedding = nnx.Embed(sizes.tokens, width, rngs=rngs)
        self.transformer = Transformer(sizes.blocks, rngs)
        self.readout = nnx.Linear(width, sizes.tokens, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embedding(tokens)
        for block in self.transformer.blocks:
            x = block(x, is_causal=True)
        return self.readout(x)

    def load(self, arrays: Iterator[jax.Array]) -> None:
        """Takes the next arrays for the parameters."""
        self.embedding.embedding[...] = next(arrays)
        self.transformer.load(arrays)
        load_linear(self.readout, arrays)


class ConvNorm(nnx.Module):
    """A convolution without bias, followed by `BatchNorm`."""

    def __init__(self, before: int, after: int, kernel: int, stride: int, rngs: nnx.Rngs):
        options: Any = {"strides": stride, "padding": kernel // 2, "use_bias": False}
        self.conv = nnx.Conv(before, after, (kernel, kernel), **options, rngs=rngs)
        self.norm = nnx.BatchNorm(after, use_running_average=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(self.conv(x))


class ResNet(nnx.Module):
    """Bottleneck blocks for images of shape (batch, height, width, channels)."""

    def __init__(self, sizes: ResNetSizes, rngs: nnx.Rngs):
        self.stem = ConvNorm(3, sizes.width, 7, 2, rngs)
        blocks = [nnx.List([ConvNorm(*each, rngs) for each in block]) for block in sizes.blocks]
        self.blocks = nnx.List(blocks)
        self.head = nnx.Linear(sizes.blocks[-1][2][1], sizes.classes, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = jax.nn.relu(self.stem(x))
        padding: Any = ((1, 1), (1, 1))
        x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding=padding)
        for first, second, third, *shortcut in self.blocks:
            y = third(jax.nn.relu(second(jax.nn.relu(first(x)))))
            x = jax.nn.relu(y + (shortcut[0](x) if shortcut else x))
        return self.head(jnp.mean(x, axis=(1, 2)))

    def load(self, arrays: Iterator[jax.Array]) -> None:
        """Takes the next arrays for the parameters."""
        for layer in (self.stem, *(layer for block in self.blocks for layer in block)):
            layer.conv.kernel[...] = jnp.transpose(next(arrays), (2, 3, 1, 0))
            load_norm(layer.norm, arrays)
        load_linear(self.head, arrays)


def mlp(sizes: MLPSizes, key: jax.Array) -> MLP:
    """The counterpart of `layer_models.mlp`."""
    hidden = [sizes.width] * sizes.depth
    return MLP([sizes.features, *hidden, sizes.classes], nnx.Rngs(key))


def cnn(sizes: CNNSizes, key: jax.Array) -> CNN:
    """The counterpart of `layer_models.cnn`."""
    return CNN(sizes, nnx.Rngs(key))


def lstm(sizes: LSTMSizes, key: jax.Array) -> LSTM:
    """The counterpart of `layer_models.lstm`."""
    return LSTM(sizes, nnx.Rngs(key))


def transformer(sizes: TransformerSizes, key: jax.Array) -> Transformer:
    """The counterpart of `layer_models.transformer`."""
    return Transformer(sizes, nnx.Rngs(key))


def language_model(sizes: LanguageSizes, key: jax.Array) -> LanguageModel:
    """The counterpart of `layer_models.language_model`."""
    return LanguageModel(sizes, nnx.Rngs(key))


def normalised_cnn(sizes: CNNSizes, key: jax.Array) -> CNN:
    """The counterpart of `layer_models.normalised_cnn`."""
    return CNN(sizes, nnx.Rngs(key), is_normalised=True)


def resnet(sizes: ResNetSizes, key: jax.Array) -> ResNet:
    """The counterpart of `layer_models.resnet`."""
    return ResNet(sizes, nnx.Rngs(key))


def linears(width: int, depth: int, key: jax.Array) -> nnx.Sequential:
    """The counterpart of `layer_models.linears`."""
    rngs = nnx.Rngs(key)
    return nnx.Sequential(*[nnx.Linear(width, width, rngs=rngs) for _ in range(depth)])


def load_conv(layer: Any, arrays: Iterator[jax.Array]) -> None:
    """Takes the next two arrays for kernel and bias."""
    layer.kernel[...] = jnp.transpose(next(arrays), (2, 3, 1, 0))
    layer.bias[...] = next(arrays).reshape(-1)


def load_linear(layer: Any, arrays: Iterator[jax.Array]) -> None:
    """Takes the next two arrays for weight and bias."""
    layer.kernel[...] = next(arrays).T
    layer.bias[...] = next(arrays)


def load_norm(layer: Any, arrays: Iterator[jax.Array]) -> None:
    """Takes the next two arrays for scale and shift."""
    layer.scale[...] = next(arrays)
    layer.bias[...] = next(arrays)
