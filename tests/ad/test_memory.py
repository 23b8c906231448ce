"""How much memory a mode needs, by XLA's analysis."""

import jax
import jax.numpy as jnp
import pytest

import eqxlike as eqx
from eqxlike import ad


def temporary_bytes(function, *args):
    memory = jax.jit(function).lower(*args).compile().memory_analysis()
    return memory.temp_size_in_bytes


def deep(weights, x):
    for weight in weights:
        x = jnp.tanh(x @ weight)
    return jnp.sum(x**2)


def deep_scan(weights, x):
    layer = lambda x, weight: (jnp.tanh(x @ weight), None)
    return jnp.sum(jax.lax.scan(layer, x, weights)[0] ** 2)


def test_checkpointed_halves_the_memory_of_64_layers():
    weights = [jnp.ones((4, 4)) / 4] * 64
    x = jnp.ones((256, 4))
    plain = temporary_bytes(eqx.filter_grad(deep), weights, x)
    checkpointed = temporary_bytes(eqx.filter_grad(deep, mode=ad.Checkpointed()), weights, x)
    assert checkpointed < plain / 2


@pytest.mark.parametrize("length", [64, 67])
def test_checkpointed_halves_the_memory_of_a_scan(length):
    weights, x = jnp.ones((length, 4, 4)) / 4, jnp.ones((256, 4))
    plain = temporary_bytes(eqx.filter_grad(deep_scan), weights, x)
    checkpointed = temporary_bytes(eqx.filter_grad(deep_scan, mode=ad.Checkpointed()), weights, x)
    assert checkpointed < plain / 2


def test_forward_in_chunks_holds_so_many_directions():
    weights, x = [jnp.ones((8, 8)) / 8] * 4, jnp.ones((128, 8))
    of_all = temporary_bytes(eqx.filter_grad(deep, mode=ad.Forward()), weights, x)
    of_8 = temporary_bytes(eqx.filter_grad(deep, mode=ad.Forward(chunk=8)), weights, x)
    assert of_8 < of_all / 10


def test_blocks_that_do_not_fit_are_made_smaller():
    weights, x = [jnp.ones((8, 8)) / 8] * 4, jnp.ones((128, 8))
    of_half, of_most = (
        temporary_bytes(eqx.filter_grad(deep, mode=ad.Forward(chunk=chunk)), weights, x)
        for chunk in (128, 255)  # of 256
    )
    assert of_most == of_half
