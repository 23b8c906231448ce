"""Where a test takes `eqx`, the same program holds on Equinox, whose behaviour is the measure."""

from typing import Any

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxlike
from tests.beside_equinox import both

first = pytest.mark.parametrize("name", ["filter_jacfwd", "filter_jacrev"])
each = pytest.mark.parametrize("name", ["filter_jacfwd", "filter_jacrev", "filter_hessian"])
TWO, THREE = jnp.float32(2), jnp.float32(3)


def model_of(eqx):
    class Model(eqx.Module):
        weight: Any
        activation: Any
        power: int = eqx.field(static=True, default=2)

        def __call__(self, x):
            return self.activation(self.weight) ** self.power * x

    return Model(TWO, lambda x: x)


# --- output ------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize(
    ("name", "of_jax"),
    [
        ("filter_jacfwd", jax.jacfwd),
        ("filter_jacrev", jax.jacrev),
        ("filter_hessian", jax.hessian),
    ],
)
def test_agrees_with_jax_on_trees_of_arrays(eqx, name, of_jax):
    def function(tree):
        return {"product": tree["a"] * tree["b"][0], "square": [tree["a"] * tree["a"]]}

    tree = {"a": jnp.arange(3.0), "b": (jnp.ones(3),)}
    assert eqxlike.tree_equal(getattr(eqx, name)(function)(tree), of_jax(function)(tree))


