"""BERT, with its prediction of masked tokens. Weights come from a published checkpoint.

Devlin, Chang, Lee & Toutanova (2019), "BERT: Pre-training of Deep Bidirectional Transformers for
Language Understanding". The model has no dropout.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

import eqxlike as eqx
from eqxlike import nn
from eqxlike.train import Stored

ACTIVATIONS = {"gelu": functools.partial(jax.nn.gelu, approximate=False), "relu": jax.nn.relu}


class Block(eqx.Module):
    attention: nn.MultiheadAttention
    attention_norm: nn.LayerNorm
    mlp: nn.MLP
    mlp_norm: nn.LayerNorm

    def __init__(self, config: dict[str, Any], key: jax.Array):
        (key1, key2), width = jax.random.split(key), config["hidden_size"]
        inner, activation = config["intermediate_size"], ACTIVATIONS[config["hidden_act"]]
        biases: Any = {f"use_{name}_bias": True for name in ("query", "key", "value", "output")}
        num_heads = config["num_attention_heads"]
        self.attention = nn.MultiheadAttention(num_heads, width, **biases, key=key1)
        self.attention_norm = nn.LayerNorm(width, config["layer_norm_eps"])
        self.mlp = nn.MLP(width, width, inner, 1, activation, key=key2)
        self.mlp_norm = nn.LayerNorm(width, config["layer_norm_eps"])

    def __call__(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        x = jax.vmap(self.attention_norm)(x + self.attention(x, x, x, mask))
        return jax.vmap(self.mlp_norm)(x + jax.vmap(self.mlp)(x))


class BERT(eqx.Module):
    tokens: nn.Embedding
    positions: nn.Embedding
    types: nn.Embedding
    norm: nn.LayerNorm
    blocks: nn.ScanStack
    head: nn.Sequential
    bias: jax.Array

    def __init__(self, config: dict[str, Any], *, key: jax.Array):
        """`config` is the `config.json` of the checkpoint."""
        keys, width, eps = jax.random.split(key, 5), config["hidden_size"], config["layer_norm_eps"]
        depth, activation = config["num_hidden_layers"], ACTIVATIONS[config["hidden_act"]]
        self.tokens = nn.Embedding(config["vocab_size"], width, key=keys[0])
        self.positions = nn.Embedding(config["max_position_embeddings"], width, key=keys[1])
        self.types = nn.Embedding(config["type_vocab_size"], width, key=keys[2])
        self.norm = nn.LayerNorm(width, eps)
        self.blocks = nn.ScanStack(lambda key: Block(config, key), depth, key=keys[3])
        dense = nn.Linear(width, width, key=keys[4])
        self.head = nn.Sequential([dense, nn.Lambda(activation), nn.LayerNorm(width, eps)])
        self.bias = jnp.zeros((1, config["vocab_size"]))

    def __call__(self, tokens: jax.Array, types: Any = None, mask: Any = None) -> jax.Array:
        """The logits of each token, shape (length, vocab_size). `mask` is False for padding."""
        types = jnp.zeros_like(tokens) if types is None else types
        mask = None if mask is None else jnp.broadcast_to(mask, (len(tokens), len(tokens)))
        x = jax.vmap(self.tokens)(tokens) + jax.vmap(self.types)(types)
        x = jax.vmap(self.norm)(x + self.positions.weight[: len(tokens)])
        return jax.vmap(self.head)(self.blocks(x, mask)) @ self.tokens.weight.T + self.bias


_LAYER = "bert.encoder.layer.{i}."
NAMES: dict[str, Any] = {
    "tokens.weight": "bert.embeddings.word_embeddings.weight",
    "positions.weight": "bert.embeddings.position_embeddings.weight",
    "types.weight": "bert.embeddings.token_type_embeddings.weight",
    "norm.*": "bert.embeddings.LayerNorm.*",
    "blocks.{i}.attention.output_proj.*": _LAYER + "attention.output.dense.*",
    "blocks.{i}.attention.{part}_proj.*": _LAYER + "attention.self.{part}.*",
    "blocks.{i}.attention_norm.*": _LAYER + "attention.output.LayerNorm.*",
    "blocks.{i}.mlp.layers.0.*": _LAYER + "intermediate.dense.*",
    "blocks.{i}.mlp.layers.1.*": _LAYER + "output.dense.*",
    "blocks.{i}.mlp_norm.*": _LAYER + "output.LayerNorm.*",
    "head.layers.0.*": "cls.predictions.transform.dense.*",
    "head.layers.2.*": "cls.predictions.transform.LayerNorm.*",
    "bias": Stored("cls.predictions.bias", shape=(-1,)),
}
"""The table for `train.import_safetensors`."""

OLD_NAMES = {
    ours.replace("*", new): theirs.replace("*", old)
    for ours, theirs in NAMES.items()
    for new, old in {"weight": "gamma", "bias": "beta"}.items()
    if "LayerNorm" in str(theirs)
} | NAMES
"""The table for files with older names, such as bert-base-uncased."""

IGNORE = ("cls.predictions.decoder.*", "cls.seq_relationship.*", "bert.pooler.*", "*.position_ids")
"""Unused arrays of a file: a second copy of the embedding, and arrays for other tasks."""
