"""Where a test takes `eqx`, the same program holds on Equinox, whose behaviour is the measure."""

from typing import Any

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxlike
from eqxlike import filter_custom_jvp
from tests.beside_equinox import both

TWO, THREE, ONE = jnp.float32(2), jnp.float32(3), jnp.float32(1)


def custom_jvp(eqx, function, rule):
    custom = eqx.filter_custom_jvp(function)
    custom.def_jvp(rule)
    return custom


# --- what the rule is given ---------------------------------------------------------------------


@both
@pytest.mark.parametrize(
    "other", [THREE, np.float32(3), jnp.int32(3), jax.random.key(0), 2.5, 2, True, "s", None, len]
)
def test_tangent_is_none_beside_what_is_not_differentiated(eqx, other):
    seen = []

    def rule(primals, tangents):
        seen.append((primals, tangents))
        return primals[0], tangents[0]

    custom = custom_jvp(eqx, lambda x, other: x, rule)
    eqx.filter_jvp(custom, (TWO, other), (ONE, None))
    (((x, passed), tangents),) = seen
    assert (x, tangents) == (2.0, (1.0, None))
    assert passed is other or passed == other


@both
def test_tangent_of_a_module_is_a_module(eqx):
    class Model(eqx.Module):
        weight: Any
        activation: Any
        count: int = eqx.field(static=True, default=2)

    def rule(primals, tangents):
        (model,), (tangent,) = primals, tangents
        assert (model.activation, model.count) == (jnp.tanh, 2)
        assert (type(tangent), tangent.activation, tangent.count) == (Model, None, 2)
        return model.weight, 7 * tangent.weight

    custom = custom_jvp(eqx, lambda model: model.weight, rule)
    assert eqx.filter_grad(custom)(Model(TWO, jnp.tanh)).weight == 7


@both
def test_keyword_arguments_are_passed_to_the_rule(eqx):
    def rule(primals, tangents, *, function, y):
        return function(primals[0]), y * tangents[0]

    custom = custom_jvp(eqx, lambda x, *, function, y: function(x), rule)
    assert eqx.filter_grad(custom)(TWO, function=jnp.sin, y=THREE) == 3


@both
def test_argument_passed_by_keyword_is_a_keyword_argument_of_the_rule(eqx):
    custom = custom_jvp(eqx, lambda x, y: x * y, lambda primals, tangents: None)
    with pytest.raises(TypeError, match="unexpected keyword argument 'y'"):
        eqx.filter_grad(lambda x: custom(x, y=THREE))(TWO)


@both
def test_the_rule_is_not_called_if_nothing_has_a_tangent(eqx):
    custom = custom_jvp(eqx, lambda x: x, lambda primals, tangents: 1 / 0)
    assert eqx.filter_jvp(lambda x, y: custom(x) * y, (TWO, THREE), (None, ONE)) == (6.0, 2.0)


# --- what the rule returns ----------------------------------------------------------------------


@both
def test_value_is_that_of_the_rule(eqx):
    custom = custom_jvp(eqx, lambda x: x, lambda primals, tangents: (10 * primals[0], tangents[0]))
    assert eqx.filter_jvp(custom, (TWO,), (ONE,)) == (20.0, 1.0)


@both
def test_none_is_a_zero_that_stays_apart(eqx):
    custom = custom_jvp(eqx, lambda x: (x, x), lambda p, t: ((p[0], p[0]), (t[0], None)))
    assert eqx.filter_jvp(custom, (TWO,), (ONE,)) == ((2.0, 2.0), (1.0, None))
    assert jax.grad(lambda x: sum(custom(x)))(TWO) == 1


def test_none_is_zero_for_a_whole_subtree():
    custom = custom_jvp(
        eqxlike, lambda x: {"a": (x, x), "b": x}, lambda p, t: (custom(*p), {"a": None, "b": t[0]})
    )
    assert eqxlike.filter_jvp(custom, (TWO,), (ONE,))[1] == {"a": (None, None), "b": 1.0}


@both
@pytest.mark.parametrize(
    "tangent", [None, np.zeros((), jax.dtypes.float0)], ids=["None", "zero of JAX"]
)
def test_tangent_of_integers_is_none(eqx, tangent):
    n = jnp.int32(1)
    custom = custom_jvp(eqx, lambda x: (x, n), lambda p, t: ((p[0], n), (t[0], tangent)))
    assert jax.grad(lambda x: custom(x)[0])(TWO) == 1


