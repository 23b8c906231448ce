"""Errors of derivatives: functions, arguments and rules that do not fit."""

from typing import Any

import equinox
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import pytest

import eqxlike
from eqxlike import filter_custom_jvp, filter_custom_vjp, filter_grad, filter_jvp, filter_vjp
from eqxlike._transforms._derivatives._tangents import check_structure
from tests.transforms.derivatives.models import beside, checked, custom_jvp, custom_vjp
from tests.transforms.models import Node

ONE, TWO = jnp.float32(1), jnp.float32(2)


def scale(x, *args, **kwargs):
    return x


def raises(error, message, provoke):
    with pytest.raises(error, match=message) as caught:
        provoke()
    return caught.value


def of_table(table):
    rows = [(error, *row) for error, rows in table.items() for row in rows]
    return pytest.mark.parametrize(("error", "provoke", "message"), rows)


# --- functions and arguments --------------------------------------------------------------------

GRADIENTS = ["filter_grad", "filter_value_and_grad"]
JACOBIANS = ["filter_jacfwd", "filter_jacrev", "filter_hessian"]


@pytest.mark.parametrize("name", [*GRADIENTS, *JACOBIANS])
def test_error_of_a_missing_first_argument_or_pair_names_the_function(name):
    transform = getattr(eqxlike, name)
    raises(TypeError, f"eqxlike.{name}` .*first argument pas", lambda: transform(scale)(x=TWO))
    for function, came in [
        (scale, r"scale must return a pair \(value, aux\); .* array of shape \(\) and"),
        (lambda x: (x, 1, 2), "type tuple"),
    ]:
        raises(TypeError, came, lambda: transform(function, has_aux=True)(TWO))  # noqa: B023


@pytest.mark.parametrize("name", GRADIENTS)
def test_argnums_raises_at_decoration(name):
    ours, theirs = getattr(eqxlike, name), getattr(equinox, name)
    assert callable(theirs(argnums=0))
    for args in ((), (scale,)):
        raises(ValueError, "`argnums` should not be passed.*tuple", lambda: ours(*args, argnums=0))  # noqa: B023


def test_error_of_a_value_without_gradient_says_what_to_return():
    for x, note in [
        (jnp.ones(2), "Return a scalar, such as the mean"),
        (jnp.array(2), "Integers have no derivative"),
    ]:
        error = raises(TypeError, "scalar-output|real-valued", lambda: filter_grad(scale)(x))  # noqa: B023
        assert any(note in each for each in error.__notes__)


# --- trees of tangents and cotangents -----------------------------------------------------------


def cotangent(tree):
    return filter_vjp(lambda x: (x, "s"), TWO)[1](tree)


LOOP: list[Any] = []
LOOP.append(LOOP)

STRUCTURE = r"tangents must have the structure of primals.*: "
LIKE = r"^tangents\['a'\] must "
FLOAT32 = LIKE + r"have the dtype of primals\['a'\], which is float32; it has dtype "
STRUCTURES = [
    (lambda: beside([1, (2, 3)], [1, (2,)]), STRUCTURE + r"primals\[1\] is a tuple"),
    (lambda: beside(Node(1, (2,)), Node(1, 2)), STRUCTURE + r"primals\.others is a tuple"),
    (
        lambda: beside((Node(1),), (Node(1, size=2),)),
        STRUCTURE + r"primals\[0\] is a node of type Node with size=1, and tang",
    ),
    (
        lambda: beside((Node(1),), (ONE,)),
        STRUCTURE + r"primals\[0\] is a node of type Node, and tangents\[0\] is an array of sh",
    ),
    (lambda: beside((1, None), (1, 2)), STRUCTURE + r"primals\[1\] is None, and tang"),
    (lambda: beside([(1, 2)], LOOP), r"tangents\[0\]"),
    (
        lambda: check_structure(jtu.tree_structure([1, (2, 3)]), [1, None], "new", "old"),
        "new must have the structure of old, but contains None",
    ),
    (lambda: checked(ONE, jnp.ones(2)), LIKE + r"have the shape of primals\['a'\], which is"),
    (lambda: cotangent({"a": ONE}), "output is a tuple of length 2, and cotangent is a dict"),
]
LEAVES = [
    (lambda: checked(None, 2), LIKE + r"be None, since primals\['a'\] is not diff"),
    (lambda: checked(ONE, 2j), FLOAT32),
    (lambda: checked(ONE, jnp.bfloat16(1)), FLOAT32 + "bfloat16"),
    (lambda: checked(ONE, "b"), LIKE + r"be an array like primals\['a'\], or None"),
    (lambda: checked(ONE, (ONE,)), LIKE + r"be an array like .*, or None; it is a tuple of "),
    (lambda: filter_jvp(scale, ONE, (ONE,)), "`primals` must be a tuple or list with an element"),
    (lambda: filter_jvp(scale, (ONE,), ONE), "`tangents` must be a tuple or list with an element"),
    (lambda: cotangent((ONE, 1.0)), r"cotangent\[1\] must be None, since output\[1\] is not diff"),
    (lambda: filter_jvp(scale, ("s",), (ONE,)), r"tangents\[0\] must be None"),
    (lambda: filter_vjp(scale, TWO)[1](ONE, ONE), "argument"),
    (lambda: filter_vjp(scale, TWO, has_aux=True), r"scale must return a pair \(value, aux\)"),
]
TREES = {ValueError: STRUCTURES, TypeError: LEAVES}


