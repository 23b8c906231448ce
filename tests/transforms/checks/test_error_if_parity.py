"""`error_if` compared with Equinox, and the other values of `on_error`."""

import concurrent.futures
import io
import re
from collections.abc import Callable
from typing import Any

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxlike
from eqxlike import branched_error_if, error_if
from tests.beside_equinox import plain

X = jnp.arange(3.0)
TRUE, FALSE = jnp.array(True), jnp.array(False)
MESSAGES = ["first", "second", "third"]

# The message of each check is "wrong".
PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "pred is a bool": lambda eqx: eqx.error_if(X, True, "wrong"),
    "pred is an int": lambda eqx: eqx.error_if(X, 1, "wrong"),
    "pred is a float": lambda eqx: eqx.error_if(X, 0.5, "wrong"),
    "pred is a list": lambda eqx: eqx.error_if(X, [True], "wrong"),
    "pred is text": lambda eqx: eqx.error_if(X, "yes", "wrong"),
    "x has no array": lambda eqx: eqx.error_if((1, "text"), FALSE, "wrong"),
    "x has no array and pred is False": lambda eqx: eqx.error_if((1, "text"), False, "wrong"),
    "x has no array and pred is True": lambda eqx: eqx.error_if((1, "text"), True, "wrong"),
    "vmap of pred alone": lambda eqx: jax.vmap(lambda p: eqx.error_if(X, p, "wrong"))(X > 1),
    "off": lambda eqx: eqx.error_if(X, X > 1, "wrong", on_error="off"),
    "off, and x has no array": lambda eqx: eqx.error_if(1, TRUE, "wrong", on_error="off"),
    "nan": lambda eqx: eqx.filter_jit(
        lambda *x: eqx.error_if(x, x[0] > 1, "wrong", on_error="nan")
    )(X, jnp.arange(2), jnp.zeros(2, bool), jnp.zeros(2, "uint8"), 1),
    "unknown word": lambda eqx: eqx.error_if(X, FALSE, "wrong", on_error="ignore"),
    "index and pred of Python": lambda eqx: eqx.branched_error_if(X, True, 1, MESSAGES),
    "index is text": lambda eqx: eqx.branched_error_if(X, TRUE, "first", MESSAGES),
}


def output_of(program, eqx):
    """The value as plain data, or the class of the exception and its message."""
    try:
        return plain(jax.block_until_ready(program(eqx)))
    except Exception as error:
        found = re.search("(?:EquinoxRuntimeError: |^)(wrong|first|second|third)", str(error))
        return type(error).__name__.replace("Eqxlike", "Equinox"), found and found[1]


def test_program_gives_the_output_of_equinox():
    ours, theirs = (
        {name: repr(output_of(program, eqx)) for name, program in PROGRAMS.items()}
        for eqx in (eqxlike, equinox)
    )
    assert ours == theirs


def test_error_of_a_python_predicate_is_only_the_message():
    for eqx in (eqxlike, equinox):
        with pytest.raises(eqx.EquinoxTracetimeError, match=r"^wrong$"):
            eqx.error_if(int, True, "wrong")


def test_every_kind_of_predicate_and_index_raises_or_passes():
    for pred in (TRUE, np.bool_(True), np.array([False, True]), jnp.arange(2), jnp.array([0.5])):
        with pytest.raises(eqxlike.EqxlikeRuntimeError, match=r"^wrong\n"):
            error_if(X, pred, "wrong")
    for pred in (FALSE, False, 0, np.bool_(False), np.zeros(2, bool), X[:0] < 0):
        assert error_if(X, pred, "wrong") is X
    for pred in (True, TRUE):
        for index, word in [(1, "second"), (-1, "third"), (np.array([0, 1]), "second")]:
            with pytest.raises(RuntimeError, match=f"^{word}"):
                branched_error_if(X, pred, index, MESSAGES)
    assert branched_error_if(X, FALSE, 7, MESSAGES) is X
    traced = eqxlike.filter_jit(lambda x, i: branched_error_if(x, np.array(True), i, MESSAGES))
    with pytest.raises(eqxlike.EqxlikeRuntimeError, match=r"^second\n"):
        traced(X, jnp.array(1))


