"""Branches for tests of `nn.Parallel`, and what they compute without it."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

import eqxlike as eqx
from eqxlike import nn

X = jnp.array([0.5, -1.0, 2.0])


def linear(key, out_features=4):
    return nn.Linear(3, out_features, key=key)


def linears(key, number=3):
    return [*map(linear, jr.split(key, number))]


# In one program, where every operation has one of its own without `jit`.
call = eqx.filter_jit(lambda model, *args, **kwargs: model(*args, **kwargs))


@eqx.filter_jit
def one_by_one(branches, x, *args, key=None):
    """The outputs of the branches, each called by itself."""
    keys = [None] * len(branches) if key is None else jr.split(key, len(branches))
    return [branch(x, *args, key=each) for branch, each in zip(branches, keys, strict=True)]


def assert_close(one, other):
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


class Scale(eqx.Module):
    """Multiplies by a leaf of any kind."""

    factor: object

    def __call__(self, x, *, key=None):
        return self.factor * x


class Noise(eqx.Module):
    scale: jax.Array

    def __call__(self, x, *, key=None):
        return x if key is None else x + self.scale * jr.normal(key, x.shape)


class Counter(nn.StatefulLayer):
    """Adds `start` and how often it was called."""

    start: jax.Array
    index: nn.StateIndex

    def __init__(self, start, init=0):
        self.start = jnp.array(start)
        self.index = nn.StateIndex(init)

    def __call__(self, x, state, *, key=None):
        count = state.get(self.index) + 1
        return x + self.start + count, state.set(self.index, count)
