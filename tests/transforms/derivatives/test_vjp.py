"""Where a test takes `eqx`, the same program holds on Equinox, whose behaviour is the measure."""

import copy
from typing import Any

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxlike
from eqxlike import filter_vjp
from tests.beside_equinox import both

TWO, THREE, ONE = jnp.float32(2), jnp.float32(3), jnp.float32(1)


def model_of(eqx):
    class Model(eqx.Module):
        weight: Any
        activation: Any
        name: str = eqx.field(static=True, default="n")

        def __call__(self, x):
            return self.activation(self.weight * x), "s"

    return Model(TWO, jnp.tanh)


# --- output ------------------------------------------------------------------------------------


@both
def test_returns_the_value_and_a_function_from_cotangent_to_gradients(eqx):
    value, pullback = eqx.filter_vjp(lambda x, y, s: (x * y, s, 3, 2.5), TWO, THREE, "s")
    assert value == (6.0, "s", 3, 2.5)
    assert pullback((ONE, None, None, None)) == (3.0, 2.0, None)


@both
def test_agrees_with_jax(eqx):
    def function(x):
        return {"a": x["a"] * x["b"], "c": x["b"] ** 2}

    primal = {"a": jnp.arange(3.0), "b": jnp.ones(3)}
    cotangent = {"a": jnp.arange(3.0), "c": jnp.full(3, 2.0)}
    ours, theirs = (vjp(function, primal) for vjp in (eqx.filter_vjp, jax.vjp))
    assert eqxlike.tree_equal(ours[0], theirs[0])
    assert eqxlike.tree_equal(ours[1](cotangent), theirs[1](cotangent))


def test_agrees_with_forward_mode():
    def function(x, y):
        return jnp.sin(x * y), x / y

    tangents, cotangents = (ONE, TWO), (THREE, jnp.float32(-1))
    _, forward = eqxlike.filter_jvp(function, (TWO, THREE), tangents)
    backward = filter_vjp(function, TWO, THREE)[1](cotangents)
    inner = [
        sum(a * b for a, b in zip(*each, strict=True))
        for each in ((forward, cotangents), (tangents, backward))
    ]
    np.testing.assert_allclose(*inner, rtol=1e-6)


@both
def test_the_gradient_of_a_module_is_a_module_with_none_for_what_is_no_inexact_array(eqx):
    model = model_of(eqx)
    _, pullback = eqx.filter_vjp(lambda model, x: model(x), model, jnp.float32(0))
    gradient, of_x = pullback((ONE, None))
    assert (type(gradient), gradient.weight, gradient.activation, of_x) == (
        type(model),
        0.0,
        None,
        2.0,
    )


@both
@pytest.mark.parametrize(
    ("leaf", "is_differentiated"),
    [
        (TWO, True),
        (np.float32(2), True),
        (jnp.complex64(2), True),
        (jnp.int32(2), False),
        (jax.random.key(0), False),
        (2.0, False),
        ("s", False),
        (None, False),
    ],
    ids=repr,
)
def test_only_inexact_arrays_are_differentiated(eqx, leaf, is_differentiated):
    _, pullback = eqx.filter_vjp(lambda x, y: y, [leaf], TWO)
    (gradient,), _ = pullback(ONE)
    assert (gradient is not None) is is_differentiated


@both
def test_without_arguments(eqx):
    value, pullback = eqx.filter_vjp(lambda: TWO)
    assert (value, pullback(ONE)) == (2.0, ())


# --- auxiliary output ---------------------------------------------------------------------------


@both
def test_aux_may_be_any_tree(eqx):
    def function(x, y):
        return x * y, {"y": y, "n": jnp.int32(1), "s": "s", "f": 2.5}

    value, pullback, aux = eqx.filter_vjp(function, TWO, THREE, has_aux=True)
    assert (value, pullback(ONE)) == (6.0, (3.0, 2.0))
    assert aux == {"y": 3.0, "n": 1, "s": "s", "f": 2.5}


@both
@pytest.mark.parametrize("output", [lambda x: x, lambda x: (x, 1, 2)], ids=["one", "three"])
def test_aux_needs_a_pair(eqx, output):
    with pytest.raises((TypeError, ValueError)):
        eqx.filter_vjp(output, TWO, has_aux=True)


def test_the_error_without_a_pair_names_the_function_and_what_came():
    def loss(x):
        return {"loss": x}

    with pytest.raises(TypeError, match=r"loss must return a pair \(value, aux\); .* type dict"):
        filter_vjp(loss, TWO, has_aux=True)


# --- the cotangent ------------------------------------------------------------------------------


@both
def test_cotangent_of_integers_is_none(eqx):
    value, pullback = eqx.filter_vjp(lambda n, x: (n, x > 0, x), jnp.int32(2), THREE)
    assert (value, pullback((None, None, ONE))) == ((2, True, 3.0), (None, 1.0))


@both
def test_cotangent_may_be_a_python_number(eqx):
    assert eqx.filter_vjp(lambda x: x**2, TWO)[1](1.0) == (4.0,)


def test_cotangent_none_stands_for_zero():
    def function(x, y):
        return {"product": x * y, "y": [y, y]}

    _, pullback = filter_vjp(function, TWO, THREE)
    assert pullback({"product": ONE, "y": None}) == (3.0, 2.0)
    assert pullback(None) == (0.0, 0.0)
    with pytest.raises(ValueError, match="unexpected tree structure"):
        equinox.filter_vjp(function, TWO, THREE)[1]({"product": ONE, "y": None})


