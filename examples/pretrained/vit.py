"""The Vision Transformer as a classifier of images. Weights come from a published checkpoint.

Dosovitskiy et al. (2021), "An Image is Worth 16x16 Words: Transformers for Image Recognition at
Scale". The model has no dropout.
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
    attention_norm: nn.LayerNorm
    attention: nn.MultiheadAttention
    mlp_norm: nn.LayerNorm
    mlp: nn.MLP

    def __init__(self, config: dict[str, Any], key: jax.Array):
        (key1, key2), width = jax.random.split(key), config["hidden_size"]
        inner, activation = config["intermediate_size"], ACTIVATIONS[config["hidden_act"]]
        has_bias, heads = config.get("qkv_bias", True), config["num_attention_heads"]
        biases: Any = {f"use_{name}_bias": has_bias for name in ("query", "key", "value")}
        self.attention_norm = nn.LayerNorm(width, config["layer_norm_eps"])
        self.attention = nn.MultiheadAttention(
            heads, width, use_output_bias=True, **biases, key=key1
        )
        self.mlp_norm = nn.LayerNorm(width, config["layer_norm_eps"])
        self.mlp = nn.MLP(width, width, inner, 1, activation, key=key2)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jax.vmap(self.attention_norm)(x)
        x = x + self.attention(y, y, y)
        return x + jax.vmap(self.mlp)(jax.vmap(self.mlp_norm)(x))


class ViT(eqx.Module):
    patches: nn.Conv2d
    first: jax.Array
    positions: jax.Array
    blocks: nn.ScanStack
    norm: nn.LayerNorm
    readout: nn.Linear

    def __init__(self, config: dict[str, Any], *, key: jax.Array):
        """`config` is the `config.json` of the checkpoint."""
        keys, width, size = jax.random.split(key, 3), config["hidden_size"], config["patch_size"]
        num_patches, depth = (config["image_size"] // size) ** 2, config["num_hidden_layers"]
        self.patches = nn.Conv2d(config["num_channels"], width, size, size, key=keys[0])
        self.first = jnp.zeros((1, 1, width))
        self.positions = jnp.zeros((1, num_patches + 1, width))
        self.blocks = nn.ScanStack(lambda key: Block(config, key), depth, key=keys[1])
        self.norm = nn.LayerNorm(width, config["layer_norm_eps"])
        self.readout = nn.Linear(width, len(config.get("id2label", "ab")), key=keys[2])

    def __call__(self, image: jax.Array) -> jax.Array:
        """The logits of an image of shape (channels, height, width)."""
        patches = self.patches(image).reshape(self.first.size, -1).T
        x = jnp.concatenate([self.first[0], patches]) + self.positions[0]
        return self.readout(self.norm(self.blocks(x)[0]))


_LAYER = "vit.encoder.layer.{i}."
NAMES: dict[str, Any] = {
    "first": "vit.embeddings.cls_token",
    "positions": "vit.embeddings.position_embeddings",
    "patches.weight": "vit.embeddings.patch_embeddings.projection.weight",
    "patches.bias": Stored("vit.embeddings.patch_embeddings.projection.bias", shape=(-1,)),
    "norm.*": "vit.layernorm.*",
    "readout.*": "classifier.*",
    "blocks.{i}.attention_norm.*": _LAYER + "layernorm_before.*",
    "blocks.{i}.mlp_norm.*": _LAYER + "layernorm_after.*",
    "blocks.{i}.attention.output_proj.*": _LAYER + "attention.output.dense.*",
    "blocks.{i}.attention.{part}_proj.*": _LAYER + "attention.attention.{part}.*",
    "blocks.{i}.mlp.layers.0.*": _LAYER + "intermediate.dense.*",
    "blocks.{i}.mlp.layers.1.*": _LAYER + "output.dense.*",
}
"""The table for `train.import_safetensors`."""