@both
def test_number_in_the_value_has_a_tangent(eqx):
    custom = custom_jvp(eqx, lambda x: 2.5, lambda p, t: (2.5, 7 * t[0]))
    assert (custom(TWO), jax.grad(custom)(TWO)) == (2.5, 7)


def test_value_may_hold_anything():
    def function(x):
        return {"x": x, "s": "s", "n": 3, "function": jnp.sin}

    custom = custom_jvp(eqxlike, function, lambda p, t: (function(*p), {**function(*t), **NONE}))
    assert custom(TWO) == function(TWO)
    assert eqxlike.filter_jvp(custom, (TWO,), (ONE,)) == (function(TWO), {"x": 1.0, **NONE})
    assert eqxlike.filter_jit(custom)(TWO) == function(TWO)
    with pytest.raises(TypeError, match="not a valid JAX type"):
        custom_jvp(equinox, function, len)(TWO)


NONE = {"s": None, "n": None, "function": None}


# --- the older form -----------------------------------------------------------------------------


@both
def test_defjvp_passes_zeros(eqx):
    seen = []
    custom = eqx.filter_custom_jvp(lambda x, y, n, s, *, z: x)
    with pytest.warns(match="filter_custom_jvp.defjvp` is deprecated"):
        custom.defjvp(lambda p, t, *, z: (seen.append(t) or p[0], t[0]))
    assert jax.grad(lambda x: custom(x, THREE, jnp.int32(1), "s", z=TWO))(TWO) == 1
    ((_, of_y, *others),) = seen
    assert (of_y, others) == (0.0, [None, None])


# --- errors -------------------------------------------------------------------------------------


@both
def test_without_a_rule_a_call_is_an_error(eqx):
    with pytest.raises(AttributeError):
        eqx.filter_custom_jvp(lambda x: x)(TWO)


def test_the_error_without_a_rule_says_how_to_give_it():
    def scale(x):
        return x

    with pytest.raises(AttributeError, match=r"scale has no .* with `@scale\.def_jvp`"):
        filter_custom_jvp(scale)(TWO)


@both
@pytest.mark.parametrize("define", ["def_jvp", "defjvp"])
@pytest.mark.filterwarnings("ignore:.*defjvp. is deprecated")
def test_differentiated_keyword_argument_is_an_error(eqx, define):
    def scale(x, *, options):
        return x * options["y"]

    custom = eqx.filter_custom_jvp(scale)
    getattr(custom, define)(lambda p, t, *, options: (p[0], t[0]))
    messages = {
        equinox: "Received keyword tangent",
        eqxlike: r"scale was differentiated in kwargs\['options'\]\['y'\]",
    }
    with pytest.raises(ValueError, match=messages[eqx]):
        jax.grad(lambda y: custom(TWO, options={"y": y}))(THREE)


@pytest.mark.parametrize(
    ("returned", "error", "message"),
    [
        (lambda x: x, TypeError, r"The rule of scale must return a pair \(value, tangent\)"),
        (
            lambda x: ({"a": x, "b": [x]}, {"a": x, "b": [x, x]}),
            ValueError,
            r"value\['b'\] is a list of length 1, and tangent\['b'\] is a list of length 2",
        ),
        (
            lambda x: ({"a": x}, {"a": jnp.stack([x, x])}),
            ValueError,
            r"tangent\['a'\] must have the shape of value\['a'\], which is \(\); it has shape ",
        ),
        (
            lambda x: ({"a": x}, {"a": x.astype(jnp.bfloat16)}),
            TypeError,
            r"tangent\['a'\] must have the dtype of value\['a'\]",
        ),
        (
            lambda x: ({"a": jnp.int32(1)}, {"a": x}),
            TypeError,
            r"tangent\['a'\] must be None, since value\['a'\] is not differentiable",
        ),
    ],
    ids=["pair", "structure", "shape", "dtype", "int"],
)
def test_output_of_the_rule_of_another_form_is_an_error(returned, error, message):
    def scale(x):
        return x

    custom = custom_jvp(eqxlike, scale, lambda primals, tangents: returned(*primals))
    with pytest.raises(error, match=message):
        jax.jvp(custom, (TWO,), (ONE,))


def test_value_of_another_form_than_that_of_the_function_is_an_error():
    custom = custom_jvp(eqxlike, lambda x: {"a": x}, lambda p, t: ({"b": p[0]}, {"b": t[0]}))
    message = r"value is a dict with the keys \['a'\], and value of the rule is a dict with the "
    with pytest.raises(ValueError, match=message):
        jax.grad(jax.jit(lambda x: custom(x)["a"]))(TWO)
