"""Sizes may be integers of Python or NumPy, but not bools, floats or strings."""

import functools
import inspect
import itertools
import re

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqxlike as eqx
from eqxlike import nn
from eqxlike._partition import find_static_difference

CONV = dict.fromkeys(["padding", "dilation"], 1) | {"in_channels": 2, "out_channels": 4}
CONV |= {"kernel_size": 3, "stride": 2, "groups": 2}
POOL = {"kernel_size": 2, "stride": 1, "padding": 1}
MAX = {"init": -jnp.inf, "operation": jax.lax.max}
NORM = {"axis_name": "batch", "mode": "batch"}


def linear():
    return nn.Linear(3, 4, key=jr.key(1))


CELL = {"input_size": 3, "hidden_size": 4}
MLP = {"in_size": 3, "out_size": 4, "width_size": 5, "depth": 2}
LINEAR = {"in_features": 3, "out_features": 4}
CACHE = {"num_layers": 2, "length": 5, "num_heads": 2, "size": 3, "value_size": 4, "window": 2}
ATTENTION = {"num_heads": 2, "num_kv_heads": 1, "window": 3, "qk_size": 2, "vo_size": 3}
ATTENTION |= {"query_size": 4, "key_size": 6, "value_size": 5, "output_size": 3}


# Maps each layer with integer arguments to these integers and its other arguments.
SIZES = {
    "AdaptivePool": ({"target_shape": 3, "num_spatial_dims": 2}, {"operation": jnp.mean}),
    "BatchNorm": ({"input_size": 3}, NORM),
    "BayesianLinear": (LINEAR, {}),
    "BayesianMLP": (MLP, {}),
    "Conv": ({"num_spatial_dims": 2, **CONV}, {}),
    "ConvTranspose": ({"num_spatial_dims": 2, **CONV, "output_padding": 1}, {}),
    "Embedding": ({"num_embeddings": 5, "embedding_size": 3}, {}),
    "GRUCell": (CELL, {}),
    "GroupNorm": ({"groups": 2, "channels": 4}, {}),
    "GatedMLP": ({"in_size": 3, "hidden_size": 4, "out_size": 5}, {}),
    "KVCache": (CACHE, {}),
    "LSTMCell": (CELL, {}),
    "LayerNorm": ({"shape": (2, 3)}, {}),
    "Linear": (LINEAR, {}),
    "LoRALinear": ({"rank": 2}, {"linear": linear()}),
    "MLP": (MLP, {}),
    "MultiheadAttention": (ATTENTION, {}),
    "Pool": ({"num_spatial_dims": 2, **POOL}, MAX),
    "Sampler": ({"top_k": 3}, {}),
    "RMSNorm": ({"shape": 3}, {}),
    "RotaryPositionalEmbedding": ({"embedding_size": 4}, {}),
    "ScanStack": ({"depth": 3, "unroll": 2}, {"make_layer": lambda key: linear()}),
    "SpectralNorm": ({"num_power_iterations": 2}, {"layer": linear(), "weight_name": "weight"}),
    "WeightNorm": ({"axis": 1}, {"layer": linear()}),
}
for dims in (1, 2, 3):
    SIZES |= {
        f"Conv{dims}d": (CONV, {}),
        f"ConvTranspose{dims}d": ({**CONV, "output_padding": 1}, {}),
        f"AdaptiveAvgPool{dims}d": ({"target_shape": 3}, {}),
        f"AdaptiveMaxPool{dims}d": ({"target_shape": 3}, {}),
        f"AvgPool{dims}d": (POOL, {}),
        f"MaxPool{dims}d": (POOL, {}),
    }


def parameters(cls):
    return inspect.signature(cls.__init__).parameters


def build(name, sizes):
    cls = getattr(nn, name)
    options = {"key": jr.key(0)} if "key" in parameters(cls) else {}
    return nn.make_with_state(cls)(**sizes, **SIZES[name][1], **options)


# `nn.fuse` makes these layers. Their integers are indices of projections.
MADE_BY_FUSE = {nn.FusedAttention, nn.FusedLinear}


def test_table_has_every_layer_with_integer_arguments():
    modules = {cls for cls in vars(nn).values() if isinstance(cls, type(eqx.Module))}
    layers = modules - MADE_BY_FUSE
    takes_integers = {
        cls.__name__: {
            name
            for name, each in parameters(cls).items()
            if re.search(r"\bint\b", str(each.annotation))
            and not re.search("float|Callable", str(each.annotation))
        }
        for cls in layers
    }
    expected = {name: names for name, names in takes_integers.items() if names}
    assert {name: set(sizes) for name, (sizes, _) in SIZES.items()} == expected


def test_integers_of_numpy_make_the_same_layer():
    convert_to = (np.int64, np.uint8, functools.partial(np.array, dtype=int))
    for name, (sizes, _) in SIZES.items():
        layer = eqx.filter_eval_shape(lambda name=name, sizes=sizes: build(name, sizes))
        for convert in convert_to:
            converted = jax.tree.map(convert, sizes)
            same = eqx.filter_eval_shape(lambda name=name, sizes=converted: build(name, sizes))
            assert find_static_difference(layer, same) is None
            assert jax.tree.structure(layer) == jax.tree.structure(same)
            assert jax.tree.leaves(layer) == jax.tree.leaves(same)


def test_values_that_are_no_integers_are_refused_by_name():
    for name, (sizes, _) in SIZES.items():
        for size, value in itertools.product(sizes, [True, np.True_, 2.0, "2"]):
            shown = "each size of shape" if size == "shape" else size
            with pytest.raises(ValueError, match=rf"{shown} must be .*got {value!r}"):
                build(name, {**sizes, size: value})


def test_sizes_by_axis_may_be_an_array():
    sizes = {"kernel_size": np.array([3, 2]), "padding": np.array([[1, 0], [2, 1]])}
    layer = nn.Conv2d(1, 1, **sizes, key=jr.key(0))
    assert (layer.kernel_size, layer.padding) == ((3, 2), ((1, 0), (2, 1)))
    assert find_static_difference(layer.padding, ((1, 0), (2, 1))) is None


def test_static_numbers_of_numpy_make_the_same_layer():
    for make, number in (
        (lambda eps: nn.LayerNorm(3, eps), 0.5),
        (lambda eps: nn.GroupNorm(1, 3, eps), 0.5),
        (lambda eps: nn.BatchNorm(3, eps=eps, momentum=eps, **NORM), 0.5),
        (lambda theta: nn.RotaryPositionalEmbedding(4, theta), 100.0),
        (lambda alpha: nn.LoRALinear(linear(), 2, alpha=alpha, key=jr.key(0)), 2.0),
    ):
        layers = [nn.make_with_state(make)(each) for each in (number, np.float32(number))]
        assert find_static_difference(*layers) is None


def test_values_that_are_no_numbers_are_refused_by_name():
    for value in ("1e-5", True, jnp.array(0.1)):
        with pytest.raises(TypeError, match="eps must be a number, got"):
            nn.LayerNorm(3, eps=value)
        with pytest.raises(TypeError, match="momentum must be a number, got"):
            nn.BatchNorm(3, momentum=value, **NORM)


def test_layers_are_indexed_by_integers_of_numpy():
    layers = [nn.Lambda(jnp.sin), nn.Lambda(jnp.cos)]
    assert nn.Sequential(layers)[np.int64(1)] is layers[1]
    assert nn.ScanStack(lambda key: linear(), 2, key=jr.key(0))[np.int64(1)] == linear()
