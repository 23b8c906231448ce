"""What must be of no use to a compiled program."""

import jax
import jax.numpy as jnp
import pytest

import eqxlike
from eqxlike import internal
from tests.internal.beside_equinox_internal import both

X = jnp.array([1.0, 2.0])


@both
def test_a_program_that_does_not_use_it_runs(eqxi):
    assert jax.jit(lambda x: (eqxi.assert_dce(x, "used"), 2 * x)[1])(X).tolist() == [2, 4]


@both
def test_nothing_is_checked_outside_of_a_jit(eqxi):
    assert eqxi.assert_dce((X, "text"), "used")[1] == "text"


@both
def test_nothing_is_checked_if_that_is_off(eqxi):
    assert jax.jit(lambda x: eqxi.assert_dce(x, "used", on_error="off"))(X).tolist() == [1, 2]


def test_a_program_that_uses_it_fails():
    with pytest.raises(eqxlike.EqxlikeRuntimeError, match="x was used"):
        eqxlike.filter_jit(lambda x: internal.assert_dce(x, "x was used"))(X)


def test_a_gradient_that_does_not_use_it_runs():
    def function(x):
        unused, square = x**2, (x**2).sum()
        del unused
        return square + 0 * len(internal.assert_dce(x, "used"))

    assert jax.jit(jax.grad(function))(X).tolist() == [2, 4]
