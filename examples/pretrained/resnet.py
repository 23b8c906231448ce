"""A residual network as a classifier of images. Weights come from a published checkpoint.

He, Zhang, Ren & Sun (2016), "Deep Residual Learning for Image Recognition". `BatchNorm` has a
state, so the model is a pair: `nn.make_with_state(ResNet)(config, key=key)`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eqxlike import nn
from eqxlike.train import Stored


class ConvNorm(nn.StatefulLayer):
    conv: nn.Conv2d
    norm: nn.BatchNorm

    def __init__(self, ins: int, outs: int, size: int, stride: int = 1, *, key: jax.Array):
        self.conv = nn.Conv2d(ins, outs, size, stride, size // 2, use_bias=False, key=key)
        self.norm = nn.BatchNorm(outs, "batch", momentum=0.9, mode="batch", unbiased=True)

    def __call__(self, x: jax.Array, state: nn.State) -> tuple[jax.Array, nn.State]:
        return self.norm(self.conv(x), state)


class Layer(nn.StatefulLayer):
    convs: tuple[ConvNorm, ...]
    shortcut: ConvNorm | None

    def __init__(self, ins: int, outs: int, stride: int, is_basic: bool, *, key: jax.Array):
        keys, inner = jax.random.split(key, 4), outs // 4
        basic = [(ins, outs, 3, stride), (outs, outs, 3)]
        bottleneck = [(ins, inner, 1), (inner, inner, 3, stride), (inner, outs, 1)]
        sizes = basic if is_basic else bottleneck
        self.convs = tuple(ConvNorm(*each, key=key) for each, key in zip(sizes, keys, strict=False))
        is_same = (ins, stride) == (outs, 1)
        self.shortcut = None if is_same else ConvNorm(ins, outs, 1, stride, key=keys[3])

    def __call__(self, x: jax.Array, state: nn.State) -> tuple[jax.Array, nn.State]:
        y, state = self.convs[0](x, state)
        for conv in self.convs[1:]:
            y, state = conv(jax.nn.relu(y), state)
        x, state = (x, state) if self.shortcut is None else self.shortcut(x, state)
        return jax.nn.relu(x + y), state


class ResNet(nn.StatefulLayer):
    first: ConvNorm
    pool: nn.MaxPool2d
    stages: tuple[nn.Sequential, ...]
    readout: nn.Linear

    def __init__(self, config: dict[str, Any], *, key: jax.Array):
        """`config` is the `config.json` of the checkpoint."""
        keys, ins = jax.random.split(key, len(config["depths"]) + 2), config["embedding_size"]
        is_basic, stride = config["layer_type"] == "basic", 1 + config["downsample_in_first_stage"]
        self.first, stages = ConvNorm(config["num_channels"], ins, 7, 2, key=keys[0]), []
        for outs, depth, own in zip(
            config["hidden_sizes"], config["depths"], keys[2:], strict=True
        ):
            first, *others = jax.random.split(own, depth)
            layers = [Layer(ins, outs, stride, is_basic, key=first)]
            layers += [Layer(outs, outs, 1, is_basic, key=each) for each in others]
            stages.append(nn.Sequential(layers))
            ins, stride = outs, 2
        self.pool = nn.MaxPool2d(3, 2, padding=1)
        self.stages = tuple(stages)
        self.readout = nn.Linear(ins, len(config.get("id2label", "ab")), key=keys[1])

    def __call__(self, image: jax.Array, state: nn.State) -> tuple[jax.Array, nn.State]:
        """The logits of an image of shape (channels, height, width), and the new state."""
        x, state = self.first(image, state)
        x = self.pool(jax.nn.relu(x))
        for stage in self.stages:
            x, state = stage(x, state)
        return self.readout(jnp.mean(x, (1, 2))), state


_LAYER = "stages.{stage}.layers.{layer}."
_PLACES = {
    "0.first.": "resnet.embedder.embedder.",
    f"0.{_LAYER}convs.{{i}}.": f"resnet.encoder.{_LAYER}layer.{{i}}.",
    f"0.{_LAYER}shortcut.": f"resnet.encoder.{_LAYER}shortcut.",
}
NAMES: dict[str, Any] = {"0.readout.*": "classifier.1.*"}
"""The table for `train.import_safetensors`, for the pair of model and state."""

for ours, theirs in _PLACES.items():
    # In eqxlike, a count of 0 means that the statistics are final.
    NAMES[ours + "norm.batch_counter"] = Stored(
        theirs + "normalization.num_batches_tracked", load=lambda _: np.int32(0), save=np.int64
    )
    NAMES[ours + "norm.*"] = theirs + "normalization.*"
    NAMES[ours + "conv.*"] = theirs + "convolution.*"
