"""A small model, its data and its training step."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eqxlike import nn, train
from tests.nn.arrays import filled

BATCH = np.ones((4, 2), np.float32)


def mean_square(model: Any, x: Any, key: Any) -> Any:
    return jnp.mean(jax.vmap(model)(x) ** 2)


def squared_error(model: Any, batch: Any, key: Any) -> Any:
    x, y = batch
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def make_step(optimiser: Any, **options: Any) -> Any:
    return train.make_step(mean_square, optimiser, **options)


def make_state(optimiser: Any, **options: Any) -> Any:
    model = filled(nn.Linear, 2, 1, key=jax.random.key(0))
    return train.TrainState.create(model, optimiser, key=jax.random.key(1), **options)
