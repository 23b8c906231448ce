import re

import equinox
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from eqxlike import nn
from tests.nn.arrays import normal


@pytest.mark.parametrize("p", [0.3, 0.99])
def test_same_key_drops_what_equinox_drops(p, getkey):
    x, key = normal(getkey(), (4, 5)), getkey()
    ours, theirs = nn.Dropout(p), equinox.nn.Dropout(p)
    np.testing.assert_array_equal(ours(x, key=key), theirs(x, key=jr.clone(key)))


def test_mean_is_kept(getkey):
    y = nn.Dropout(0.3)(jnp.ones(100_000), key=getkey())
    np.testing.assert_allclose(y.mean(), 1, atol=0.02)
    np.testing.assert_allclose((y == 0).mean(), 0.3, atol=0.02)


@pytest.mark.parametrize("inference", [True, False])
def test_flag_of_the_call_goes_before_that_of_the_layer(inference, getkey):
    x = jnp.ones(100)
    y = nn.Dropout(0.5, inference=not inference)(x, key=getkey(), inference=inference)
    assert bool((y == x).all()) == inference


def test_needs_no_key_where_nothing_is_dropped():
    for layer in (nn.Dropout(0.5, inference=True), nn.Dropout(0), nn.Dropout(0.0)):
        assert layer(jnp.ones(3)).tolist() == [1, 1, 1]


def test_probability_one_gives_zeros_and_a_zero_gradient(getkey):
    gradient = jax.grad(lambda x: nn.Dropout(1.0)(x, key=getkey()).sum())(jnp.ones(3))
    assert gradient.tolist() == [0, 0, 0]


def test_dtype_is_kept(getkey):
    half = jnp.array(0.5)
    for dtype, p in ((jnp.bfloat16, 0.5), (jnp.float16, half), (jnp.complex64, 0.5)):
        assert nn.Dropout(p)(jnp.ones(3, dtype), key=getkey()).dtype == dtype


def test_array_probability_gets_no_gradient(getkey):
    key = getkey()
    gradient = jax.grad(lambda p: nn.Dropout(p)(jnp.ones(9), key=key).sum())(jnp.array(0.5))
    assert gradient == 0


def test_wrong_probability_is_refused():
    for bad in (-0.1, 2, float("nan"), np.float32(1.5)):
        message = rf"probability p in \[0, 1\], got {re.escape(repr(bad))}"
        with pytest.raises(ValueError, match=message):
            nn.Dropout(bad)


def test_what_is_no_probability_is_refused_with_its_type():
    for bad in ("0.5", None, True, 0.5j, jnp.array(1), np.array(True), [0.5]):
        message = f"a floating array; got .*of type {type(bad).__name__}"
        with pytest.raises(TypeError, match=message):
            nn.Dropout(bad)


def test_old_name_of_inference_warns_and_works():
    with pytest.warns(DeprecationWarning, match="write `inference=`"):
        layer = nn.Dropout(0.5, deterministic=True)
    assert layer.inference
    with pytest.warns(DeprecationWarning, match="write `inference=`"):
        assert nn.Dropout(0.5)(jnp.ones(1), deterministic=True).tolist() == [1]


def test_missing_key_is_an_error_that_names_the_layer_in_its_model():
    model = nn.Sequential([nn.Identity(), nn.Sequential([nn.Dropout(0.5)])])
    with pytest.raises(RuntimeError, match=r"^Dropout at Sequential.layers\[1\].layers\[0\] needs"):
        model(jnp.ones(3))
