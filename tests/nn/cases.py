"""Configurations of all layers, which satisfy the laws in `test_laws.py`."""

import copy
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr

from eqxlike import nn, tree_at


def call_plainly(layer: Any, *inputs: Any, key: Any) -> Any:
    return layer(*inputs, key=key)


@dataclasses.dataclass(frozen=True)
class Case:
    """One configuration of a layer.

    - `make`: makes the layer, called as `make(key=, dtype=)`. May return any pytree, such as a pair
        of layer and state.
    - `in_shapes`: the shape of each input.
    - `out_shape`: the shape of the output of `call`.
    - `call`: calls the layer as `call(layer, *inputs, key=)`. By default `layer(*inputs, key=key)`.
    - `batch_axis`: the name of the batch axis, if the layer needs a batch.
    """

    make: Callable[..., Any]
    in_shapes: tuple[tuple[int, ...], ...]
    out_shape: tuple[int, ...]
    call: Callable[..., Any] = call_plainly
    batch_axis: str | None = None


def without_options(make: Callable[[], Any]) -> Callable[..., Any]:
    """`make` for a layer that accepts neither key nor dtype."""
    return lambda key, dtype: make()


def look_up(layer, x, *, key):
    return layer(jnp.argmax(x), key=key)


def without_key(make):
    return lambda key, dtype: make(dtype=dtype)


def hidden_of(layer, x, hidden, memory, *, key):
    return layer(x, (hidden, memory), key=key)[0]


def with_state(make):
    return lambda **options: nn.make_with_state(make)(**options)


def call_with_state(layer_and_state, x, *, key):
    layer, state = layer_and_state
    return layer(x, copy.copy(state), key=key)[0]


def lora(key, dtype):
    """A layer whose correction is not zero, unlike the correction of a new layer."""
    linear_key, layer_key, up_key = jr.split(key, 3)
    linear = nn.Linear("scalar", "scalar", dtype=dtype, key=linear_key)
    layer = nn.LoRALinear(linear, 2, alpha=3.0, key=layer_key)
    up = jax.nn.initializers.normal(1.0)(up_key, layer.up.shape, dtype)
    return tree_at(lambda layer: layer.up, layer, up)


def parallel(key, dtype):
    linears = [nn.Linear(3, 4, dtype=dtype, key=each) for each in jr.split(key, 3)]
    return nn.Parallel(linears, "concatenate")


def sequential(**options):
    return nn.Sequential([nn.Linear(3, 4, **options), nn.Lambda(jax.nn.relu), nn.Dropout(0.1)])


def scan_stack(key, dtype):
    return nn.ScanStack(lambda key: nn.Linear(3, 3, dtype=dtype, key=key), 4, key=key)


def batch_norm(key, dtype):
    return nn.BatchNorm(3, axis_name="batch", mode="batch", dtype=dtype)


def spectral_norm(key, dtype):
    linear_key, norm_key = jr.split(key)
    return nn.SpectralNorm(nn.Linear(3, 4, key=linear_key, dtype=dtype), "weight", key=norm_key)


class Counter(nn.StatefulLayer):
    """Adds the number of its calls plus `start` to the input."""

    index: nn.StateIndex

    def __init__(self, start=0):
        self.index = nn.StateIndex(jnp.array(start))

    def __call__(self, x, state, *, key=None):
        count = state.get(self.index) + 1
        return x + count, state.set(self.index, count)


