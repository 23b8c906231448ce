import equinox
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from eqxlike import filter_grad, nn


def shape(features):
    return () if features == "scalar" else (features,)


@pytest.mark.parametrize("in_features", ["scalar", 0, 1, 3])
@pytest.mark.parametrize("out_features", ["scalar", 0, 2])
@pytest.mark.parametrize("use_bias", [True, False])
def test_same_key_gives_equinox_weights_and_outputs(in_features, out_features, use_bias, getkey):
    key = getkey()
    ours = nn.Linear(in_features, out_features, use_bias, key=key)
    theirs = equinox.nn.Linear(in_features, out_features, use_bias, key=jr.clone(key))
    np.testing.assert_array_equal(ours.weight, theirs.weight)
    if use_bias:
        np.testing.assert_array_equal(ours.bias, theirs.bias)
    else:
        assert ours.bias is None
    x = jr.normal(getkey(), shape(in_features))
    np.testing.assert_array_equal(ours(x), theirs(x))
    assert ours(x).shape == shape(out_features)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32, jnp.complex64])
def test_dtype_is_that_of_equinox(dtype, getkey):
    key = getkey()
    ours = nn.Linear(3, 4, dtype=dtype, key=key)
    theirs = equinox.nn.Linear(3, 4, dtype=dtype, key=jr.clone(key))
    assert ours.weight.dtype == ours.bias.dtype == ours(jnp.ones(3, dtype)).dtype == dtype
    # Not to the last digit for a complex dtype: whether a product and a sum are rounded as one
    # hangs on how much XLA compiles together.
    np.testing.assert_allclose(ours.weight, theirs.weight, rtol=1e-6)
    np.testing.assert_allclose(ours.bias, theirs.bias, rtol=1e-6)


def test_default_dtype_is_float64_in_64_bit_mode(getkey):
    with jax.enable_x64(True):
        assert nn.Linear(2, 2, key=getkey()).weight.dtype == jnp.float64


def test_gradient_is_that_of_equinox(getkey):
    key, x = getkey(), jr.normal(getkey(), (3,))

    def loss(layer, x):
        return jnp.sum(jnp.sin(layer(x)))

    ours, theirs = nn.Linear(3, 4, key=key), equinox.nn.Linear(3, 4, key=jr.clone(key))
    our_gradient = filter_grad(loss)(ours, x)
    their_gradient = equinox.filter_grad(loss)(theirs, x)
    np.testing.assert_allclose(our_gradient.weight, their_gradient.weight, rtol=1e-6)
    np.testing.assert_allclose(our_gradient.bias, their_gradient.bias, rtol=1e-6)
    our_gradient, their_gradient = (
        jax.grad(lambda x: loss(ours, x))(x),
        jax.grad(lambda x: loss(theirs, x))(x),
    )
    np.testing.assert_allclose(our_gradient, their_gradient, rtol=1e-6)


@pytest.mark.parametrize(
    ("in_features", "x_shape", "expected", "hint"),
    [
        (3, (4,), "(3,)", False),
        (3, (), "(3,)", False),
        (3, (5, 3), "(3,)", True),
        ("scalar", (1,), "()", True),
    ],
)
def test_wrong_shape_says_expected_and_got(in_features, x_shape, expected, hint, getkey):
    layer = nn.Linear(in_features, 2, key=getkey())
    with pytest.raises(ValueError, match="Linear expected x of shape") as info:
        layer(jnp.ones(x_shape))
    assert f"shape {expected}, got shape {x_shape}." in str(info.value)
    assert ("jax.vmap" in str(info.value)) == hint


@pytest.mark.parametrize("bad", [-1, 2.0, True, "vector"])
def test_wrong_size_is_refused_by_name(bad, getkey):
    with pytest.raises(ValueError, match=f"out_features must be .* got {bad!r}"):
        nn.Linear(2, bad, key=getkey())


def test_integer_dtype_is_refused(getkey):
    with pytest.raises(TypeError, match="floating or complex dtype, got int32"):
        nn.Linear(2, 2, dtype=jnp.int32, key=getkey())


def test_identity_takes_anything_and_returns_its_input(getkey):
    x = object()
    assert nn.Identity(3, use_bias=False)(x, key=getkey()) is x
