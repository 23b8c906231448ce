"""The networks of the zoo and their losses, with layers of `eqxlike.nn` and a loop of
`eqxlike.loops`.

All functions are smooth, so that finite differences agree with derivatives.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import eqxlike
from benchmarks.networks import with_arrays
from benchmarks.zoo.problem import Problem, floats, single
from eqxlike import Module, loops, nn


class Block(Module):
    """A language model: an embedding, a transformer block, and the logits of the next token.

    The block normalises before attention and before its dense layers, with residual connections.
    """

    embedding: nn.Embedding
    attention_norm: nn.LayerNorm
    attention: nn.MultiheadAttention
    dense_norm: nn.LayerNorm
    dense: nn.MLP
    readout: nn.Linear

    def __call__(self, tokens: Array) -> Array:
        """The logits at each token, which depend on this and earlier tokens."""
        x = jax.vmap(self.embedding)(tokens)
        causal = jnp.tril(jnp.ones((len(tokens), len(tokens)), bool))
        normed = jax.vmap(self.attention_norm)(x)
        x = x + self.attention(normed, normed, normed, mask=causal)
        x = x + jax.vmap(lambda row: self.dense(self.dense_norm(row)))(x)
        return jax.vmap(self.readout)(x)


class Forecaster(Module):
    """An LSTM that reads a series, and a linear forecast of the next value."""

    cell: nn.LSTMCell
    readout: nn.Linear

    def __call__(self, series: Array) -> Array:
        """The forecast after a series of shape (steps, 1)."""

        def step(hidden: tuple[Array, Array], x: Array) -> tuple[tuple[Array, Array], None]:
            return self.cell(x, hidden), None

        zeros = jnp.zeros(self.cell.hidden_size, series.dtype)
        (output, _), _ = jax.lax.scan(step, (zeros, zeros), series)
        return self.readout(output)


def neural_ode(width: int = 16, steps: int = 64) -> Problem:
    """The neural ODE of Chen, Rubanova, Bettencourt & Duvenaud (2018): the mean squared error of
    the path of dy/dt = MLP(y), with `steps` classical Runge-Kutta steps in a checkpointed loop.
    """
    duration = 2.0
    step_size = duration / steps

    def loss(field: nn.MLP, data: tuple[Array, Array]) -> Array:
        first, path = data

        def step(y: Array, _: None) -> tuple[Array, Array]:
            slope_1 = field(y)
            slope_2 = field(y + step_size / 2 * slope_1)
            slope_3 = field(y + step_size / 2 * slope_2)
            slope_4 = field(y + step_size * slope_3)
            y = y + step_size / 6 * (slope_1 + 2 * slope_2 + 2 * slope_3 + slope_4)
            return y, y

        _, ys = loops.scan(step, first, None, steps, kind="checkpointed")
        return jnp.mean((ys - path) ** 2)

    def start() -> tuple[nn.MLP, tuple[Array, Array]]:
        field = nn.MLP(2, 2, width, 1, activation=jnp.tanh, key=jax.random.key(0))
        times = np.linspace(0, duration, steps + 1)[:, None]
        spiral = np.exp(-0.2 * times) * np.concatenate([np.cos(3 * times), np.sin(3 * times)], 1)
        return _drawn(field, seed=10), (single(spiral[0]), single(spiral[1:]))

    return Problem("neural ODE", loss, start)


def deep_network(layers: int, width: int = 6, batch: int = 128) -> Problem:
    """The mean squared error of a narrow network, whose memory is mostly outputs of layers. It is
    not in the zoo, because its finite differences take seconds.
    """

    def loss(model: nn.MLP, data: tuple[Array, Array]) -> Array:
        x, y = data
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    def start() -> tuple[nn.MLP, tuple[Array, Array]]:
        key = jax.random.key(0)
        model = nn.MLP(width, width, width, layers - 1, activation=jnp.tanh, key=key)
        x, y = np.random.default_rng(17).normal(size=(2, batch, width))
        return _drawn(model, seed=18), (single(x), single(y))

    return Problem(f"deep network, {layers} layers", loss, start)


def convolutional_network(batch: int = 16) -> Problem:
    """The mean cross-entropy of a classifier of 8 x 8 images: two convolutions, each followed by
    GELU and 2 x 2 average pooling, and a linear layer.
    """

    def start() -> tuple[nn.Sequential, tuple[Array, Array]]:
        keys = jax.random.split(jax.random.key(0), 3)
        network = nn.Sequential(
            [
                nn.Conv2d(1, 4, 3, padding=1, key=keys[0]),
                nn.Lambda(jax.nn.gelu),
                nn.AvgPool2d(2, 2),
                nn.Conv2d(4, 8, 3, padding=1, key=keys[1]),
                nn.Lambda(jax.nn.gelu),
                nn.AvgPool2d(2, 2),
                nn.Lambda(jnp.ravel),
                nn.Linear(32, 10, key=keys[2]),
            ]
        )
        images = np.random.default_rng(11).normal(size=(batch, 1, 8, 8))
        labels = jnp.arange(batch, dtype=jnp.int32) % 10
        return _drawn(network, seed=12), (single(images), labels)

    return Problem("convolutional network", _classification_loss, start)


def transformer_block(
    batch: int = 4, length: int = 8, width: int = 8, vocabulary: int = 12
) -> Problem:
    """The mean cross-entropy of the next token, for one causal block with two heads."""

    def loss(model: Block, data: tuple[Array]) -> Array:
        (tokens,) = data
        return _classification_loss(model, (tokens[:, :-1], tokens[:, 1:]))

    def start() -> tuple[Block, tuple[Array]]:
        keys = jax.random.split(jax.random.key(0), 4)
        model = Block(
            nn.Embedding(vocabulary, width, key=keys[0]),
            nn.LayerNorm(width),
            nn.MultiheadAttention(2, width, key=keys[1]),
            nn.LayerNorm(width),
            nn.MLP(width, width, 2 * width, 1, activation=jax.nn.gelu, key=keys[2]),
            nn.Linear(width, vocabulary, key=keys[3]),
        )
        tokens = np.random.default_rng(13).integers(vocabulary, size=(batch, length + 1))
        return _drawn(model, seed=14), (jnp.asarray(tokens, jnp.int32),)

    return Problem("transformer block", loss, start)


def lstm(batch: int = 8, length: int = 20, width: int = 12) -> Problem:
    """The mean squared error of the forecasts of noisy sines with an LSTM cell."""

    def loss(model: Forecaster, data: tuple[Array, Array]) -> Array:
        series, following = data
        return jnp.mean((jax.vmap(model)(series)[:, 0] - following) ** 2)

    def start() -> tuple[Forecaster, tuple[Array, Array]]:
        keys = jax.random.split(jax.random.key(0), 2)
        model = Forecaster(nn.LSTMCell(1, width, key=keys[0]), nn.Linear(width, 1, key=keys[1]))
        draw = np.random.default_rng(15)
        phases = draw.uniform(0, 2 * np.pi, (batch, 1)) + 0.4 * np.arange(length + 1)
        series = np.sin(phases) + draw.normal(0, 0.1, phases.shape)
        return _drawn(model, seed=16), (single(series[:, :-1, None]), single(series[:, -1]))

    return Problem("LSTM", loss, start)


def _classification_loss(model: Any, data: tuple[Array, Array]) -> Array:
    """The mean cross-entropy over a batch."""
    x, labels = data
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(x), labels))


def _drawn(model: Any, seed: int) -> Any:
    """The model with weights drawn by NumPy. The variance is divided by the number of inputs."""
    draw = np.random.default_rng(seed)

    def drawn(leaf: Array) -> np.ndarray:
        inputs = max(1, leaf.size // max(1, leaf.shape[0]))
        return draw.normal(0, inputs**-0.5 if leaf.ndim > 1 else 0.1, leaf.shape)

    return with_arrays(eqxlike, model, [single(drawn(leaf)) for leaf in floats(model)])
