"""Other warm calls: large models, lists and dicts in a model, and transformations without `jit`."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import eqxlike
from benchmarks import columns, networks
from benchmarks.cases import Case, check_agreement
from benchmarks.columns import Work
from benchmarks.layer_rows import Row, Table
from benchmarks.timing import Call

MODELS = Table("Our Modules", ("completion", "dispatch"), unit="microseconds")
OUTSIDE = Table("Outside jit", unit="microseconds")

JAX = "jax"
OURS_OUTSIDE = "filtered"


class Layer(eqxlike.Module):
    """An affine map with a ReLU, without static parts."""

    weight: jax.Array
    bias: jax.Array

    def __call__(self, x: jax.Array) -> jax.Array:
        """Applies the layer to one example."""
        return jax.nn.relu(self.weight @ x + self.bias)


class Chain(eqxlike.Module):
    """Layers in sequence, stored in any container."""

    layers: Any

    def __call__(self, x: jax.Array) -> jax.Array:
        """Applies the layers to one example."""
        layers = self.layers.values() if isinstance(self.layers, dict) else self.layers
        for layer in layers:
            x = layer(x)
        return x


class Wide(eqxlike.Module):
    """Many arrays. A call uses only two of them, so that it measures dispatch."""

    layers: tuple[Layer, ...]

    def __call__(self, x: jax.Array) -> jax.Array:
        """Adds the first and the last bias to one example."""
        return x + self.layers[0].bias + self.layers[-1].bias


def layers(depth: int, width: int) -> list[Layer]:
    """`depth` layers of `width` features."""
    arrays = networks.weights([width] * (depth + 1))
    pairs = zip(arrays[::2], arrays[1::2], strict=True)
    return [Layer(jnp.asarray(weight), jnp.asarray(bias)) for weight, bias in pairs]


def named_layers(depth: int, width: int) -> list[tuple[str, Layer]]:
    """Pairs of a name and a layer."""
    return [(f"layer{index}", layer) for index, layer in enumerate(layers(depth, width))]


def warm(name: str, make: Callable[[], eqxlike.Module], width: int) -> Row:
    """The row that calls a model without static leaves on one example."""

    @functools.cache
    def work() -> Work:
        example = networks.normal(width, seed=1)
        return Work(eqxlike, networks.forward, (make(),), (example,), False)

    builders: dict[str, Callable[[], Call]] = {
        columns.FLAT: lambda: columns.on_flat_list(work()),
        columns.MODULE: lambda: columns.on_module(work()),
        columns.OURS: lambda: columns.filtered(work()),
    }
    return Row(MODELS, Case(name, builders), check_agreement)


def outside(name: str, plain: Callable[..., Any], filtered: Callable[..., Any]) -> Row:
    """The row that calls a transformed function outside `jit`."""

    def call(function: Callable[..., Any]) -> Call:
        model, x = Chain(tuple(layers(2, 8))), networks.normal(8, seed=1)
        return lambda: jax.tree_util.tree_leaves(function(model, x))[0]

    builders = {JAX: lambda: call(plain), OURS_OUTSIDE: lambda: call(filtered)}
    return Row(OUTSIDE, Case(name, builders, JAX), check_agreement)


def total(model: Chain, x: jax.Array) -> jax.Array:
    """A scalar function of a model and an example."""
    return jnp.sum(model(x))


def scaled(model: Chain, x: jax.Array) -> jax.Array:
    """A function for `vmap` over both arguments."""
    return x * model.layers[0].bias


def rows() -> list[Row]:
    """The rows of warm calls."""
    return [
        warm("1000 arrays", lambda: Wide(tuple(layers(500, 4))), 4),
        warm("list of 2 layers", lambda: Chain(layers(2, 8)), 8),
        warm("list of 64 layers", lambda: Chain(layers(64, 8)), 8),
        warm("dict of 8 layers", lambda: Chain(dict(named_layers(8, 8))), 8),
        outside("grad", jax.grad(total), eqxlike.filter_grad(total)),
        outside("value_and_grad", jax.value_and_grad(total), eqxlike.filter_value_and_grad(total)),
        outside("vmap", jax.vmap(scaled), eqxlike.filter_vmap(scaled)),
    ]
