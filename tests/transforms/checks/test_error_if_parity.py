"""Programs with `error_if` come to the same on Equinox, or differ where we say so."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxlike
from tests.beside_equinox import plain

X = jnp.arange(3.0)
TRUE, FALSE = jnp.array(True), jnp.array(False)
ROWS = jnp.arange(6.0).reshape(2, 3)
MESSAGES = ["first", "second", "third"]

# Of one expression each, which says what is done with `eqx`; the message of a check is "wrong".
PROGRAMS: dict[str, Callable[[Any], Any]] = {
    # --- predicates ---
    "pred passes": lambda eqx: eqx.error_if(X, X < 0, "wrong"),
    "pred of an array": lambda eqx: eqx.error_if(X, X > 1, "wrong"),
    "pred of NumPy": lambda eqx: eqx.error_if(X, np.array([False, True]), "wrong"),
    "pred is a NumPy bool": lambda eqx: eqx.error_if(X, np.bool_(True), "wrong"),
    "pred is a NumPy bool and false": lambda eqx: eqx.error_if(X, np.bool_(False), "wrong"),
    "pred is a bool": lambda eqx: eqx.error_if(X, True, "wrong"),
    "pred is a bool and false": lambda eqx: eqx.error_if(X, False, "wrong"),
    "pred is an int": lambda eqx: eqx.error_if(X, 1, "wrong"),
    "pred is a float": lambda eqx: eqx.error_if(X, 0.5, "wrong"),
    "pred is an array of integers": lambda eqx: eqx.error_if(X, jnp.arange(2), "wrong"),
    "pred is an array of floats": lambda eqx: eqx.error_if(X, jnp.array([0.5]), "wrong"),
    "pred is empty": lambda eqx: eqx.error_if(X, X[:0] < 0, "wrong"),
    "pred is a list": lambda eqx: eqx.error_if(X, [True], "wrong"),
    "pred is None": lambda eqx: eqx.error_if(X, None, "wrong"),
    "pred is text": lambda eqx: eqx.error_if(X, "yes", "wrong"),
    "bool in a compiled function": lambda eqx: eqx.filter_jit(eqx.error_if)(X, True, "wrong"),
    "array of NumPy in a compiled function": lambda eqx: eqx.filter_jit(
        lambda x: eqx.error_if(x, np.array(True), "wrong")
    )(X),
    # --- what is checked ---
    "x is a tree": lambda eqx: eqx.error_if({"a": (X, 1, "text"), "b": None}, FALSE, "wrong"),
    "x is of NumPy": lambda eqx: eqx.error_if((np.arange(2), np.float32(1)), FALSE, "wrong"),
    "x has no array": lambda eqx: eqx.error_if((1, "text"), FALSE, "wrong"),
    "x is None": lambda eqx: eqx.error_if(None, TRUE, "wrong"),
    "x has no array and pred is False": lambda eqx: eqx.error_if((1, "text"), False, "wrong"),
    "x has no array and pred is True": lambda eqx: eqx.error_if((1, "text"), True, "wrong"),
    # --- transformations; of those that pass, the value is compared too ---
    "jit passes": lambda eqx: eqx.filter_jit(lambda x: eqx.error_if(x, x < 0, "wrong"))(X),
    "jit": lambda eqx: eqx.filter_jit(lambda x: eqx.error_if(x, x > 1, "wrong"))(X),
    "vmap passes": lambda eqx: jax.vmap(lambda x: eqx.error_if(x, x < 0, "wrong"))(X),
    "vmap": lambda eqx: jax.vmap(lambda x: eqx.error_if(x, x > 1, "wrong"))(X),
    "vmap in jit passes": lambda eqx: eqx.filter_jit(
        eqx.filter_vmap(lambda x: eqx.error_if(x, x.sum() < 0, "wrong"))
    )(ROWS),
    "vmap in jit": lambda eqx: eqx.filter_jit(
        eqx.filter_vmap(lambda x: eqx.error_if(x, x.sum() > 10, "wrong"))
    )(ROWS),
    "vmap of pred alone": lambda eqx: jax.vmap(lambda p: eqx.error_if(X, p, "wrong"))(X > 1),
    "vmap of x alone": lambda eqx: jax.vmap(lambda x: eqx.error_if(x, TRUE, "wrong"))(X),
    "grad passes": lambda eqx: jax.grad(lambda x: eqx.error_if(x, x < 0, "wrong") ** 2)(X[2]),
    "grad": lambda eqx: jax.grad(lambda x: eqx.error_if(x, x > 0, "wrong") ** 2)(X[2]),
    "jvp passes": lambda eqx: jax.jvp(lambda x: eqx.error_if(x, x < 0, "wrong"), (X,), (X,)),
    "second derivative in jit": lambda eqx: eqx.filter_jit(
        jax.hessian(lambda x: (eqx.error_if(x, x < 0, "wrong") ** 3).sum())
    )(X),
    "gradients of a batch in jit": lambda eqx: eqx.filter_jit(
        jax.vmap(jax.grad(lambda x: eqx.error_if(x, x < 0, "wrong") ** 2))
    )(X),
    "scan passes": lambda eqx: eqx.filter_jit(
        lambda x: jax.lax.scan(lambda c, x: (eqx.error_if(c + x, x < 0, "wrong"), c), 0.0, x)
    )(X),
    "scan": lambda eqx: eqx.filter_jit(
        lambda x: jax.lax.scan(lambda c, x: (eqx.error_if(c + x, x > 1, "wrong"), c), 0.0, x)
    )(X),
    "while loop that would not end": lambda eqx: eqx.filter_jit(
        lambda x: jax.lax.while_loop(lambda x: x < 9, lambda x: eqx.error_if(x, x == 2, "wrong"), x)
    )(X[2]),
    "branch not taken": lambda eqx: eqx.filter_jit(
        lambda x: jax.lax.cond(x < 0, lambda x: eqx.error_if(x, TRUE, "wrong"), jnp.sin, x)
    )(X[2]),
    "branch taken": lambda eqx: eqx.filter_jit(
        lambda x: jax.lax.cond(x > 0, lambda x: eqx.error_if(x, TRUE, "wrong"), jnp.sin, x)
    )(X[2]),
    "x is not used": lambda eqx: eqx.filter_jit(lambda x: (eqx.error_if(x, x > 1, "wrong"), x)[1])(
        X
    ),
    # --- instead of an error ---
    "off": lambda eqx: eqx.error_if(X, X > 1, "wrong", on_error="off"),
    "off, and pred is a bool": lambda eqx: eqx.error_if(X, True, "wrong", on_error="off"),
    "off, and x has no array": lambda eqx: eqx.error_if(1, TRUE, "wrong", on_error="off"),
    "nan": lambda eqx: eqx.filter_jit(
        lambda *x: eqx.error_if(x, x[0] > 1, "wrong", on_error="nan")
    )(X, jnp.arange(2), jnp.zeros(2, bool), jnp.zeros(2, "uint8"), jnp.zeros(2, "complex64"), 1),
    "nan without a failure": lambda eqx: eqx.filter_jit(
        lambda x: eqx.error_if(x, x < 0, "wrong", on_error="nan")
    )(X),
    "nan passes gradients": lambda eqx: eqx.filter_jit(
        jax.grad(lambda x: 2 * eqx.error_if(x, x > 1, "wrong", on_error="nan"))
    )(X[2]),
    "unknown word": lambda eqx: eqx.error_if(X, FALSE, "wrong", on_error="ignore"),
    # --- one of several messages ---
    "second message": lambda eqx: eqx.branched_error_if(X, TRUE, 1, MESSAGES),
    "second message, traced": lambda eqx: eqx.filter_jit(
        lambda x, i: eqx.branched_error_if(x, x > 1, i, MESSAGES)
    )(X, jnp.array(1)),
    "last message": lambda eqx: eqx.branched_error_if(X, TRUE, jnp.array(-1), MESSAGES),
    "largest index": lambda eqx: eqx.branched_error_if(X, TRUE, jnp.array([0, 2, 1]), MESSAGES),
    "index and pred of Python": lambda eqx: eqx.branched_error_if(X, True, 1, MESSAGES),
    "pred of Python, index of an array": lambda eqx: eqx.branched_error_if(
        X, True, jnp.array(1), MESSAGES
    ),
    "index out of range without a failure": lambda eqx: eqx.branched_error_if(
        X, FALSE, 7, MESSAGES
    ),
    "index is text": lambda eqx: eqx.branched_error_if(X, TRUE, "first", MESSAGES),
}


def output_of(program, eqx):
    """The value as plain data, or the class of the exception and the message in its text."""
    try:
        return plain(jax.block_until_ready(program(eqx)))
    except Exception as error:
        said = re.search("(?:EquinoxRuntimeError: |^)(wrong|first|second|third)", str(error))
        return type(error).__name__.replace("Eqxlike", "Equinox"), said and said[1]


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_does_the_same(name):
    ours, theirs = (output_of(PROGRAMS[name], eqx) for eqx in (eqxlike, equinox))
    assert repr(ours) == repr(theirs)


@pytest.mark.parametrize("name", ["error_if", "branched_error_if"])
def test_parameters_are_those_of_equinox(name):
    ours, theirs = (
        [
            (each.name, each.kind, each.default)
            for each in inspect.signature(getattr(eqx, name)).parameters.values()
        ]
        for eqx in (eqxlike, equinox)
    )
    assert ours == theirs


@pytest.mark.parametrize("name", ["RuntimeError", "TracetimeError"])
def test_exception_has_the_name_in_equinox_too(name):
    ours = getattr(eqxlike, f"Eqxlike{name}")
    assert getattr(eqxlike, f"Equinox{name}") is ours
    assert ours.__bases__ == getattr(equinox, f"Equinox{name}").__bases__


# --- differences --------------------------------------------------------------------------------


def both(program):
    return [output_of(program, eqx) for eqx in (eqxlike, equinox)]


def values(output):
    return output[1]


def test_nan_is_for_the_members_of_the_batch_that_fail():
    ours, theirs = both(
        lambda eqx: jax.vmap(lambda x: eqx.error_if(x, x > 1, "wrong", on_error="nan"))(X)
    )
    np.testing.assert_array_equal(values(ours), [0, 1, np.nan])
    np.testing.assert_array_equal(values(theirs), [np.nan] * 3)


def test_nan_is_for_bfloat16_too():
    x = jnp.zeros(2, jnp.bfloat16)
    ours, theirs = both(lambda eqx: eqx.error_if(x, TRUE, "wrong", on_error="nan"))
    assert np.isnan(np.array(values(ours), float)).all()
    assert values(theirs) == [0, 0]


def test_gradient_is_checked_though_it_does_not_depend_on_the_value():
    ours, theirs = both(
        lambda eqx: eqx.filter_jit(jax.grad(lambda x: 2 * eqx.error_if(x, x > 1, "wrong")))(X[2])
    )
    assert ours == ("EquinoxRuntimeError", "wrong")
    assert values(theirs) == 2


def test_unused_check_is_made_if_a_later_one_is():
    def program(eqx):
        @eqx.filter_jit
        def function(x):
            unused = eqx.error_if(x, x > 1, "first")  # noqa: F841
            return eqx.error_if(2 * x, x < 0, "second")

        return function(X)

    ours, theirs = both(program)
    assert ours == ("EquinoxRuntimeError", "first")
    assert values(theirs) == [0, 2, 4]


def test_first_check_in_the_program_is_the_one_that_raises():
    def program(eqx):
        @eqx.filter_jit
        def function(x, y):
            a = eqx.error_if(jnp.sin(x), x > 1, "first")
            b = eqx.error_if(y, y > 1, "second")
            c = eqx.error_if(2 * y, y > 1, "third")
            return c * b + a.sum()

        return function(X, X)

    ours, theirs = both(program)
    assert (ours[1], theirs[1]) == ("first", "second")


def test_message_is_that_of_the_largest_index_among_those_that_fail():
    def program(eqx):
        check = lambda x, index: eqx.branched_error_if(x, x > 1, index, MESSAGES)
        return eqx.filter_jit(jax.vmap(check))(X, jnp.array([2, 0, 1]))

    ours, theirs = both(program)
    assert (ours[1], theirs[1]) == ("second", "third")


@pytest.mark.parametrize("index", [3, -4, jnp.array(3)], ids=["above", "below", "array"])
def test_index_out_of_range_is_named_where_the_check_fails(index):
    with pytest.raises(eqxlike.EqxlikeRuntimeError, match=r"of index -?\d, where .* only 3"):
        eqxlike.branched_error_if(X, TRUE, index, MESSAGES)
    with pytest.raises(jax.errors.JaxRuntimeError):
        equinox.branched_error_if(X, TRUE, index, MESSAGES)


def test_no_messages_at_all_is_an_error_whether_the_check_fails_or_not():
    with pytest.raises(ValueError, match="`msgs` is empty"):
        eqxlike.branched_error_if(X, FALSE, 0, [])
    assert equinox.branched_error_if(X, FALSE, 0, []) is not None


@pytest.mark.parametrize("index", [1.0, True, jnp.array(1.0)], ids=["float", "bool", "array"])
def test_index_that_is_no_integer_is_an_error_whether_the_check_fails_or_not(index):
    with pytest.raises(TypeError, match=r"`index` is of dtype .*; expected is an integer"):
        eqxlike.branched_error_if(X, FALSE, index, MESSAGES)
    assert equinox.branched_error_if(X, FALSE, index, MESSAGES) is not None


def test_typed_keys_can_be_checked():
    key = jax.random.key(0)
    assert eqxlike.filter_jit(eqxlike.error_if)(key, FALSE, "wrong") == key
    with pytest.raises(TypeError, match="data type"):
        equinox.error_if(key, FALSE, "wrong")
