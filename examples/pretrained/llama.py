"""Llama, Mistral, Qwen2 and Qwen3, with the weights of a published checkpoint.

Touvron et al. (2023), "LLaMA: Open and Efficient Foundation Language Models"; Jiang et al. (2023),
"Mistral 7B"; Yang et al. (2024), "Qwen2 Technical Report". The `config.json` of the checkpoint
states the differences: Mistral attends to a window, Qwen2 has biases, Qwen3 normalises queries and
keys, and some models use the weight of the embedding as readout.
"""

import functools
from typing import Any

import jax

import eqxlike as eqx
from eqxlike import nn


class Block(eqx.Module):
    attention_norm: nn.RMSNorm
    attention: nn.MultiheadAttention
    mlp_norm: nn.RMSNorm
    gate: nn.Linear
    up: nn.Linear
    down: nn.Linear

    def __init__(self, config: dict[str, Any], key: jax.Array):
        keys, width, inner = (
            jax.random.split(key, 4),
            config["hidden_size"],
            config["intermediate_size"],
        )
        norm = functools.partial(nn.RMSNorm, eps=config["rms_norm_eps"], use_bias=False)
        linear = functools.partial(nn.Linear, use_bias=config.get("mlp_bias", False))
        self.attention_norm, self.mlp_norm = norm(width), norm(width)
        self.attention = nn.MultiheadAttention(
            config["num_attention_heads"], width, **attention_options(config), key=keys[0]
        )
        if config["model_type"] == "qwen3":
            norms = (norm(self.attention.qk_size), norm(self.attention.qk_size))
            where = lambda layer: (layer.query_norm, layer.key_norm)  # noqa: E731
            self.attention = eqx.tree_at(where, self.attention, norms)
        self.gate, self.up = linear(width, inner, key=keys[1]), linear(width, inner, key=keys[2])
        self.down = linear(inner, width, key=keys[3])

    def __call__(self, carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        x, cache = carry
        y = jax.vmap(self.attention_norm)(x)
        y, cache = self.attention(y, y, y, "causal", cache=cache)
        x = x + y
        y = jax.vmap(self.mlp_norm)(x)
        y = jax.nn.silu(jax.vmap(self.gate)(y)) * jax.vmap(self.up)(y)
        return x + jax.vmap(self.down)(y), cache


def attention_options(config: dict[str, Any]) -> dict[str, Any]:
    kind, window = config["model_type"], config.get("sliding_window")
    if config.get("use_sliding_window"):
        raise ValueError("use_sliding_window: not all layers of Qwen have the window.")
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = rope.pop("rope_theta", config.get("rope_theta", 10_000.0))
    has_bias = config.get("attention_bias", False)
    return {
        "qk_size": size,
        "vo_size": size,
        "num_kv_heads": config.get("num_key_value_heads"),
        "rotary": nn.RotaryPositionalEmbedding(size, theta, scaling=rope or None),
        "window": window - 1 if kind == "mistral" and window else None,
        "normalize_qk": kind == "qwen3",
        "use_output_bias": has_bias,
        **{f"use_{n}_bias": has_bias or kind == "qwen2" for n in ("query", "key", "value")},
    }


class Llama(eqx.Module):
    embedding: nn.Embedding
    blocks: nn.ScanStack
    norm: nn.RMSNorm
    readout: nn.Linear | None

    def __init__(self, config: dict[str, Any], *, key: jax.Array):
        """`config` is the `config.json` of the checkpoint."""
        keys, width, num_tokens = (
            jax.random.split(key, 3),
            config["hidden_size"],
            config["vocab_size"],
        )
        depth, is_tied = config["num_hidden_layers"], config.get("tie_word_embeddings", False)
        self.embedding = nn.Embedding(num_tokens, width, key=keys[0])
        self.blocks = nn.ScanStack(lambda key: Block(config, key), depth, key=keys[1])
        self.norm = nn.RMSNorm(width, config["rms_norm_eps"], use_bias=False)
        self.readout = None if is_tied else nn.Linear(width, num_tokens, False, key=keys[2])

    def __call__(self, tokens: jax.Array, cache: Any = None) -> tuple[jax.Array, Any]:
        """The logits of the next token at each position, shape (length, vocab_size)."""
        x, cache = self.blocks((jax.vmap(self.embedding)(tokens), cache))
        readout = self.embedding if self.readout is None else self.readout
        return jax.vmap(self.norm)(x) @ readout.weight.T, cache


def names(config: dict[str, Any]) -> dict[str, Any]:
    """The table for `train.import_safetensors`."""
    layer, attention = "model.layers.{i}.", "model.layers.{i}.self_attn."
    table = {
        "embedding.weight": "model.embed_tokens.weight",
        "norm.weight": "model.norm.weight",
        "blocks.{i}.attention_norm.*": layer + "input_layernorm.*",
        "blocks.{i}.attention.query_proj.*": attention + "q_proj.*",
        "blocks.{i}.attention.key_proj.*": attention + "k_proj.*",
        "blocks.{i}.attention.value_proj.*": attention + "v_proj.*",
        "blocks.{i}.attention.output_proj.*": attention + "o_proj.*",
        "blocks.{i}.mlp_norm.*": layer + "post_attention_layernorm.*",
        "blocks.{i}.gate.*": layer + "mlp.gate_proj.*",
        "blocks.{i}.up.*": layer + "mlp.up_proj.*",
        "blocks.{i}.down.*": layer + "mlp.down_proj.*",
    }
    if config["model_type"] == "qwen3":
        table["blocks.{i}.attention.query_norm.*"] = attention + "q_norm.*"
        table["blocks.{i}.attention.key_norm.*"] = attention + "k_norm.*"
    return table if config.get("tie_word_embeddings") else table | {"readout.*": "lm_head.*"}
