"""GPT-2, with the weights of a published checkpoint.

Radford, Wu, Child, Luan, Amodei & Sutskever (2019), "Language Models are Unsupervised Multitask
Learners". The model has no dropout. docs/pretrained.md shows how to load, train and save the model.
docs/generate.md shows how to generate text.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

import eqxlike as eqx
from eqxlike import nn
from eqxlike.train import Stored

ACTIVATIONS = {"gelu_new": jax.nn.gelu, "relu": jax.nn.relu, "silu": jax.nn.silu}


class Block(eqx.Module):
    attention_norm: nn.LayerNorm
    attention: nn.MultiheadAttention
    mlp_norm: nn.LayerNorm
    mlp: nn.MLP

    def __init__(self, config: dict[str, Any], key: jax.Array):
        key1, key2 = jax.random.split(key)
        width, eps = config["n_embd"], config["layer_norm_epsilon"]
        biases: Any = {f"use_{name}_bias": True for name in ("query", "key", "value", "output")}
        activation = ACTIVATIONS[config["activation_function"]]
        self.attention_norm = nn.LayerNorm(width, eps)
        self.attention = nn.MultiheadAttention(config["n_head"], width, **biases, key=key1)
        self.mlp_norm = nn.LayerNorm(width, eps)
        self.mlp = nn.MLP(width, width, config.get("n_inner") or 4 * width, 1, activation, key=key2)

    def __call__(self, carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        x, cache = carry
        y = jax.vmap(self.attention_norm)(x)
        y, cache = self.attention(y, y, y, "causal", cache=cache)
        x = x + y
        return x + jax.vmap(self.mlp)(jax.vmap(self.mlp_norm)(x)), cache


class GPT2(eqx.Module):
    embedding: nn.Embedding
    positions: nn.Embedding
    blocks: nn.ScanStack
    norm: nn.LayerNorm

    def __init__(self, config: dict[str, Any], *, key: jax.Array):
        """`config` is the `config.json` of the checkpoint."""
        keys, width = jax.random.split(key, 3), config["n_embd"]
        self.embedding = nn.Embedding(config["vocab_size"], width, key=keys[0])
        self.positions = nn.Embedding(config["n_positions"], width, key=keys[1])
        self.blocks = nn.ScanStack(lambda key: Block(config, key), config["n_layer"], key=keys[2])
        self.norm = nn.LayerNorm(width, config["layer_norm_epsilon"])

    def __call__(self, tokens: jax.Array, cache: Any = None) -> tuple[jax.Array, Any]:
        """The logits of the next token at each position, shape (length, vocab_size)."""
        positions = jnp.arange(len(tokens)) if cache is None else cache.positions(len(tokens))
        x = jax.vmap(self.embedding)(tokens) + jax.vmap(self.positions)(positions)
        x, cache = self.blocks((x, cache))
        return jax.vmap(self.norm)(x) @ self.embedding.weight.T, cache


def names(prefix: str = "transformer.") -> dict[str, Any]:
    """The table for `train.import_safetensors`. The first published files need `prefix=""`."""
    block, stored = prefix + "h.{i}.", functools.partial(Stored, transpose=True)
    return {
        "embedding.weight": prefix + "wte.weight",
        "positions.weight": prefix + "wpe.weight",
        "norm.*": prefix + "ln_f.*",
        "blocks.{i}.attention_norm.*": block + "ln_1.*",
        "blocks.{i}.attention.query_proj.*": stored(block + "attn.c_attn.*", part=(0, 3)),
        "blocks.{i}.attention.key_proj.*": stored(block + "attn.c_attn.*", part=(1, 3)),
        "blocks.{i}.attention.value_proj.*": stored(block + "attn.c_attn.*", part=(2, 3)),
        "blocks.{i}.attention.output_proj.*": stored(block + "attn.c_proj.*"),
        "blocks.{i}.mlp_norm.*": block + "ln_2.*",
        "blocks.{i}.mlp.layers.0.*": stored(block + "mlp.c_fc.*"),
        "blocks.{i}.mlp.layers.1.*": stored(block + "mlp.c_proj.*"),
    }


IGNORE = ("*.attn.bias", "*.attn.masked_bias", "lm_head.weight")
"""Unused arrays that some files have: masks, and a second copy of the embedding."""
