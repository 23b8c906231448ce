import re

import equinox
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eqxlike import nn


@given(st.floats(0, 0.99), st.integers(0, 100))
def test_same_key_drops_what_equinox_drops(p, seed):
    x = jr.normal(jr.key(1), (4, 5))
    ours, theirs = nn.Dropout(p), equinox.nn.Dropout(p)
    np.testing.assert_array_equal(ours(x, key=jr.key(seed)), theirs(x, key=jr.key(seed)))


def test_mean_is_kept(getkey):
    y = nn.Dropout(0.3)(jnp.ones(100_000), key=getkey())
    np.testing.assert_allclose(y.mean(), 1, atol=0.02)
    np.testing.assert_allclose((y == 0).mean(), 0.3, atol=0.02)


@pytest.mark.parametrize("inference", [True, False])
def test_flag_of_the_call_goes_before_that_of_the_layer(inference, getkey):
    x = jnp.ones(100)
    y = nn.Dropout(0.5, inference=not inference)(x, key=getkey(), inference=inference)
    assert bool((y == x).all()) == inference


@pytest.mark.parametrize("layer", [nn.Dropout(0.5, inference=True), nn.Dropout(0), nn.Dropout(0.0)])
def test_needs_no_key_where_nothing_is_dropped(layer):
    assert layer(jnp.ones(3)).tolist() == [1, 1, 1]


def test_missing_key_is_refused():
    with pytest.raises(RuntimeError, match="Dropout needs a key outside inference mode"):
        nn.Dropout(0.5)(jnp.ones(3))


def test_probability_one_gives_zeros_and_a_zero_gradient(getkey):
    gradient = jax.grad(lambda x: nn.Dropout(1.0)(x, key=getkey()).sum())(jnp.ones(3))
    assert gradient.tolist() == [0, 0, 0]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32, jnp.complex64])
@pytest.mark.parametrize("p", [0.5, jnp.array(0.5)])
def test_dtype_is_kept(dtype, p, getkey):
    assert nn.Dropout(p)(jnp.ones(3, dtype), key=getkey()).dtype == dtype


def test_array_probability_gets_no_gradient(getkey):
    key = getkey()
    gradient = jax.grad(lambda p: nn.Dropout(p)(jnp.ones(9), key=key).sum())(jnp.array(0.5))
    assert gradient == 0


@pytest.mark.parametrize("bad", [-0.1, 1.5, 2, float("nan"), np.float32(1.5), np.float64(-1)])
def test_wrong_probability_is_refused(bad):
    with pytest.raises(ValueError, match=rf"probability p in \[0, 1\], got {re.escape(repr(bad))}"):
        nn.Dropout(bad)


@pytest.mark.parametrize("bad", ["0.5", None, True, 0.5j, jnp.array(1), np.array(True), [0.5]])
def test_what_is_no_probability_is_refused_with_its_type(bad):
    with pytest.raises(TypeError, match=rf"a floating array; got .*of type {type(bad).__name__}"):
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
