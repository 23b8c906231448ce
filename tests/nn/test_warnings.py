"""A warning shows the line in the user's code, whatever stands between that and the layer."""

import linecache
import warnings

import jax
import jax.numpy as jnp
import jax.random as jr
import pytest

import eqxlike as eqx
from eqxlike import nn


class Block(nn.StatefulLayer):
    norm: nn.BatchNorm

    def __init__(self, key=None):
        self.norm = nn.BatchNorm(3, "batch")  # Here.

    def __call__(self, x, state, *, key=None):
        return self.norm(x, state)


def subclass():
    class Mine(nn.BatchNorm):
        pass

    return Mine(3, "batch")  # Here.


DROPOUT = nn.Dropout(0.5)
X, KEYS = jnp.ones((2, 3)), jr.split(jr.key(0), 2)
ATTENTION = nn.MultiheadAttention(1, 3, dropout_p=0.5, key=jr.key(0))


class Called(eqx.Module):
    def __call__(self, x, *, key=None):
        return DROPOUT(x, deterministic=True)  # Here.


WARNERS = {
    "BatchNorm": lambda: nn.BatchNorm(3, "batch"),  # Here.
    "BatchNorm of a subclass": subclass,
    "BatchNorm in a block": Block,
    "BatchNorm in a stack": lambda: nn.ScanStack(Block, 2, key=jr.key(0)),
    "BatchNorm by make_with_state": lambda: nn.make_with_state(nn.BatchNorm)(3, "batch"),  # Here.
    "BatchNorm by filter_vmap": lambda: eqx.filter_vmap(
        lambda key: nn.BatchNorm(3, "batch", key=key)  # Here.
    )(KEYS),
    "BatchNorm by filter_jit": lambda: eqx.filter_jit(nn.BatchNorm)(3, "batch"),  # Here.
    "BatchNorm for its shape": lambda: eqx.filter_eval_shape(nn.BatchNorm, 3, "b"),  # Here.
    "LayerNorm": lambda: nn.LayerNorm(3, elementwise_affine=False),  # Here.
    "Dropout": lambda: nn.Dropout(0.5, deterministic=True),  # Here.
    "Dropout called": lambda: DROPOUT(X, deterministic=True),  # Here.
    "Dropout in a model": lambda: nn.Sequential([Called()])(X),
    "Dropout under vmap": lambda: jax.vmap(lambda x: DROPOUT(x, deterministic=True))(X),  # Here.
    "Dropout in attention": lambda: ATTENTION(X, X, X, deterministic=True),  # Here.
}


@pytest.mark.parametrize("name", WARNERS)
def test_warning_is_at_the_line_of_the_user(name):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        WARNERS[name]()
    assert caught
    for warning in caught:
        assert warning.filename == __file__
        assert linecache.getline(warning.filename, warning.lineno).rstrip().endswith("# Here.")
