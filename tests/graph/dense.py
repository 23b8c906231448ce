"""A small network and its loss, for tests of reports."""

import jax
import jax.numpy as jnp

from eqxlike import nn

X = jnp.ones((5, 3))


def mlp():
    return nn.MLP(3, 2, 4, 1, key=jax.random.key(0))


def loss(model, x):
    return jnp.mean(jax.vmap(model)(x) ** 2)
