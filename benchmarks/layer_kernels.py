"""Attention and convolution alone, and the benefit of `nn.fuse`.

One attention and one convolution stand next to JAX's functions and PyTorch, with all gradients;
PyTorch's column is there if PyTorch is installed. Self-attention computes its projections
separately, or as one product.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import eqxlike
from benchmarks import networks
from benchmarks.cases import Case, check_agreement
from benchmarks.command import Row
from benchmarks.report import Table
from benchmarks.timing import Call
from eqxlike import nn

OURS = "eqxlike"
PLAIN = "all scores"
JAX = "jax.nn or jax.lax"
TORCH = "PyTorch"

ATTENTION = Table("Attention of a batch, value and gradient")
CONVOLUTION = Table("Convolution of a batch, value and gradient")


def attention(length: int, batch: int, is_causal: bool) -> Row:
    """The row of an attention with 4 heads of 32 features. `PLAIN` materialises all scores."""
    arrays = [networks.normal(batch, length, 4, 32, seed=seed) for seed in range(3)]

    def by_jax(implementation: Any) -> Call:
        attend = functools.partial(
            nn.dot_product_attention, implementation=implementation, is_causal=is_causal
        )
        if implementation == JAX:
            attend = functools.partial(jax.nn.dot_product_attention, is_causal=is_causal)
        return _of_jax(jax.vmap(attend), *arrays)

    def by_torch() -> Call:
        from torch.nn.functional import scaled_dot_product_attention  # pyright: ignore[reportMissingImports]

        def attend(*arrays):
            heads_first = (each.transpose(1, 2) for each in arrays)
            return scaled_dot_product_attention(*heads_first, is_causal=is_causal).transpose(1, 2)

        return _of_torch(attend, *arrays)

    name = f"{length} tokens, batch {batch}, {'causal' if is_causal else 'all keys'}"
    ways = {PLAIN: "plain", OURS: "auto", JAX: JAX}
    builders: dict[str, Callable[[], Call]] = {
        column: functools.partial(by_jax, way) for column, way in ways.items()
    }
    return _row(ATTENTION, name, {**builders, TORCH: by_torch})


def convolution(batch: int, channels: int, out_channels: int, size: int, kernel: int) -> Row:
    """The row of a `Conv2d` whose output has the size of its input."""
    x = networks.normal(batch, channels, size, size, seed=0)
    weight = networks.normal(out_channels, channels, kernel, kernel, seed=1)

    def ours() -> Call:
        layer = nn.Conv2d(
            channels, out_channels, kernel, padding="SAME", use_bias=False, key=jax.random.key(0)
        )

        def run(x: jax.Array, weight: jax.Array) -> jax.Array:
            return jax.vmap(eqxlike.tree_at(lambda layer: layer.weight, layer, weight))(x)

        return _of_jax(run, x, weight)

    def by_jax() -> Call:
        convolve = functools.partial(
            jax.lax.conv_general_dilated, window_strides=(1, 1), padding="SAME"
        )
        return _of_jax(convolve, x, weight)

    def by_torch() -> Call:
        from torch.nn.functional import conv2d  # pyright: ignore[reportMissingImports]

        return _of_torch(functools.partial(conv2d, padding="same"), x, weight)

    name = f"{kernel}x{kernel}, {channels} to {out_channels} channels, {size}x{size}, batch {batch}"
    return _row(CONVOLUTION, name, {JAX: by_jax, OURS: ours, TORCH: by_torch})


def _row(table: Table, name: str, builders: Mapping[str, Callable[[], Call]]) -> Row:
    baseline = next(iter(builders))
    return Row(table, Case(name, builders, baseline), functools.partial(check_agreement, times=1))


def _of_jax(function: Callable[..., jax.Array], *arrays: jax.Array) -> Call:
    def loss(*arrays: jax.Array) -> jax.Array:
        return jnp.mean(jnp.sin(function(*arrays)))

    @jax.jit
    def step(*arrays: jax.Array) -> jax.Array:
        value, gradients = jax.value_and_grad(loss, range(len(arrays)))(*arrays)
        # The result contains all gradients, so that XLA computes all of them.
        return jnp.stack([value, *(jnp.mean(jnp.abs(each)) for each in gradients)])

    return functools.partial(step, *arrays)


def _of_torch(function: Callable, *arrays: jax.Array) -> Call:
    import torch  # pyright: ignore[reportMissingImports]

    tensors = [torch.tensor(np.asarray(each), requires_grad=True) for each in arrays]

    def step() -> Any:
        value = function(*tensors).sin().mean()
        gradients = torch.autograd.grad(value, tensors)
        return np.array(
            [float(each) for each in (value.detach(), *(g.abs().mean() for g in gradients))]
        )

    return step


# --- self-attention, its projections separately and as one product ---

APART = "three products"
FUSED = "one product (nn.fuse)"

FORWARD = Table("Self-attention of a batch, forward", unit="microseconds")
GRADIENT = Table("Self-attention of a batch, value and gradient", unit="microseconds")


def self_attention(width: int, length: int, batch: int, table: Table) -> Row:
    """The row of a `MultiheadAttention` with four heads, called as `attention(x, x, x)`."""

    def build(column: str) -> Call:
        model = nn.MultiheadAttention(4, width, key=jax.random.key(0))
        model = nn.fuse(model) if column == FUSED else model
        function = _value_and_gradient if table is GRADIENT else _output
        return functools.partial(function, model, networks.normal(batch, length, width, seed=1))

    builders = {column: functools.partial(build, column) for column in (APART, FUSED)}
    return _row(table, f"width {width}, {length} tokens, batch {batch}", builders)


@eqxlike.filter_jit
def _output(model: nn.MultiheadAttention, x: jax.Array) -> jax.Array:
    return jax.vmap(lambda x: model(x, x, x))(x)


@eqxlike.filter_jit
def _value_and_gradient(model: nn.MultiheadAttention, x: jax.Array) -> jax.Array:
    def loss(model: nn.MultiheadAttention) -> jax.Array:
        return jnp.mean(_output(model, x) ** 2)

    value, gradient = eqxlike.filter_value_and_grad(loss)(model)
    # The result contains the whole gradient, so that XLA computes all of it.
    return value + 0.0 * sum(jnp.sum(each) for each in jax.tree.leaves(gradient))