@of_table(TREES)
def test_error_of_tangents_that_do_not_fit_names_the_path(error, provoke, message):
    raises(error, f"(?s){message}", provoke)


# --- closures -----------------------------------------------------------------------------------


CALLS = [
    ((jnp.ones(2), 1), r"but call.args\[0\] is f32\[2\]"),
    ((1.0, 1), r"call.args\[0\] is 1.0"),
    ((TWO, 3), r"example.args\[1\] is 1, but call.args\[1\] is 3"),
    ((TWO, True), r"example.args\[1\] is 1, but call.args\[1\] is True"),
    ((TWO, jnp.int32(2)), r"call.args\[1\] is i32\[\]"),
    ((TWO,), "call.args is a tuple of length 1"),
]


def test_error_of_a_converted_closure_compares_the_call_with_the_example():
    converted = eqxlike.filter_closure_convert(lambda x, n: x * n, TWO, 1)
    for args, message in CALLS:
        raises(ValueError, message, lambda: converted(*args))  # noqa: B023


# --- rules --------------------------------------------------------------------------------------


def by_rule(returned):
    """The derivative of a function whose rule returns the output of `returned`."""
    custom = custom_jvp(scale, lambda primals, tangents: returned(*primals))
    return lambda: jax.jvp(custom, (TWO,), (ONE,))


def by_passes(gradient, forward=None, x=TWO, function=scale):
    return lambda: jax.grad(custom_vjp(function, forward, lambda *_: gradient))(x)


def of_another_form(custom):
    return lambda: jax.grad(jax.jit(lambda x: custom(x)["a"]))(TWO)


def by_keyword(custom, function):
    return lambda: jax.grad(lambda y: function(custom, y))(TWO)


def incomplete(*given):
    custom = filter_custom_vjp(scale)
    for define in given:
        getattr(custom, define)(len)
    return lambda: custom(TWO)


BOTH_PASSES = r"`@scale.def_fwd` .* `@scale.def_bwd`"
WITHOUT_RULE = [(lambda: filter_custom_jvp(scale)(TWO), r"scale has no .* with `@scale\.def_jvp`")]
NOT_DIFFERENTIABLE = [
    (incomplete(), BOTH_PASSES),
    (incomplete("def_fwd"), BOTH_PASSES),
    (incomplete("def_bwd"), BOTH_PASSES),
    (
        by_keyword(custom_vjp(scale), lambda custom, y: custom(TWO, (y, "s"))),
        r"scale was differentiated with respect to args\[0\]\[0\]",
    ),
    (
        by_keyword(custom_vjp(scale), lambda custom, y: custom(TWO, None, y=y)),
        r"scale was differentiated with respect to kwargs\['y'\]",
    ),
]
OUTPUTS = [
    (by_rule(lambda x: x), r"The rule of scale must return a pair \(value, tangent\)"),
    (
        by_rule(lambda x: ({"a": jnp.int32(1)}, {"a": x})),
        r"tangent\['a'\] must be None, since value\['a'\] is not differentiable",
    ),
    (
        by_passes(ONE, lambda perturbed, x: x),
        r"The forward pass of scale must return a pair \(value, residuals\); it returned an ",
    ),
]
FORMS = [
    (
        by_rule(lambda x: ({"a": x, "b": [x]}, {"a": x, "b": [x, x]})),
        r"value\['b'\] is a list of length 1, and tangent\['b'\] is a list of length 2",
    ),
    (
        of_another_form(custom_jvp(lambda x: {"a": x}, lambda p, t: ({"b": p[0]}, {"b": t[0]}))),
        r"value is a dict with the keys \['a'\], and value of the rule is a dict with",
    ),
    (
        by_keyword(custom_jvp(scale, len), lambda custom, y: custom(TWO, options={"y": y})),
        r"scale was differentiated with respect to kwargs\['options'\]\['y'\]",
    ),
    (
        by_passes({"b": ONE}, x={"a": TWO}, function=lambda tree: tree["a"]),
        r"vjp_arg is a dict with the keys \['a'\], and gradient is a dict wi",
    ),
    (by_passes(jnp.ones(2)), "gradient must have the shape of vjp_arg"),
    (
        of_another_form(custom_vjp(lambda x: {"a": x}, lambda perturbed, x: ({"b": x}, None))),
        r"value is a dict with the keys \['a'\], and value of the forward pass is a dict",
    ),
]
RULES = {
    AttributeError: WITHOUT_RULE,
    RuntimeError: NOT_DIFFERENTIABLE,
    TypeError: OUTPUTS,
    ValueError: FORMS,
}


@of_table(RULES)
def test_error_of_a_rule_that_does_not_fit_its_function(error, provoke, message):
    raises(error, message, provoke)
