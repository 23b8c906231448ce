"""The steps of finite differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxlike as eqx
from eqxlike import ad


def test_step_that_is_lost_is_an_error_that_names_the_array():
    tree = {"a": jnp.ones(2), "b": [jnp.array(1e6)]}
    with pytest.raises(
        ValueError, match=r"The array at args\[0\]\['b'\]\[0\] loses its step of 0.01"
    ):
        eqx.filter_grad(lambda t: t["a"].sum() * t["b"][0], mode=ad.FiniteDifference(step=0.01))(
            tree
        )


def test_step_that_is_lost_is_an_error_in_a_compiled_program():
    gradient = eqx.filter_jit(eqx.filter_grad(lambda x: x**2, mode=ad.FiniteDifference(step=1e-9)))
    with pytest.raises(eqx.EqxlikeRuntimeError, match=r"array 0 .* of shape \(\), loses its step"):
        gradient(jnp.array(1.0))
    assert abs(float(gradient(jnp.array(0.0)))) < 1e-6


def test_step_goes_with_the_size_of_a_number():
    with jax.enable_x64(True):
        x = jnp.array([1e-6, 1.0, 1e8])
        found = ad.jacobian(lambda x: x**2, ad.FiniteDifference())(x)
        np.testing.assert_allclose(jnp.diag(found), 2 * x, rtol=1e-4, atol=1e-8)


def test_step_goes_with_the_precision_of_the_value():
    with jax.enable_x64(True):
        single = lambda x: jnp.sum(jnp.sin(x.astype(jnp.float32)))
        found = eqx.filter_grad(single, mode=ad.FiniteDifference(4))(jnp.array([0.3, 1.0]))
        np.testing.assert_allclose(found, np.cos([0.3, 1.0]), atol=1e-3)


def test_order_4_is_more_accurate_than_order_2():
    with jax.enable_x64(True):
        x = jnp.array(0.3)
        modes = [ad.FiniteDifference(order, step=0.1) for order in (2, 4)]
        found = [eqx.filter_grad(jnp.sin, mode=mode)(x) for mode in modes]
    errors = [abs(float(each) - np.cos(0.3)) for each in found]
    assert errors[1] < errors[0] / 100