def test_check_does_not_change_derivatives_and_branches():
    def cube(x):
        x = error_if(x, x < 0, "wrong")
        x = jax.lax.cond(x > 9, lambda x: error_if(x, TRUE, "wrong"), jnp.abs, x)
        return error_if(x, x > 5, "wrong", on_error="nan") ** 3

    assert eqxlike.filter_jit(jax.hessian(cube))(X[2]) == 12
    assert jax.jvp(cube, (X[2],), (X[2],)) == (8, 24)
    # Gradients pass through the NaN.
    nan = eqxlike.filter_grad(lambda x: 2 * error_if(x, x > 1, "wrong", on_error="nan"))
    assert nan(X[2]) == 2


# --- differences from Equinox -------------------------------------------------------------------


def test_nan_replaces_only_the_members_of_the_batch_that_fail():
    ours, theirs = (
        jax.vmap(lambda x, eqx=eqx: eqx.error_if(x, x > 1, "wrong", on_error="nan"))(X)
        for eqx in (eqxlike, equinox)
    )
    np.testing.assert_array_equal(ours, [0, 1, np.nan])
    np.testing.assert_array_equal(theirs, [np.nan] * 3)


def test_check_also_runs_in_a_gradient_that_does_not_depend_on_the_value():
    gradients = [
        eqx.filter_jit(jax.grad(lambda x, eqx=eqx: 2 * eqx.error_if(x, x > 1, "wrong")))
        for eqx in (eqxlike, equinox)
    ]
    with pytest.raises(eqxlike.EqxlikeRuntimeError, match="wrong"):
        gradients[0](X[2])
    assert gradients[1](X[2]) == 2


def test_unused_check_runs_if_a_later_check_runs():
    @eqxlike.filter_jit
    def function(x):
        unused = error_if(x, x > 1, "first")  # noqa: F841
        return error_if(2 * x, x < 0, "second")

    with pytest.raises(eqxlike.EqxlikeRuntimeError, match="first"):
        function(X)


def test_error_of_an_index_out_of_range_names_the_index():
    for index in (3, -4, jnp.array(3), jnp.array(-4)):
        with pytest.raises(
            eqxlike.EqxlikeRuntimeError, match=f"message index {index}, but .* only 3 messages"
        ):
            branched_error_if(X, TRUE, index, MESSAGES)
    with pytest.raises(eqxlike.EqxlikeRuntimeError, match=r"^first"):
        branched_error_if(X, TRUE, -3, MESSAGES)
    with pytest.raises(jax.errors.JaxRuntimeError):
        equinox.branched_error_if(X, TRUE, 3, MESSAGES)


# --- instead of an error: off, nan and the debugger ---


def checked(x, on_error: Any = "default"):
    inside = x * 2
    return error_if(x, x > 1, "too large", on_error=on_error), inside


def of_few_frames(call, *args):
    """The output of a call in a new thread, where the stack has fewer frames for JAX to read."""

    def called():
        output = call(*args)
        jax.effects_barrier()
        return output

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(called).result()


@pytest.fixture
def debugger(monkeypatch):
    """Enters a text in the debugger."""
    return lambda text: monkeypatch.setattr("sys.stdin", io.StringIO(text))


def test_off_leaves_no_check_and_nan_no_callback_in_the_program():
    with_check = jax.make_jaxpr(lambda x: error_if(x, x > 1, "", on_error="off"))(X)
    assert str(with_check) == str(jax.make_jaxpr(lambda x: (x > 1, x)[1])(X))
    assert "callback" not in str(jax.make_jaxpr(lambda x: checked(x, "nan"))(X))
    key = jax.random.key(0)
    assert eqxlike.filter_jit(error_if)(key, FALSE, "wrong") == key


def test_nan_has_the_dtype_of_the_value_and_appears_only_if_the_check_fails():
    with jax.debug_nans(True):
        assert error_if(X, X > 2, "", on_error="nan").tolist() == [0, 1, 2]
    for x in (X, jnp.bfloat16(0), jnp.complex64(0)):
        for function in (error_if, eqxlike.filter_jit(error_if)):
            failed = function(x, TRUE, "", on_error="nan")
            assert (failed.dtype, np.isnan(np.asarray(failed, complex)).all()) == (x.dtype, True)