def test_zero_of_jax_is_accepted_beside_integers():
    _, pullback = filter_vjp(lambda n, x: (n, x), jnp.int32(2), THREE)
    assert pullback((np.zeros((), jax.dtypes.float0), ONE)) == (None, 1.0)


@both
@pytest.mark.parametrize(
    ("cotangent", "error"),
    [
        ((ONE,), ValueError),
        ((jnp.ones(2), "s"), (ValueError, TypeError)),
        ((jnp.ones(2), None), ValueError),
        ((jnp.int32(1), None), (ValueError, TypeError)),
    ],
    ids=["length", "of str", "shape", "dtype"],
)
def test_cotangent_unlike_the_value_is_an_error(eqx, cotangent, error):
    _, pullback = eqx.filter_vjp(lambda x: (x, "s"), TWO)
    with pytest.raises(error):
        pullback(cotangent)


@pytest.mark.parametrize(
    ("cotangent", "message"),
    [
        ({"a": ONE}, r"output is a tuple of length 2, and cotangent is a dict"),
        ((jnp.ones(2), None), r"cotangent\[0\] must have the shape of output\[0\], which is \(\)"),
        ((ONE, 1.0), r"cotangent\[1\] must be None, since output\[1\] is not differentiable"),
    ],
    ids=["structure", "shape", "of str"],
)
def test_the_error_names_the_path(cotangent, message):
    _, pullback = filter_vjp(lambda x: (x, "s"), TWO)
    with pytest.raises((TypeError, ValueError), match=message):
        pullback(cotangent)


def test_cotangent_of_a_numpy_array_of_a_dtype_that_jax_lacks():
    _, pullback = filter_vjp(lambda x: (np.ones(2), x), TWO)
    assert pullback((None, ONE)) == pullback((jnp.ones(2), ONE)) == (1.0,)


# --- the function from cotangent to gradients ---------------------------------------------------


@both
def test_pullback_may_be_passed_into_and_out_of_filter_jit(eqx):
    model = model_of(eqx)
    made = eqx.filter_jit(lambda model, x: eqx.filter_vjp(lambda m: m(x), model)[1])(model, ONE)
    (gradient,) = eqx.filter_jit(lambda pullback, ct: pullback(ct))(made, (ONE, None))
    np.testing.assert_allclose(gradient.weight, 1 - np.tanh(2.0) ** 2, rtol=1e-5)


@both
def test_pullback_is_a_pytree_of_arrays(eqx):
    _, pullback = eqx.filter_vjp(lambda x, y: jnp.sin(x) * y, TWO, THREE)
    leaves, treedef = jax.tree_util.tree_flatten(pullback)
    assert {eqx.is_array(leaf) for leaf in leaves} == {True}
    assert treedef.unflatten(leaves)(ONE) == pullback(ONE)


@both
def test_pullback_may_be_copied_and_called_again(eqx):
    _, pullback = eqx.filter_vjp(lambda x: x**2, TWO)
    assert copy.copy(pullback)(ONE) == pullback(ONE) == (4.0,)


@both
def test_pullback_may_be_vmapped(eqx):
    _, pullback = eqx.filter_vjp(lambda x: x**2, TWO)
    assert jax.vmap(lambda ct: pullback(ct)[0])(jnp.arange(3.0)).tolist() == [0, 4, 8]


@both
def test_under_vmap(eqx):
    def derivative(x):
        return eqx.filter_vjp(lambda x: (x**2, "s"), x)[1]((ONE, None))[0]

    assert eqx.filter_vmap(derivative)(jnp.arange(3.0)).tolist() == [0, 2, 4]


@both
def test_gradient_of_a_gradient(eqx):
    def derivative(x):
        return eqx.filter_vjp(lambda x: x**3, x)[1](ONE)[0]

    assert eqx.filter_grad(derivative)(TWO) == 12


@both
def test_gradient_reaches_a_closed_over_array(eqx):
    assert jax.grad(lambda w: eqx.filter_vjp(lambda x: w * x * x, TWO)[1](ONE)[0])(THREE) == 4


def test_leaks_no_tracers():
    with jax.checking_leaks():
        value, pullback = filter_vjp(lambda x: (x, x > 0, "s"), TWO)
        assert (value, pullback((ONE, None, None))) == ((2.0, True, "s"), (1.0,))


def test_in_double_precision():
    with jax.enable_x64(True):
        _, pullback = filter_vjp(jnp.sin, np.float64(0.5))
        np.testing.assert_allclose(pullback(1.0)[0], np.cos(0.5), rtol=1e-12)


# --- errors -------------------------------------------------------------------------------------


@both
def test_keyword_arguments_are_refused(eqx):
    with pytest.raises(TypeError, match="unexpected keyword argument 'y'"):
        eqx.filter_vjp(lambda x, y: x * y, TWO, y=THREE)


@both
@pytest.mark.parametrize("cotangents", [(), (ONE, ONE)], ids=["none", "two"])
def test_pullback_takes_one_cotangent(eqx, cotangents):
    _, pullback = eqx.filter_vjp(lambda x: x, TWO)
    with pytest.raises(TypeError):
        pullback(*cotangents)


def test_what_is_no_function_is_an_error():
    with pytest.raises(TypeError, match="3 is not a callable object: `filter_vjp` expects"):
        filter_vjp(3, TWO)
