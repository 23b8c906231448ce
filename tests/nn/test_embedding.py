import equinox
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from eqxlike import nn
from tests.nn.arrays import normal


def test_same_key_gives_equinox_table(getkey):
    key = getkey()
    ours, theirs = nn.Embedding(5, 3, key=key), equinox.nn.Embedding(5, 3, key=jr.clone(key))
    np.testing.assert_array_equal(ours.weight, theirs.weight)
    for index in (0, 4, -1, 7, np.int32(2), jnp.array(3)):
        np.testing.assert_array_equal(ours(index), theirs(index))


def test_table_that_is_given_tells_the_sizes():
    layer = nn.Embedding(weight=jnp.ones((2, 3)))
    assert (layer.num_embeddings, layer.embedding_size) == (2, 3)


def test_initializer_draws_the_table(getkey):
    layer = nn.Embedding(4, 4, weight_init=jax.nn.initializers.orthogonal(), key=getkey())
    np.testing.assert_allclose(layer.weight @ layer.weight.T, jnp.eye(4), atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "needs either `weight`, or"),
        ({"num_embeddings": 2, "embedding_size": 3}, "and `key` to draw one"),
        ({"weight": jnp.ones(3)}, r"got shape \(3,\)"),
        ({"weight": jnp.ones((2, 3)), "num_embeddings": 3}, r"shape \(3, None\), as the sizes say"),
        ({"num_embeddings": 2, "embedding_size": -1, "key": jr.key(0)}, "embedding_size must be"),
    ],
)
def test_unfit_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        nn.Embedding(**arguments)


def test_rotation_is_that_of_equinox(getkey):
    x = normal(getkey(), (7, 6))
    ours = jax.jit(nn.RotaryPositionalEmbedding(6))(x)
    theirs = jax.jit(equinox.nn.RotaryPositionalEmbedding(6))(x)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("theta", [100.0])
def test_rotation_is_a_product_of_complex_numbers(theta, getkey):
    x = np.asarray(normal(getkey(), (7, 6)), np.float64)
    turns = np.outer(np.arange(7), theta ** (-np.arange(3) / 3))
    turned = (x[:, :3] + 1j * x[:, 3:]) * np.exp(1j * turns)
    with jax.enable_x64(True):
        ours = jax.jit(nn.RotaryPositionalEmbedding(6, theta))(jnp.asarray(x))
    np.testing.assert_allclose(ours, np.concatenate([turned.real, turned.imag], 1), rtol=1e-10)


def test_rotation_of_low_precision_computes_its_angles_in_float32(getkey):
    x = normal(getkey(), (400, 6), jnp.bfloat16)
    rope = jax.jit(nn.RotaryPositionalEmbedding(6))
    exact = np.asarray(rope(x.astype(jnp.float32)))
    assert rope(x).dtype == jnp.bfloat16
    np.testing.assert_array_equal(rope(x), exact.astype(jnp.bfloat16))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.RotaryPositionalEmbedding(3), "must be even"),
        (lambda: nn.RotaryPositionalEmbedding(-2), "integer of at least 0"),
        (
            lambda: nn.RotaryPositionalEmbedding(4)(jnp.ones((3, 5))),
            r"shape \(seq_length, 4\), got shape \(3, 5\)",
        ),
        (
            lambda: nn.Embedding(5, 3, key=jr.key(0))(jnp.array([1, 2])),
            r"Embedding expected x of shape \(\).*jax.vmap",
        ),
    ],
)
def test_unfit_size_or_input_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
