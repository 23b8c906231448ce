"""Errors of derivatives: wrong functions, arguments and rules."""

import re
from typing import Any

import equinox
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import pytest

import eqxlike
from eqxlike import filter_custom_jvp, filter_custom_vjp, filter_grad, filter_jvp, filter_vjp
from eqxlike._transforms._derivatives._products import check_structure
from tests.transforms.derivatives.models import beside, checked, custom_jvp, custom_vjp
from tests.transforms.models import Node

ONE, TWO = jnp.float32(1), jnp.float32(2)


def scale(x, *args, **kwargs):
    return x


def raises(error, message, provoke):
    """Checks that `provoke` raises an error. In the message, " ... " matches any text."""
    pattern = ".*".join(map(re.escape, message.split(" ... ")))
    with pytest.raises(error, match=f"(?s){pattern}") as caught:
        provoke()
    return caught.value


# --- functions and arguments --------------------------------------------------------------------

GRADIENTS = ["filter_grad", "filter_value_and_grad"]
PAIR = "scale must return a pair (value, aux)"
JACOBIANS = ["filter_jacfwd", "filter_jacrev", "filter_hessian"]


@pytest.mark.parametrize("name", [*GRADIENTS, *JACOBIANS])
def test_error_of_a_missing_first_argument_or_pair_names_the_function(name):
    transform, no_pair = getattr(eqxlike, name), lambda x: (x, 1, 2)
    for error, message, call in (
        (TypeError, f"eqxlike.{name}` ... first argument pas", lambda: transform(scale)(x=TWO)),
        (
            TypeError,
            f"{PAIR}; ... array of shape () and",
            lambda: transform(scale, has_aux=True)(TWO),
        ),
        (TypeError, "type tuple", lambda: transform(no_pair, has_aux=True)(TWO)),
    ):
        raises(error, message, call)


def test_argnums_raises_an_error_at_decoration():
    for name in GRADIENTS:
        ours, theirs = getattr(eqxlike, name), getattr(equinox, name)
        assert callable(theirs(argnums=0))
        message = "`argnums` should not be passed ... tuple"
        raises(ValueError, message, lambda: ours(argnums=0))  # noqa: B023
        raises(ValueError, message, lambda: ours(scale, argnums=0))  # noqa: B023


def test_error_of_a_value_without_gradient_names_the_expected_value():
    for x, message, note in [
        (jnp.ones(2), "scalar-output", "Return a scalar, such as the mean"),
        (jnp.array(2), "real-valued", "Integers have no derivative"),
    ]:
        error = raises(TypeError, message, lambda: filter_grad(scale)(x))  # noqa: B023
        assert any(note in each for each in error.__notes__)


# --- tangents and cotangents ---


LOOP: list[Any] = []
LOOP.append(LOOP)
STRUCTURES = [
    ([1, (2, 3)], [1, (2,)], "primals[1] is a tuple"),
    (Node(1, (2,)), Node(1, 2), "primals.others is a tuple"),
    ((Node(1),), (Node(1, size=2),), "primals[0] is a node of type Node with size=1, and tang"),
    ((Node(1),), (ONE,), "primals[0] is a node of type Node, and tangents[0] is an array of sh"),
    ((1, None), (1, 2), "primals[1] is None, and tang"),
    ([(1, 2)], LOOP, "tangents[0]"),
]
FLOAT32 = "have the dtype of primals['a'], which is float32; it has dtype "
LEAVES = [
    (ONE, jnp.ones(2), ValueError, "have the shape of primals['a'], which is"),
    (None, 2, TypeError, "be None, since primals['a'] is not diff"),
    (ONE, 2j, TypeError, FLOAT32),
    (ONE, jnp.bfloat16(1), TypeError, FLOAT32 + "bfloat16"),
    (ONE, "b", TypeError, "be an array like primals['a'], or None"),
    (ONE, (ONE,), TypeError, "be an array like primals['a'], or None; it is a tuple of "),
]


def test_error_of_mismatched_tangents_names_the_path():
    for tree, tangents, message in STRUCTURES:
        message = f"tangents must have the structure of primals ... : ... {message}"
        raises(ValueError, message, lambda: beside(tree, tangents))  # noqa: B023
    tree = jtu.tree_structure([1, (2, 3)])
    message = "new must have the structure of old, but contains None"
    raises(ValueError, message, lambda: check_structure(tree, [1, None], "new", "old"))
    for leaf, tangent, error, message in LEAVES:
        raises(error, f"tangents['a'] must {message}", lambda: checked(leaf, tangent))  # noqa: B023
    pull_back = filter_vjp(lambda x: (x, "s"), TWO)[1]
    element = "must be a tuple or list with an element"
    for error, message, call in (
        (
            ValueError,
            "is a tuple of length 2, and cotangent is a dict",
            lambda: pull_back({"a": ONE}),
        ),
        (TypeError, "cotangent[1] must be None, since output[1]", lambda: pull_back((ONE, 1.0))),
        (TypeError, f"`primals` {element}", lambda: filter_jvp(scale, ONE, (ONE,))),
        (TypeError, f"`tangents` {element}", lambda: filter_jvp(scale, (ONE,), ONE)),
        (TypeError, "tangents[0] must be None", lambda: filter_jvp(scale, ("s",), (ONE,))),
        (TypeError, "argument", lambda: filter_vjp(scale, TWO)[1](ONE, ONE)),
        (TypeError, PAIR, lambda: filter_vjp(scale, TWO, has_aux=True)),
    ):
        raises(error, message, call)


