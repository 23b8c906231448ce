"""The floating-point numbers beside one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eqxlike import internal
from tests.internal.beside_equinox_internal import both

# Neither zero and what XLA takes for zero, nor infinity and what is beside it.
NORMAL = st.floats(2.0**-125, 2.0**127, width=32).flatmap(lambda x: st.sampled_from((x, -x)))


@given(NORMAL)
def test_they_are_those_of_numpy(x):
    x = np.float32(x)
    assert internal.nextafter(jnp.array(x)) == np.nextafter(x, np.float32(np.inf))
    assert internal.prevbefore(jnp.array(x)) == np.nextafter(x, np.float32(-np.inf))


@both
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_beside_zero_is_the_smallest_normal_number(eqxi, dtype):
    tiny, zero = jnp.finfo(dtype).tiny, jnp.zeros((), dtype)
    assert (eqxi.nextafter(zero), eqxi.prevbefore(zero)) == (tiny, -tiny)
    assert eqxi.nextafter(zero).dtype == eqxi.prevbefore(zero).dtype == dtype


@both
@pytest.mark.parametrize("name", ["nextafter", "prevbefore"])
def test_derivative_is_that_of_the_identity(eqxi, name):
    def function(x):
        return getattr(eqxi, name)(x) ** 2

    value, slope, bend = (f(1.0) for f in (function, jax.grad(function), jax.hessian(function)))
    assert jnp.allclose(jnp.stack([value, slope, bend]), jnp.array([1.0, 2.0, 2.0]))


@both
@pytest.mark.parametrize("name", ["nextafter", "prevbefore"])
def test_batches_are_their_members(eqxi, name):
    x, function = jnp.array([0.0, 1.0, -2.0]), getattr(eqxi, name)
    assert jnp.array_equal(jax.jit(jax.vmap(function))(x), jnp.stack([function(y) for y in x]))
