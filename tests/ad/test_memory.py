"""The memory of each mode, as estimated by XLA."""

import jax
import jax.numpy as jnp
import numpy as np

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


def test_checkpointed_halves_the_memory_of_25_layers():
    weights, x = [np.full((4, 4), 0.25, "f")] * 25, np.ones((256, 4), "f")
    plain = temporary_bytes(eqx.filter_grad(deep), weights, x)
    checkpointed = temporary_bytes(eqx.filter_grad(deep, mode=ad.Checkpointed()), weights, x)
    assert checkpointed < plain / 2


def test_checkpointed_halves_the_memory_of_a_scan_of_a_prime_length():
    weights, x = np.full((67, 4, 4), 0.25, "f"), np.ones((256, 4), "f")
    plain = temporary_bytes(eqx.filter_grad(deep_scan), weights, x)
    checkpointed = temporary_bytes(eqx.filter_grad(deep_scan, mode=ad.Checkpointed()), weights, x)
    assert checkpointed < plain / 2


def test_memory_of_forward_mode_grows_with_its_chunk():
    weights, x = [np.full((8, 8), 0.125, "f")] * 4, np.ones((128, 8), "f")
    of_all = temporary_bytes(eqx.filter_grad(deep, mode=ad.Forward()), weights, x)
    of_8 = temporary_bytes(eqx.filter_grad(deep, mode=ad.Forward(chunk=8)), weights, x)
    assert of_8 < of_all / 10


def test_blocks_that_do_not_fit_are_made_smaller():
    weights, x = [np.full((8, 8), 0.125, "f")] * 4, np.ones((128, 8), "f")
    of_half, of_most = (
        temporary_bytes(eqx.filter_grad(deep, mode=ad.Forward(chunk=chunk)), weights, x)
        for chunk in (128, 255)  # of 256
    )
    assert of_most == of_half
