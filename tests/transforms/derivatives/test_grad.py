"""Gradients, Jacobians and Hessians of trees. `test_wrapping` tests the wrappers themselves."""

from typing import Any

import equinox
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import eqxlike
from eqxlike import filter_grad, filter_hessian, filter_jacfwd, filter_jacrev, filter_value_and_grad

TWO, THREE = jnp.float32(2), jnp.float32(3)


class Polynomial(eqxlike.Module):
    coefficients: list
    activation: Any = jnp.tanh
    power: int = eqxlike.field(static=True, default=2)


# --- gradients ---


def test_gradient_is_the_tree_with_none_for_other_leaves_than_inexact_arrays():
    tree = {
        "arrays": [TWO, np.full((), 3, np.float32), np.float32(4)],
        "integers": (jnp.array(2), jnp.array(True), np.arange(2), jax.random.key(0)),
        "static": [2.0, 2, "text", None, len, True],
        "module": Polynomial([THREE, (), 1.5], power=4),
        "empty": {},
    }

    def sum_of_squares(tree):
        floats = [leaf for leaf in jtu.tree_leaves(tree) if eqxlike.is_inexact_array(leaf)]
        return sum((leaf * leaf for leaf in floats), start=jnp.float32(0))

    expected = {
        "arrays": [jnp.float32(4), jnp.float32(6), jnp.float32(8)],
        "integers": (None,) * 4,
        "static": [None] * 6,
        "module": Polynomial([jnp.float32(6), (), None], None, 4),
        "empty": {},
    }
    value, gradient = filter_value_and_grad(sum_of_squares)(tree)
    assert value == 4 + 9 + 16 + 9
    assert eqxlike.tree_equal(gradient, expected, typematch=True)
    assert eqxlike.tree_equal(filter_grad(sum_of_squares)(tree), expected, typematch=True)


def test_only_the_first_argument_is_differentiated_and_others_may_have_any_leaves():
    gradient = filter_grad(lambda x, y, function, *, z, name: function(x) * y * z * len(name))
    assert gradient(jnp.array(0.0), THREE, jnp.sin, z=TWO, name="abc") == 18
    without_arrays = filter_value_and_grad(lambda tree: 1.0)({"a": 1, "b": "c"})
    assert without_arrays == (1.0, {"a": None, "b": None})


# --- auxiliary output ---------------------------------------------------------------------------


def test_aux_comes_after_the_gradient_or_with_the_value():
    def loss(x):
        return x**2, (x, "aux")

    aux = (3.0, "aux")
    with jax.checking_leaks():
        assert filter_grad(loss, has_aux=True)(THREE) == (6.0, aux)
    assert filter_value_and_grad(loss, has_aux=True)(THREE) == ((9.0, aux), 6.0)
    # Decorators with arguments, and a list instead of a pair.
    assert filter_grad(has_aux=True)(loss)(THREE) == (6.0, aux)
    assert filter_value_and_grad(has_aux=True)(loss)(THREE) == ((9.0, aux), 6.0)
    assert filter_grad(lambda x: [*loss(x)], has_aux=True)(THREE) == (6.0, aux)


# --- jacobians ----------------------------------------------------------------------------------

FIRST = {"filter_jacfwd": filter_jacfwd, "filter_jacrev": filter_jacrev}
ALL = {**FIRST, "filter_hessian": filter_hessian}


def test_jacobians_agree_with_finite_differences():
    x, steps = np.array([0.5, -1.0, 2.0]), 1e-6 * np.eye(3)
    cube = lambda x: x * x * x[::-1]
    slopes = [(cube(x + step) - cube(x - step)) / 2e-6 for step in steps]
    for transform in FIRST.values():
        jacobian = eqxlike.filter_jit(transform(cube))(x.astype(np.float32))
        np.testing.assert_allclose(jacobian, np.transpose(slopes), rtol=1e-6, atol=1e-6)


def test_hessian_agrees_with_its_closed_form():
    hessian = filter_hessian(lambda x: x["a"] * x["a"] * x["b"])
    hessian = eqxlike.filter_jit(hessian)({"a": TWO, "b": THREE})
    assert hessian == {"a": {"a": 6.0, "b": 4.0}, "b": {"a": 4.0, "b": 0.0}}


def test_jacobian_is_the_first_argument_with_none_for_other_leaves_than_inexact_arrays():
    tree = [TWO, np.float32(3), jnp.int32(2), 2.5, "s", None, Polynomial([THREE], power=5)]
    for transform in FIRST.values():
        jacobian = transform(lambda tree, y, *, s: tree[0] * tree[1] * y)
        jacobian = eqxlike.filter_jit(jacobian)(tree, THREE, s="s")
        assert jacobian[:6] == [9.0, 6.0, None, None, None, None]
        assert eqxlike.tree_equal(jacobian[6], Polynomial([jnp.float32(0)], None, 5))


def test_jacobian_of_other_leaves_is_none_and_aux_may_have_any_leaves():
    def function(x):
        return (x**2, "s", None, jnp.sin, 2.5), ("s", x, {"n": jnp.int32(1)})

    for name, transform in ALL.items():
        derivative = {"filter_hessian": 2}.get(name, 4)
        jacobian = eqxlike.filter_jit(transform(lambda x: function(x)[0]))(TWO)
        assert jacobian == (derivative, None, None, None, 0)
        jacobian, aux = transform(function, True)(TWO)
        assert (jacobian[0], aux) == (derivative, ("s", 2.0, {"n": 1}))
        jacobian = transform(lambda tree: {"a": tree[0] * 2, "b": "s"})([2, 2.5])
        assert jacobian == {"a": [None, None], "b": None}
    for call in (
        lambda: equinox.filter_jacfwd(lambda x: function(x)[0])(TWO),
        lambda: equinox.filter_jacfwd(lambda x: (x, "s"), True)(TWO),
    ):
        with pytest.raises(TypeError, match="not a valid JAX type"):
            call()