@first
def test_agrees_with_finite_differences(name):
    def function(x):
        return x * x * x[::-1]

    x, steps = np.array([0.5, -1.0, 2.0]), 1e-6 * np.eye(3)
    slopes = [(function(x + step) - function(x - step)) / 2e-6 for step in steps]
    jacobian = getattr(eqxlike, name)(function)(jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(jacobian, np.transpose(slopes), rtol=1e-6, atol=1e-6)


def test_in_double_precision():
    with jax.enable_x64(True):
        jacobian = eqxlike.filter_jacfwd(jnp.sin)(np.float64(0.5))
        assert jacobian.dtype == jnp.float64
        np.testing.assert_allclose(jacobian, np.cos(0.5), rtol=1e-12)


def test_hessian_agrees_with_its_closed_form():
    hessian = eqxlike.filter_hessian(lambda x: x["a"] * x["a"] * x["b"])({"a": TWO, "b": THREE})
    assert hessian == {"a": {"a": 6.0, "b": 4.0}, "b": {"a": 4.0, "b": 0.0}}


@both
@first
def test_jacobian_in_a_module_is_a_module(eqx, name):
    jacobian = getattr(eqx, name)(lambda model, x: model(x))(model_of(eqx), THREE)
    assert (jacobian.weight, jacobian.activation, jacobian.power) == (12.0, None, 2)


@both
def test_hessian_in_a_module_is_a_module_of_modules(eqx):
    hessian = eqx.filter_hessian(lambda model, x: model(x))(model_of(eqx), THREE)
    assert (hessian.weight.weight, hessian.weight.activation, hessian.activation) == (6, None, None)


@both
@first
def test_only_inexact_arrays_of_the_first_argument_are_differentiated(eqx, name):
    tree = [TWO, np.float32(3), jnp.int32(2), 2.5, "s", None]
    jacobian = getattr(eqx, name)(lambda tree, y: tree[0] * tree[1] * y)(tree, THREE)
    assert jacobian == [9.0, 6.0, None, None, None, None]


@both
@each
def test_keyword_arguments_are_passed_on(eqx, name):
    function = getattr(eqx, name)(lambda x, *, y, s: x**2 * y)
    assert function(TWO, y=THREE, s="s") == {"filter_hessian": 6}.get(name, 12)


@both
@each
def test_python_number_in_the_value_has_a_jacobian_of_zeros(eqx, name):
    assert getattr(eqx, name)(lambda x: (x**2, 2.5))(TWO)[1] == 0


@each
def test_other_things_in_the_value_have_none(name):
    jacobian = getattr(eqxlike, name)(lambda x: (x**2, "s", None, jnp.sin))(TWO)
    assert jacobian[1:] == (None, None, None)
    with pytest.raises(TypeError, match="not a valid JAX type"):
        getattr(equinox, name)(lambda x: (x**2, "s"))(TWO)


@each
def test_without_inexact_arrays_all_is_none(name):
    jacobian = getattr(eqxlike, name)(lambda tree: {"a": tree[0] * 2, "b": "s"})([2, 2.5])
    assert jacobian == {"a": [None, None], "b": None}
    with pytest.raises((TypeError, ValueError)):
        getattr(equinox, name)(lambda tree: {"a": tree[0] * 2})([2, 2.5])


# --- auxiliary output ---------------------------------------------------------------------------


@both
@each
def test_aux_may_hold_arrays(eqx, name):
    function = getattr(eqx, name)(lambda x: (x**2, {"x": x, "n": jnp.int32(1)}), has_aux=True)
    assert function(TWO) == ({"filter_hessian": 2}.get(name, 4), {"x": 2.0, "n": 1})


@pytest.mark.parametrize(
    ("name", "of_equinox_fails"),
    [("filter_jacfwd", True), ("filter_jacrev", False), ("filter_hessian", True)],
)
def test_aux_may_hold_anything(name, of_equinox_fails):
    def function(x):
        return x**2, ("s", x)

    assert getattr(eqxlike, name)(function, True)(TWO)[1] == ("s", 2.0)
    if of_equinox_fails:
        with pytest.raises(TypeError, match="not a valid JAX type"):
            getattr(equinox, name)(function, True)(TWO)


@each
def test_aux_needs_a_pair(name):
    def loss(x):
        return x

    with pytest.raises(TypeError, match=r"loss must return a pair \(value, aux\)"):
        getattr(eqxlike, name)(loss, has_aux=True)(TWO)


# --- composition --------------------------------------------------------------------------------


@each
def test_under_filter_jit(name):
    function = getattr(eqxlike, name)(lambda model, x: model(x))
    jitted = eqxlike.filter_jit(function)(model_of(eqxlike), THREE)
    leaf = jitted.weight.weight if name == "filter_hessian" else jitted.weight
    assert leaf == {"filter_hessian": 6}.get(name, 12)


@each
def test_under_filter_vmap(name):
    function = eqxlike.filter_vmap(getattr(eqxlike, name)(lambda x: x * x))
    assert function(jnp.arange(3.0)).tolist() == (
        [2] * 3 if name == "filter_hessian" else [0, 2, 4]
    )


@both
@first
def test_of_itself(eqx, name):
    transform = getattr(eqx, name)
    assert transform(transform(lambda x: x**3))(TWO) == 12


@first
def test_leaks_no_tracers(name):
    with jax.checking_leaks():
        _, aux = getattr(eqxlike, name)(lambda x: (x[0] * 2, (x, "s")), has_aux=True)([TWO, "t"])
    assert aux == ([2.0, "t"], "s")


# --- errors -------------------------------------------------------------------------------------


@both
@each
def test_the_first_argument_by_keyword_is_an_error(eqx, name):
    with pytest.raises(TypeError):
        getattr(eqx, name)(lambda x: x)(x=TWO)


@each
def test_the_error_names_the_transformation(name):
    with pytest.raises(TypeError, match=f"`eqxlike.{name}` must have their first argument passed"):
        getattr(eqxlike, name)(lambda x: x)(x=TWO)


@both
@first
def test_complex_arrays_are_refused_as_by_jax(eqx, name):
    with pytest.raises(TypeError, match="requires real-valued"):
        getattr(eqx, name)(lambda z: z**2)(jnp.complex64(1j))


@both
def test_integers_in_the_value_are_refused_by_reverse_mode(eqx):
    with pytest.raises(TypeError, match="requires real-valued outputs"):
        eqx.filter_jacrev(lambda x: (x, jnp.int32(1)))(TWO)


@each
def test_what_is_no_function_is_an_error(name):
    with pytest.raises(TypeError, match=f"3 is not a callable object: `{name}` expects"):
        getattr(eqxlike, name)(3)
