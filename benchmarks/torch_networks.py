"""The language model and the ResNet in PyTorch, and their training steps.

Importing this file needs PyTorch. The parameters are in the order of `benchmarks.layer_models`. One
matrix projects queries, keys and values.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from torch import nn  # pyright: ignore[reportMissingImports]
from torch.nn import functional  # pyright: ignore[reportMissingImports]

from benchmarks import layer_models, networks
from benchmarks.layer_models import LanguageSizes, ResNetSizes


class TorchStep(NamedTuple):
    """A training step, like `model_steps.Step`. On a CPU its memory is unknown."""

    call: Callable[[], np.ndarray]
    peak_bytes: Callable[[], int | None]


class Block(nn.Module):
    """A pre-norm block of a causal transformer."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        hidden = layer_models.EXPANSION * width
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.projection = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.inner, self.outer = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        projected = self.projection(self.attention_norm(x)).chunk(3, -1)
        split = [each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in projected]
        attended = functional.scaled_dot_product_attention(*split, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        hidden = functional.gelu(self.inner(self.mlp_norm(x)), approximate="tanh")
        return x + self.outer(hidden)


class Bottleneck(nn.Module):
    """A block of a ResNet with the convolutions of `ResNetSizes.blocks`."""

    def __init__(self, convolutions: Iterable[tuple[int, int, int, int]]):
        super().__init__()
        self.layers = nn.ModuleList([_conv_norm(*each) for each in convolutions])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third, *shortcut = self.layers
        y = third(second(first(x).relu()).relu())
        return ((shortcut[0](x) if shortcut else x) + y).relu()


def _conv_norm(before: int, after: int, kernel: int, stride: int) -> nn.Module:
    conv = nn.Conv2d(before, after, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(after))


def language_model(sizes: LanguageSizes) -> nn.Module:
    """The counterpart of `layer_models.language_model`."""
    width, heads, depth = sizes.blocks
    blocks = [Block(width, heads) for _ in range(depth)]
    readout = nn.Linear(width, sizes.tokens)
    return nn.Sequential(nn.Embedding(sizes.tokens, width), *blocks, readout)


def resnet(sizes: ResNetSizes) -> nn.Module:
    """The counterpart of `layer_models.resnet`."""
    stem = _conv_norm(3, sizes.width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
    head = nn.Linear(sizes.blocks[-1][2][1], sizes.classes)
    blocks = map(Bottleneck, sizes.blocks)
    model = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)
    return model.to(memory_format=torch.channels_last)  # type: ignore


def step(network: Any, arrays: Iterable[jax.Array], is_compiled: bool) -> TorchStep:
    """The step of Adam for a network with eqxlike's initial arrays.

    **Raises:** `ImportError` if the step is compiled, which needs a GPU, and PyTorch finds none.
    """
    device = "cuda" if is_compiled else "cpu"
    if is_compiled and not torch.cuda.is_available():
        raise ImportError("PyTorch finds no GPU")
    torch.set_float32_matmul_precision("high")
    model = {"language_model": language_model, "resnet": resnet}[network.maker](network.sizes)
    remaining = iter(arrays)
    with torch.no_grad():
        for parameter in model.parameters():
            found: list[np.ndarray] = []
            while sum(map(len, found)) < len(parameter):
                found.append(np.asarray(next(remaining)))
            parameter.copy_(torch.from_numpy(np.concatenate(found)))
    model.to(device)
    adam = torch.optim.Adam(model.parameters(), lr=networks.LEARNING_RATE, fused=True)
    inputs, labels = (torch.tensor(np.asarray(each), device=device) for each in network.batch())
    if inputs.ndim == 4:
        inputs = inputs.moveaxis(-1, 1)
    labels = labels.long().flatten()
    run: Callable[..., torch.Tensor] = torch.compile(model) if is_compiled else model

    def call() -> np.ndarray:
        with torch.autocast(device, torch.bfloat16, enabled=network.dtype == "bfloat16"):
            outputs = run(inputs)
            loss = functional.cross_entropy(outputs.flatten(0, -2).float(), labels)
        loss.backward()
        adam.step()
        adam.zero_grad(set_to_none=True)
        return loss.detach().cpu().numpy()

    def peak_bytes() -> int | None:
        if not is_compiled:
            return None
        torch.cuda.reset_peak_memory_stats()
        call()
        return torch.cuda.max_memory_allocated()

    return TorchStep(call, peak_bytes)