CASES = {
    "Linear": Case(partial(nn.Linear, "scalar", "scalar"), ((),), ()),
    "Identity": Case(without_options(nn.Identity), ((3,),), (3,)),
    "MLP": Case(partial(nn.MLP, 3, 4, 5, 1), ((3,),), (4,)),
    "GatedMLP": Case(partial(nn.GatedMLP, 3, 5, 4, jax.nn.gelu, True), ((3,),), (4,)),
    "Dropout": Case(without_options(nn.Dropout), ((3, 4),), (3, 4)),
    "Lambda": Case(without_options(partial(nn.Lambda, jnp.tanh)), ((3,),), (3,)),
    "Sequential": Case(sequential, ((3,),), (4,)),
    "MultiheadAttention": Case(
        partial(nn.MultiheadAttention, 2, 4), ((3, 4), (5, 4), (5, 4)), (3, 4)
    ),
    "FusedAttention": Case(
        lambda **options: nn.fuse(nn.MultiheadAttention(2, 4, use_key_bias=True, **options)),
        ((3, 4),),
        (3, 4),
        lambda layer, x, key: layer(x, x, x, key=key),
    ),
    "BayesianLinear": Case(partial(nn.BayesianLinear, "scalar", "scalar", False), ((),), ()),
    "BayesianConv": Case(
        lambda **options: nn.BayesianConv(nn.Conv2d(2, 4, 2, **options)), ((2, 3, 3),), (4, 2, 2)
    ),
    "BayesianMLP": Case(partial(nn.BayesianMLP, 3, 4, 5, 0), ((3,),), (4,)),
    "Conv2d": Case(partial(nn.Conv2d, 2, 4, 3, 2, 1, groups=2), ((2, 5, 6),), (4, 3, 3)),
    "ConvTranspose1d": Case(
        partial(nn.ConvTranspose1d, 2, 3, 3, 2, 1, 1, padding_mode="CIRCULAR"), ((2, 5),), (3, 10)
    ),
    "Embedding": Case(partial(nn.Embedding, 5, 3), ((5,),), (3,), look_up),
    "RotaryPositionalEmbedding": Case(
        without_options(partial(nn.RotaryPositionalEmbedding, 6)), ((4, 6),), (4, 6)
    ),
    "PReLU": Case(lambda key, dtype: nn.PReLU(jnp.full(3, 0.1, dtype)), ((2, 3),), (2, 3)),
    "LoRALinear": Case(lora, ((),), ()),
    "LayerNorm": Case(without_key(partial(nn.LayerNorm, (2, 3))), ((2, 3),), (2, 3)),
    "RMSNorm": Case(without_key(partial(nn.RMSNorm, 3)), ((3,),), (3,)),
    "GroupNorm": Case(without_key(partial(nn.GroupNorm, 2, 4)), ((4, 3),), (4, 3)),
    "Parallel": Case(parallel, ((3,),), (12,)),
    "AvgPool2d": Case(
        without_options(partial(nn.AvgPool2d, 3, 2, 1, count_include_pad=False)),
        ((2, 5, 6),),
        (2, 3, 3),
    ),
    "MaxPool1d": Case(without_options(partial(nn.MaxPool1d, 2, padding=1)), ((2, 5),), (2, 6)),
    "AdaptiveAvgPool1d": Case(without_options(partial(nn.AdaptiveAvgPool1d, 3)), ((2, 5),), (2, 3)),
    "GRUCell": Case(partial(nn.GRUCell, 3, 4), ((3,), (4,)), (4,)),
    "LSTMCell": Case(partial(nn.LSTMCell, 3, 4), ((3,), (4,), (4,)), (4,), hidden_of),
    "RNN": Case(
        lambda **options: nn.RNN(nn.LSTMCell(3, 4, **options), reverse=True),
        ((5, 3),),
        (5, 4),
        lambda layer, xs, key: layer(xs, length=4, key=key)[0],
    ),
    "ScanStack": Case(scan_stack, ((3,),), (3,)),
    "BatchNorm": Case(with_state(batch_norm), ((3, 4),), (3, 4), call_with_state, "batch"),
    "SpectralNorm": Case(with_state(spectral_norm), ((3,),), (4,), call_with_state),
    "WeightNorm": Case(lambda **options: nn.WeightNorm(nn.Linear(3, 4, **options)), ((3,),), (4,)),
}