def test_breakpoint_opens_at_the_check_and_continues_with_nan(debugger, capsys):
    for jit in (lambda function: function, eqxlike.filter_jit):
        debugger("p inside\nbt\nc\n")
        x, inside = of_few_frames(jit(lambda x: checked(x, "breakpoint")), X)
        assert jnp.isnan(x).all()
        assert inside.tolist() == [0, 2, 4]
        printed = capsys.readouterr().out
        assert printed.startswith("too large\n(check at ")
        assert "[0., 2., 4.]" in printed
        assert printed.count("File") == 1
        assert "y, inside" not in printed
        assert 'error_if(x, x > 1, "too large", on_error=on_error)' in printed


def test_breakpoint_shows_the_number_of_frames_in_the_environment(monkeypatch, debugger, capsys):
    def caller(x):
        return checked(x, "breakpoint")[0]

    monkeypatch.setenv("EQXLIKE_ON_ERROR_BREAKPOINT_FRAMES", "3")
    debugger("bt\nc\n")
    of_few_frames(lambda: eqxlike.filter_jit(caller)(X))
    printed = capsys.readouterr().out
    # Frames of eqxlike and of JAX are omitted.
    assert printed.count(f'File "{__file__}"') == printed.count("File") == 3
    assert 'return checked(x, "breakpoint")[0]' in printed


def test_each_breakpoint_opens_unless_its_check_passes(debugger, capsys):
    @eqxlike.filter_jit
    def function(x):
        a = error_if(x, x > 1, "first", on_error="breakpoint")
        return a + error_if(2 * x, x > 1, "second", on_error="breakpoint")

    assert of_few_frames(function, X - 5).tolist() == [-15, -12, -9]
    assert capsys.readouterr().out == ""
    debugger("c\nc\n")
    of_few_frames(function, X)
    printed = capsys.readouterr().out
    assert ("first\n" in printed, "second\n" in printed) == (True, True)


def test_breakpoint_names_the_members_of_a_batch_that_fail(debugger, capsys):
    debugger("c\nc\nc\n")
    x = of_few_frames(jax.vmap(lambda x: checked(x, "breakpoint")[0]), X)
    assert jnp.isnan(x).tolist() == [False, False, True]
    assert "failed for batch index 2)" in capsys.readouterr().out


def test_environment_sets_the_default_and_our_variable_overrides_equinox(monkeypatch):
    monkeypatch.setenv("EQX_ON_ERROR", "nan")
    assert jnp.isnan(checked(X)[0]).all()
    with pytest.raises(eqxlike.EqxlikeRuntimeError):
        checked(X, "raise")
    monkeypatch.setenv("EQXLIKE_ON_ERROR", "off")
    assert checked(X)[0] is X


def test_wrong_arguments_are_an_error_even_if_no_check_fails():
    wrong_index = r"`index` is of dtype .*; expected is an integer"
    for error, message, call in [
        (TypeError, "`pred` is an .* NoneType; expected is a bool", lambda: error_if(X, None, "")),
        (ValueError, "`msgs` is empty", lambda: branched_error_if(X, FALSE, 0, [])),
        *(
            (TypeError, wrong_index, lambda i=i: branched_error_if(X, FALSE, i, MESSAGES))
            for i in (1.0, True, jnp.array(1.0))
        ),
    ]:
        with pytest.raises(error, match=message):
            call()
    assert equinox.branched_error_if(X, FALSE, 0, []) is not None
    assert equinox.branched_error_if(X, FALSE, 1.0, MESSAGES) is not None


def test_error_of_an_invalid_environment_variable_names_it(monkeypatch):
    for library in ("EQX", "EQXLIKE"):
        frames = f"{library}_ON_ERROR_BREAKPOINT_FRAMES"
        for number in ("0", "-1", "many", ""):
            monkeypatch.setenv(frames, number)
            with pytest.raises(ValueError, match=f"{frames} is '{number}'; expected is the number"):
                checked(X, "breakpoint")
        monkeypatch.setenv(f"{library}_ON_ERROR", "ignore")
        message = f"{library}_ON_ERROR is 'ignore'; expected is one of "
        with pytest.raises(ValueError, match=message):
            checked(X)
