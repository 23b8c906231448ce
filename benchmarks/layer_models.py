"""The networks of the layer benchmark, for eqxlike and for any library with the same names.

Each network is called with one example. Both libraries store the parameters in the same tree order,
but draw different initial values.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class MLPSizes(NamedTuple):
    """A multi-layer perceptron: `depth` hidden layers of `width` units, with ReLU."""

    features: int
    width: int
    depth: int
    classes: int


class CNNSizes(NamedTuple):
    """Blocks of a 3 x 3 convolution, ReLU and 2 x 2 max pooling, then one linear layer."""

    side: int
    channels: tuple[int, ...]
    classes: int


class LSTMSizes(NamedTuple):
    """An LSTM cell over a sequence."""

    features: int
    hidden: int


class TransformerSizes(NamedTuple):
    """Pre-norm blocks of attention and an MLP with `4 * width` hidden units."""

    width: int
    heads: int
    depth: int


class LanguageSizes(NamedTuple):
    """An embedding, a transformer of causal blocks over `length` tokens, and a readout."""

    tokens: int
    length: int
    blocks: TransformerSizes


class ResNetSizes(NamedTuple):
    """A residual network of bottleneck blocks. `stages` are the numbers of blocks in each stage."""

    side: int
    width: int
    stages: tuple[int, ...]
    classes: int

    @property
    def blocks(self) -> list[list[tuple[int, int, int, int]]]:
        """The convolutions of each block: channels before and after, kernel, and stride.

        A fourth convolution is the shortcut.
        """
        found, before = [], self.width
        for stage, depth in enumerate(self.stages):
            width = self.width << stage
            for stride in (2 if stage else 1, *[1] * (depth - 1)):
                block = [(before, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1)]
                if stride > 1 or before != 4 * width:
                    block.append((before, 4 * width, 1, stride))
                found.append(block)
                before = 4 * width
        return found


KERNEL, PADDING, WINDOW = 3, 1, 2
"""Kernel, stride and padding of all convolutions, and window and stride of all poolings."""

EXPANSION = 4
"""The number of hidden units for each feature in the MLPs of a transformer."""

split_keys = jax.jit(lambda key, num: tuple(jax.random.split(key, num)), static_argnums=1)
"""`jax.random.split` as a tuple of keys, with one dispatch for both libraries."""


def flat_shape(sizes: CNNSizes) -> tuple[int, int, int]:
    """The channels, height and width after the last pooling of a CNN."""
    side = sizes.side // WINDOW ** (len(sizes.channels) - 1)
    return sizes.channels[-1], side, side


def mlp(library: Any, sizes: MLPSizes, key: jax.Array) -> Any:
    """The library's MLP."""
    return library.nn.MLP(sizes.features, sizes.classes, sizes.width, sizes.depth, key=key)


def cnn(library: Any, sizes: CNNSizes, key: jax.Array) -> Any:
    """A CNN for images of shape (channels, height, width)."""
    nn = library.nn
    keys = split_keys(key, len(sizes.channels))
    layers: list[Any] = []
    pairs = zip(sizes.channels[:-1], sizes.channels[1:], keys[:-1], strict=True)
    for before, after, conv_key in pairs:
        layers += [
            nn.Conv2d(before, after, KERNEL, padding=PADDING, key=conv_key),
            nn.Lambda(jax.nn.relu),
            nn.MaxPool2d(WINDOW, WINDOW),
        ]
    layers.append(nn.Lambda(jnp.ravel))
    layers.append(nn.Linear(math.prod(flat_shape(sizes)), sizes.classes, key=keys[-1]))
    return nn.Sequential(layers)


def lstm(library: Any, sizes: LSTMSizes, key: jax.Array) -> Any:
    """An LSTM from a sequence, shape (steps, features), to its last hidden state."""
    return _classes(library).LSTM(library.nn.LSTMCell(sizes.features, sizes.hidden, key=key))


def transformer(library: Any, sizes: TransformerSizes, key: jax.Array) -> Any:
    """Pre-norm blocks for sequences of shape (sequence, width)."""
    block = _classes(library).Block
    keys = split_keys(key, sizes.depth)
    return library.nn.Sequential([block(sizes.width, sizes.heads, key) for key in keys])


def language_model(
    library: Any, sizes: LanguageSizes, key: jax.Array, is_stacked: bool = False
) -> Any:
    """A causal transformer for tokens of shape (sequence,), with a list or a stack of blocks."""
    return _classes(library).LanguageModel(sizes, key, is_stacked)


def normalised_cnn(library: Any, sizes: CNNSizes, key: jax.Array) -> tuple[Any, Any]:
    """A CNN with `BatchNorm` after each convolution, and its state."""
    return library.nn.make_with_state(_classes(library).NormalisedCNN)(sizes, key)


def resnet(library: Any, sizes: ResNetSizes, key: jax.Array) -> tuple[Any, Any]:
    """A ResNet for images of shape (channels, height, width), and its state."""
    return library.nn.make_with_state(_classes(library).ResNet)(sizes, key)


def linears(library: Any, width: int, depth: int, key: jax.Array) -> Any:
    """A `Sequential` of `depth` linear layers of `width` features."""
    keys = split_keys(key, depth)
    return library.nn.Sequential([library.nn.Linear(width, width, key=key) for key in keys])


def linear_shapes(width: int, depth: int) -> list[tuple[int, ...]]:
    """The shapes of weights and biases of `depth` linear layers of `width` features."""
    return [(width, width), (width,)] * depth


def uniform_arrays(shapes: Sequence[tuple[int, ...]], limit: float, key: jax.Array) -> Any:
    """The fewest random arrays of a model: one uniform array for each shape, drawn in one call."""
    keys = split_keys(key, len(shapes))
    return [
        jax.random.uniform(key, shape, minval=-limit, maxval=limit)
        for key, shape in zip(keys, shapes, strict=True)
    ]


