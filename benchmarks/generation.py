"""Text generation with a cache, of a small language model: eqxlike, NNX, and JAX by hand.

All columns have the same weights and choose the most likely token. Each column is one compiled
program for the prompt and all new tokens. NNX's cache accepts one token in a call, so its loop
reads the prompt token by token.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import eqxlike as eqx
from benchmarks.cases import Case
from eqxlike import nn

WIDTH, HEADS, DEPTH, VOCABULARY = 256, 8, 4, 256
PROMPT, NEW = 64, 128
BY_HAND, EQXLIKE, SCAN_STACK, NNX = "by hand", "eqxlike", "eqxlike, ScanStack", "NNX"


class Block(eqx.Module):
    attention_norm: nn.LayerNorm
    attention: nn.MultiheadAttention
    mlp_norm: nn.LayerNorm
    up: nn.Linear
    down: nn.Linear

    def __init__(self, key: jax.Array):
        key1, key2, key3 = jax.random.split(key, 3)
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(HEADS, WIDTH, key=key1)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, key=key2)
        self.down = nn.Linear(4 * WIDTH, WIDTH, key=key3)

    def __call__(self, carry: Any) -> Any:
        x, cache = carry
        y = jax.vmap(self.attention_norm)(x)
        y, cache = self.attention(y, y, y, cache=cache)
        x = x + y
        return x + jax.vmap(self.mlp)(x), cache

    def mlp(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.gelu(self.up(self.mlp_norm(x))))


class LanguageModel(eqx.Module):
    embedding: nn.Embedding
    positions: nn.Embedding
    blocks: nn.Sequential | nn.ScanStack

    def __init__(self, key: jax.Array):
        key1, key2, *keys = jax.random.split(key, 2 + DEPTH)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, key=key1)
        self.positions = nn.Embedding(PROMPT + NEW, WIDTH, key=key2)
        self.blocks = nn.Sequential([Block(key) for key in keys])

    def __call__(self, tokens: jax.Array, cache: nn.KVCache) -> tuple[jax.Array, nn.KVCache]:
        places = cache.positions(len(tokens))
        x = jax.vmap(self.embedding)(tokens) + jax.vmap(self.positions)(places)
        x, cache = self.blocks((x, cache))
        return x @ self.embedding.weight.T, cache


def case(batch: int) -> Case:
    """The case of a batch of prompts. Each builder returns a function that generates tokens."""
    model = LanguageModel(jax.random.key(0))
    prompts = jax.random.randint(jax.random.key(1), (batch, PROMPT), 0, VOCABULARY)
    builders = {
        BY_HAND: functools.partial(_by_hand, model, prompts),
        EQXLIKE: functools.partial(_eqxlike, model, prompts),
        SCAN_STACK: functools.partial(_scan_stack, model, prompts),
        NNX: functools.partial(_nnx, model, prompts),
    }
    return Case(f"{DEPTH} layers of {WIDTH}, batch {batch}", builders, baseline=BY_HAND)


def check(calls: dict[str, Any]) -> None:
    """Raises `AssertionError` unless all columns generate the same tokens."""
    expected = np.asarray(calls[BY_HAND]())
    for column, call in calls.items():
        np.testing.assert_array_equal(np.asarray(call()), expected, err_msg=column)


def _eqxlike(model: Any, prompts: jax.Array) -> Any:
    sampler = nn.Sampler(temperature=0)
    return lambda: nn.generate(model, prompts, max_new_tokens=NEW, sampler=sampler)


def _scan_stack(model: Any, prompts: jax.Array) -> Any:
    stack = nn.ScanStack.stack(list(model.blocks))
    return _eqxlike(eqx.tree_at(lambda model: model.blocks, model, stack), prompts)


# --- By hand: functions of arrays and a whole batch ---


def _by_hand(model: Any, prompts: jax.Array) -> Any:
    blocks = [
        {
            "norms": [(norm.weight, norm.bias) for norm in (block.attention_norm, block.mlp_norm)],
            "query": block.attention.query_proj.weight.T,
            "key": block.attention.key_proj.weight.T,
            "value": block.attention.value_proj.weight.T,
            "output": block.attention.output_proj.weight.T,
            "up": (block.up.weight.T, block.up.bias),
            "down": (block.down.weight.T, block.down.bias),
        }
        for block in model.blocks
    ]
    arrays = {
        "embedding": model.embedding.weight,
        "positions": model.positions.weight,
        "blocks": jax.tree.map(jnp.copy, blocks),
    }
    return lambda: _generate_by_hand(arrays, prompts)


@jax.jit
def _generate_by_hand(arrays: Any, prompts: jax.Array) -> jax.Array:
    batch = len(prompts)
    zeros = jnp.zeros((batch, HEADS, PROMPT + NEW, WIDTH // HEADS))
    logits, caches = _forward(arrays, prompts, [(zeros, zeros)] * DEPTH, 0)
    token = logits[:, -1].argmax(-1)
    new = jnp.zeros((batch, NEW), token.dtype).at[:, 0].set(token)

    def step(index: Any, carry: Any) -> Any:
        token, caches, new = carry
        logits, caches = _forward(arrays, token[:, None], caches, PROMPT + index - 1)
        token = logits[:, 0].argmax(-1)
        return token, caches, new.at[:, index].set(token)

    return jax.lax.fori_loop(1, NEW, step, (token, caches, new))[2]


def _forward(arrays: Any, tokens: jax.Array, caches: Any, start: Any) -> Any:
    batch, length = tokens.shape
    places = start + jnp.arange(length)
    x = arrays["embedding"][tokens] + arrays["positions"][places][None]
    new_caches = []

    def heads(x: jax.Array, weight: jax.Array) -> jax.Array:
        return (x @ weight).reshape(batch, length, HEADS, -1).swapaxes(1, 2)

    for block, cache in zip(arrays["blocks"], caches, strict=True):
        y = _normalised(x, *block["norms"][0])
        query, key, value = (heads(y, block[name]) for name in ("query", "key", "value"))
        stored = [
            jax.lax.dynamic_update_slice(old, new, (0, 0, start, 0))
            for old, new in zip(cache, (key, value), strict=True)
        ]
        new_caches.append(tuple(stored))
        if length == 1:
            key, value = stored
        scores = jnp.einsum("bhqd,bhkd->bhqk", query, key) / np.sqrt(WIDTH // HEADS)
        seen = jnp.arange(key.shape[2])[None] <= places[:, None]
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e30))
        attended = jnp.einsum("bhqk,bhkd->bqhd", weights, value).reshape(batch, length, WIDTH)
        x = x + attended @ block["output"]
        y = _normalised(x, *block["norms"][1])
        hidden = jax.nn.gelu(y @ block["up"][0] + block["up"][1])
        x = x + hidden @ block["down"][0] + block["down"][1]
    return x @ arrays["embedding"].T, new_caches


def _normalised(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    return jax.nn.standardize(x, axis=-1, epsilon=1e-5) * weight + bias


# --- NNX ---


def _nnx(model: Any, prompts: jax.Array) -> Any:
    from benchmarks import nnx_networks

    return nnx_networks.generator(model, prompts, HEADS, NEW)
