"""The networks of the layer benchmark, for eqxlike and for any library with the same names.

Each takes one example. Both libraries hold the parameters in the same tree order, and draw them
in their own way.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class MLPSizes(NamedTuple):
    """A multi-layer perceptron: `depth` hidden layers of `width` units, ReLU between them."""

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
    """One LSTM cell over a sequence."""

    features: int
    hidden: int


class TransformerSizes(NamedTuple):
    """Pre-norm blocks of attention and a perceptron with `4 * width` hidden units."""

    width: int
    heads: int
    depth: int


KERNEL, PADDING, WINDOW = 3, 1, 2
"""These are kernel, stride and padding of every convolution, window and stride of every pooling."""

EXPANSION = 4
"""A transformer's perceptrons have this many hidden units for each feature."""

split_keys = jax.jit(lambda key, num: tuple(jax.random.split(key, num)), static_argnums=1)
"""`jax.random.split` as a tuple of keys: one dispatch, whichever library the keys are for."""


def flat_shape(sizes: CNNSizes) -> tuple[int, int, int]:
    """Channels, height and width of the output of a CNN's last pooling."""
    side = sizes.side // WINDOW ** (len(sizes.channels) - 1)
    return sizes.channels[-1], side, side


def mlp(library: Any, sizes: MLPSizes, key: jax.Array) -> Any:
    """The library's own MLP."""
    return library.nn.MLP(sizes.features, sizes.classes, sizes.width, sizes.depth, key=key)


def cnn(library: Any, sizes: CNNSizes, key: jax.Array) -> Any:
    """A CNN of images of shape (channels, height, width)."""
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
    """Pre-norm blocks of sequences of shape (sequence, width)."""
    block = _classes(library).Block
    keys = split_keys(key, sizes.depth)
    return library.nn.Sequential([block(sizes.width, sizes.heads, key) for key in keys])


def linears(library: Any, width: int, depth: int, key: jax.Array) -> Any:
    """A `Sequential` of `depth` linear layers of `width` features."""
    keys = split_keys(key, depth)
    return library.nn.Sequential([library.nn.Linear(width, width, key=key) for key in keys])


def linear_shapes(width: int, depth: int) -> list[tuple[int, ...]]:
    """The shapes of weights and biases of `depth` linear layers of `width` features."""
    return [(width, width), (width,)] * depth


def uniform_arrays(shapes: Sequence[tuple[int, ...]], limit: float, key: jax.Array) -> Any:
    """The minimum that a model draws: one uniform array for each shape, by one call."""
    keys = split_keys(key, len(shapes))
    return [
        jax.random.uniform(key, shape, minval=-limit, maxval=limit)
        for key, shape in zip(keys, shapes, strict=True)
    ]


class _Classes(NamedTuple):
    """The Modules that are defined here rather than taken from a library."""

    LSTM: Callable[..., Any]
    Block: Callable[..., Any]


@functools.cache
def _classes(library: Any) -> _Classes:
    """The Modules for one library, made once, so that all of its models have one type."""
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

        def __call__(self, x: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
            del key
            normed = jax.vmap(self.attention_norm)(x)
            x = x + self.attention(normed, normed, normed)
            return x + jax.vmap(self.mlp)(jax.vmap(self.mlp_norm)(x))

    return _Classes(LSTM, Block)
