"""The networks of `benchmarks.networks`, and the language model of `benchmarks.generation` with its
cache, for Flax NNX. Importing this needs flax.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks import bayesian, networks
from benchmarks.timing import Call


class MLP(nnx.Module):
    """Linear layers with ReLU between them, called with one example or a batch."""

    def __init__(self, arrays: Sequence[Any]):
        """`arrays` are weight, of shape (features out, features in), and bias of each layer."""
        self.layers = nnx.List(map(_linear, arrays[::2], arrays[1::2]))

    def __call__(self, x: jax.Array) -> jax.Array:
        *hidden, last = self.layers
        for layer in hidden:
            x = jax.nn.relu(layer(x))
        return last(x)


class Identity(nnx.Module):
    """A model that returns its input."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return x


def mlp(width: int, depth: int) -> MLP:
    """An MLP with `depth` hidden layers. All layers have `width` features."""
    return MLP(networks.weights([width] * (depth + 2)))


def forward(model: nnx.Module, x: jax.Array) -> Call:
    """A call of the compiled forward pass."""
    function = nnx.jit(lambda model, x: model(x))
    return lambda: function(model, x)


def training_step(model: nnx.Module, loss: Any, data: Sequence[jax.Array]) -> Call:
    """A call of the compiled training step, which updates model and optimiser in place."""
    optimiser = nnx.Optimizer(model, networks.optimiser(), wrt=nnx.Param)

    @nnx.jit
    def step(model: nnx.Module, optimiser: nnx.Optimizer, *data: jax.Array) -> jax.Array:
        value, gradients = nnx.value_and_grad(loss)(model, *data)
        optimiser.update(model, gradients)
        return value

    return lambda: step(model, optimiser, *data)


def mean_squared_error(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    """The mean squared error of a model of a batch."""
    return jnp.mean((model(x) - y) ** 2)


class BayesianLinear(nnx.Module):
    """A layer with independent Gaussian weights, made from an eqxlike layer."""

    def __init__(self, layer: Any):
        self.weight_mean = nnx.Param(layer.weight_mean)
        self.weight_rho = nnx.Param(layer.weight_rho)
        self.bias_mean = nnx.Param(layer.bias_mean)
        self.bias_rho = nnx.Param(layer.bias_rho)
        self.prior_scale = layer.prior_scale

    def __call__(self, x: jax.Array, *, key: jax.Array) -> jax.Array:
        return bayesian.output(x, key, self._parameters())

    def kl(self) -> jax.Array:
        return bayesian.divergence(self._parameters(), self.prior_scale)

    def _parameters(self) -> tuple[jax.Array, ...]:
        parameters = self.weight_mean, self.weight_rho, self.bias_mean, self.bias_rho
        return tuple(parameter[...] for parameter in parameters)


class BayesianMLP(nnx.Module):
    """Layers with independent Gaussian weights and ReLU between them."""

    def __init__(self, ours: Any):
        self.layers = nnx.List(map(BayesianLinear, ours.layers))

    def __call__(self, x: jax.Array, *, key: jax.Array) -> jax.Array:
        *hidden, last = self.layers
        *hidden_keys, last_key = jax.random.split(key, len(self.layers))
        for layer, layer_key in zip(hidden, hidden_keys, strict=True):
            x = jax.nn.relu(layer(x, key=layer_key))
        return last(x, key=last_key)


def elbo_step(key: jax.Array, data: Sequence[jax.Array]) -> Call:
    """A call of the compiled ELBO step of `bayesian.network()`."""
    model = BayesianMLP(bayesian.network())
    optimiser = nnx.Optimizer(model, networks.optimiser(), wrt=nnx.Param)

    @nnx.jit
    def compiled(
        model: nnx.Module, optimiser: nnx.Optimizer, key: jax.Array, *data: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        key, step_key = jax.random.split(key)
        gradient = nnx.value_and_grad(bayesian.negative_elbo)
        value, gradients = gradient(model, step_key, *data)
        optimiser.update(model, gradients)
        return key, value

    def step() -> jax.Array:
        nonlocal key
        key, value = compiled(model, optimiser, key, *data)
        return value

    return step


def _linear(weight: Any, bias: Any) -> nnx.Linear:
    layer = nnx.Linear(weight.shape[1], weight.shape[0], rngs=nnx.Rngs(0))
    layer.kernel = nnx.Param(jnp.asarray(weight.T))
    layer.bias = nnx.Param(jnp.asarray(bias))
    return layer


# --- text generation with a cache ---


class Block(nnx.Module):
    def __init__(self, ours: Any, heads: int):
        width, rngs = ours.up.weight.shape[1], nnx.Rngs(0)
        self.attention_norm = _norm(ours.attention_norm)
        self.attention = nnx.MultiHeadAttention(
            heads, width, use_bias=False, decode=True, rngs=rngs
        )
        attention = ours.attention
        for name in ("query", "key", "value"):
            weight = getattr(attention, f"{name}_proj").weight
            getattr(self.attention, name).kernel[...] = weight.T.reshape(width, heads, -1)
        self.attention.out.kernel[...] = attention.output_proj.weight.T.reshape(heads, -1, width)
        self.mlp_norm = _norm(ours.mlp_norm)
        self.up, self.down = (_linear(each.weight, each.bias) for each in (ours.up, ours.down))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x), deterministic=True)
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


class LanguageModel(nnx.Module):
    def __init__(self, ours: Any, heads: int):
        self.embedding, self.positions = map(_embedding, (ours.embedding, ours.positions))
        self.blocks = nnx.List([Block(block, heads) for block in ours.blocks])

    def __call__(self, tokens: jax.Array, place: jax.Array) -> jax.Array:
        x = self.embedding(tokens) + self.positions(place)[None, None]
        for block in self.blocks:
            x = block(x)
        return self.embedding.attend(x)


def generator(ours: Any, prompts: jax.Array, heads: int, num_new: int) -> Any:
    model = LanguageModel(ours, heads)
    batch, length = prompts.shape
    for block in model.blocks:
        block.attention.init_cache((batch, length + num_new, ours.embedding.weight.shape[1]))
    graph, state = nnx.split(model)

    @jax.jit
    def generate(state: Any, prompts: jax.Array) -> jax.Array:
        def step(carry: Any, place: jax.Array) -> Any:
            state, token = carry
            model = nnx.merge(graph, state)
            token = jnp.where(place < length, prompts[:, jnp.minimum(place, length - 1)], token)
            token = model(token[:, None], place)[:, 0].argmax(-1)
            return (nnx.state(model), token), token

        start = state, jnp.zeros(batch, int)
        _, tokens = jax.lax.scan(step, start, jnp.arange(length + num_new - 1))
        return tokens.T[:, length - 1 :]

    return lambda: generate(state, prompts)


def _norm(ours: Any) -> nnx.LayerNorm:
    layer: Any = nnx.LayerNorm(ours.weight.shape[0], epsilon=1e-5, rngs=nnx.Rngs(0))
    layer.scale[...], layer.bias[...] = ours.weight, ours.bias
    return layer


def _embedding(ours: Any) -> nnx.Embed:
    layer = nnx.Embed(*ours.weight.shape, rngs=nnx.Rngs(0))
    layer.embedding[...] = ours.weight
    return layer
