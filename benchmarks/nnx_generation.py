"""NNX's language model with its cache, for `benchmarks.generation`."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


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
        self.up, self.down = _linear(ours.up), _linear(ours.down)

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


def _linear(ours: Any) -> nnx.Linear:
    layer: Any = nnx.Linear(*ours.weight.shape[::-1], rngs=nnx.Rngs(0))
    layer.kernel[...], layer.bias[...] = ours.weight.T, ours.bias
    return layer


def _norm(ours: Any) -> nnx.LayerNorm:
    layer: Any = nnx.LayerNorm(ours.weight.shape[0], epsilon=1e-5, rngs=nnx.Rngs(0))
    layer.scale[...], layer.bias[...] = ours.weight, ours.bias
    return layer


def _embedding(ours: Any) -> nnx.Embed:
    layer = nnx.Embed(*ours.weight.shape, rngs=nnx.Rngs(0))
    layer.embedding[...] = ours.weight
    return layer