class _Classes(NamedTuple):
    """The Modules that this file defines."""

    LSTM: Callable[..., Any]
    Block: Callable[..., Any]
    LanguageModel: Callable[..., Any]
    NormalisedCNN: Callable[..., Any]
    ResNet: Callable[..., Any]


@functools.cache
def _classes(library: Any) -> _Classes:
    """The Modules for a library. They are defined once, so that all models have the same type."""
    nn = library.nn

    class LSTM(library.Module):
        cell: Any

        def __call__(self, x: jax.Array) -> jax.Array:
            zeros = jnp.zeros(self.cell.hidden_size, x.dtype)
            (hidden, _), _ = jax.lax.scan(
                lambda carry, step: (self.cell(step, carry), None), (zeros, zeros), x
            )
            return hidden

    class Block(library.Module):
        attention_norm: Any
        attention: Any
        mlp_norm: Any
        mlp: Any

        def __init__(self, width: int, heads: int, key: jax.Array):
            attention_key, mlp_key = split_keys(key, 2)
            self.attention_norm = nn.LayerNorm(width)
            self.attention = nn.MultiheadAttention(heads, width, key=attention_key)
            self.mlp_norm = nn.LayerNorm(width)
            self.mlp = nn.MLP(
                width, width, EXPANSION * width, 1, activation=jax.nn.gelu, key=mlp_key
            )

        def __call__(
            self, x: jax.Array, mask: Any = None, *, key: jax.Array | None = None
        ) -> jax.Array:
            del key
            normed = jax.vmap(self.attention_norm)(x)
            x = x + self.attention(normed, normed, normed, mask=mask)
            return x + jax.vmap(self.mlp)(jax.vmap(self.mlp_norm)(x))

    class LanguageModel(library.Module):
        embedding: Any
        blocks: Any
        readout: Any

        def __init__(self, sizes: LanguageSizes, key: jax.Array, is_stacked: bool):
            width, heads, depth = sizes.blocks
            embedding_key, blocks_key, readout_key = split_keys(key, 3)

            def block(key: jax.Array) -> Any:
                return Block(width, heads, key)

            self.embedding = nn.Embedding(sizes.tokens, width, key=embedding_key)
            self.blocks = (
                nn.ScanStack(block, depth, key=blocks_key)
                if is_stacked
                else [block(key) for key in split_keys(blocks_key, depth)]
            )
            self.readout = nn.Linear(width, sizes.tokens, key=readout_key)

        def __call__(self, tokens: jax.Array) -> jax.Array:
            x = jax.vmap(self.embedding)(tokens)
            causal: Any = "causal"
            if library.__name__ == "equinox":
                causal = jnp.tril(jnp.ones((len(tokens), len(tokens)), bool))
            if isinstance(self.blocks, list):
                for block in self.blocks:
                    x = block(x, causal)
            else:
                x = self.blocks(x, causal)
            return jax.vmap(self.readout)(x)

    class NormalisedCNN(library.Module):
        convs: list[Any]
        norms: list[Any]
        pool: Any
        head: Any

        def __init__(self, sizes: CNNSizes, key: jax.Array):
            *keys, head_key = split_keys(key, len(sizes.channels))
            self.convs = [
                nn.Conv2d(*pair, KERNEL, padding=PADDING, key=key)
                for pair, key in zip(itertools.pairwise(sizes.channels), keys, strict=True)
            ]
            self.norms = [
                nn.BatchNorm(channels, "batch", mode="batch") for channels in sizes.channels[1:]
            ]
            self.pool = nn.MaxPool2d(WINDOW, WINDOW)
            self.head = nn.Linear(math.prod(flat_shape(sizes)), sizes.classes, key=head_key)

        def __call__(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
            for conv, norm in zip(self.convs, self.norms, strict=True):
                x, state = norm(conv(x), state)
                x = self.pool(jax.nn.relu(x))
            return self.head(x.ravel()), state

    class ConvNorm(library.Module):
        conv: Any
        norm: Any

        def __init__(self, before: int, after: int, kernel: int, stride: int, key: jax.Array):
            padding = kernel // 2
            self.conv = nn.Conv2d(before, after, kernel, stride, padding, use_bias=False, key=key)
            self.norm = nn.BatchNorm(after, "batch", mode="batch")

        def __call__(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
            return self.norm(self.conv(x), state)

    class ResNet(library.Module):
        stem: Any
        pool: Any
        blocks: list[list[Any]]
        head: Any

        def __init__(self, sizes: ResNetSizes, key: jax.Array):
            keys = iter(split_keys(key, 2 + 4 * len(sizes.blocks)))
            self.stem = ConvNorm(3, sizes.width, 7, 2, next(keys))
            self.pool = nn.MaxPool2d(3, 2, padding=1)
            self.blocks = [[ConvNorm(*conv, next(keys)) for conv in each] for each in sizes.blocks]
            self.head = nn.Linear(sizes.blocks[-1][2][1], sizes.classes, key=next(keys))

        def __call__(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
            x, state = self.stem(x, state)
            x = self.pool(jax.nn.relu(x))
            for first, second, third, *shortcut in self.blocks:
                y, state = first(x, state)
                y, state = second(jax.nn.relu(y), state)
                y, state = third(jax.nn.relu(y), state)
                for each in shortcut:
                    x, state = each(x, state)
                x = jax.nn.relu(x + y)
            return self.head(jnp.mean(x, axis=(1, 2))), state

    return _Classes(LSTM, Block, LanguageModel, NormalisedCNN, ResNet)