# --- closures ---


CALLS = [
    ((jnp.ones(2), 1), "but call.args[0] is f32[2]"),
    ((1.0, 1), "call.args[0] is 1.0"),
    ((TWO, 3), "example.args[1] is 1, but call.args[1] is 3"),
    ((TWO, True), "example.args[1] is 1, but call.args[1] is True"),
    ((TWO, jnp.int32(2)), "call.args[1] is i32[]"),
    ((TWO,), "call.args is a tuple of length 1"),
]


def test_error_of_a_converted_closure_compares_the_call_with_the_example():
    converted = eqxlike.filter_closure_convert(lambda x, n: x * n, TWO, 1)
    for args, message in CALLS:
        raises(ValueError, message, lambda: converted(*args))  # noqa: B023


# --- rules ---


def by_rule(returned):
    """The derivative of a function whose rule returns the output of `returned`."""
    custom = custom_jvp(scale, lambda primals, tangents: returned(*primals))
    return lambda: jax.jvp(custom, (TWO,), (ONE,))


def by_passes(gradient, forward=None, x=TWO, function=scale):
    return lambda: jax.grad(custom_vjp(function, forward, lambda *_: gradient))(x)


def in_dict(custom):
    return lambda: jax.grad(jax.jit(lambda x: custom(x)["a"]))(TWO)


def with_respect_to(call):
    return lambda: jax.grad(call)(TWO)


def incomplete(*given):
    custom = filter_custom_vjp(scale)
    for define in given:
        getattr(custom, define)(len)
    return lambda: custom(TWO)


def test_error_of_a_rule_that_does_not_match_its_function():
    no_rule, passes = filter_custom_jvp(scale), "`@scale.def_fwd` ... `@scale.def_bwd`"
    raises(AttributeError, "scale has no ... with `@scale.def_jvp`", lambda: no_rule(TWO))
    for given in ((), ("def_fwd",), ("def_bwd",)):
        raises(RuntimeError, passes, incomplete(*given))
    with_jvp, with_vjp = custom_jvp(scale, len), custom_vjp(scale)
    for error, path, call in (
        (RuntimeError, "args[0][0]", lambda y: with_vjp(TWO, (y, "s"))),
        (RuntimeError, "kwargs['y']", lambda y: with_vjp(TWO, None, y=y)),
        (ValueError, "kwargs['options']['y']", lambda y: with_jvp(TWO, options={"y": y})),
    ):
        raises(error, f"scale was differentiated with respect to {path}", with_respect_to(call))
    no_pair = "The forward pass of scale must return a pair (value, residuals); it returned an "
    for message, provoke in (
        ("The rule of scale must return a pair (value, tangent)", by_rule(lambda x: x)),
        (
            "tangent['a'] must be None, since value['a'] is not differentiable",
            by_rule(lambda x: ({"a": jnp.int32(1)}, {"a": x})),
        ),
        (no_pair, by_passes(ONE, lambda perturbed, x: x)),
    ):
        raises(TypeError, message, provoke)
    jvp_in_dict = custom_jvp(lambda x: {"a": x}, lambda p, t: ({"b": p[0]}, {"b": t[0]}))
    vjp_in_dict = custom_vjp(lambda x: {"a": x}, lambda perturbed, x: ({"b": x}, None))
    in_a, of_key = (
        "is a dict with the keys ['a'], and",
        {"x": {"a": TWO}, "function": lambda tree: tree["a"]},
    )
    for message, provoke in (
        (
            "value['b'] is a list of length 1, and tangent['b'] is a list of length 2",
            by_rule(lambda x: ({"a": x, "b": [x]}, {"a": x, "b": [x, x]})),
        ),
        (f"value {in_a} value of the rule is a dict with", in_dict(jvp_in_dict)),
        (f"value {in_a} value of the forward pass is a dict", in_dict(vjp_in_dict)),
        (f"vjp_arg {in_a} gradient is a dict wi", by_passes({"b": ONE}, **of_key)),
        ("gradient must have the shape of vjp_arg", by_passes(jnp.ones(2))),
    ):
        raises(ValueError, message, provoke)
