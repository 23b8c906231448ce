"""What happens instead of an error, and who says so."""

import io
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from eqxlike import EqxlikeRuntimeError, EqxlikeTracetimeError, error_if, filter_jit

X = jnp.arange(3.0)


def checked(x, on_error: Any = "default"):
    inside = x * 2
    return error_if(x, x > 1, "too large", on_error=on_error), inside


@pytest.fixture
def debugger(monkeypatch):
    """Says what is to be typed into the debugger."""

    def type_in(text):
        monkeypatch.setattr("sys.stdin", io.StringIO(text))

    return type_in


# --- off and nan ----------------------------------------------------------------------------------


def test_off_leaves_nothing_in_the_program():
    with_check = jax.make_jaxpr(lambda x: error_if(x, x > 1, "", on_error="off"))(X)
    assert str(with_check) == str(jax.make_jaxpr(lambda x: (x > 1, x)[1])(X))


def test_nan_calls_nothing_back():
    assert "callback" not in str(jax.make_jaxpr(lambda x: checked(x, "nan"))(X))


def test_nan_is_no_nan_where_nothing_fails():
    with jax.debug_nans(True):
        assert error_if(X, X > 2, "", on_error="nan").tolist() == [0, 1, 2]


def test_nan_stands_in_for_a_bool_too():
    assert jnp.isnan(error_if(X, True, "", on_error="nan")).all()
    assert jnp.isnan(filter_jit(lambda x: error_if(x, True, "", on_error="nan"))(X)).all()


# --- the debugger ---------------------------------------------------------------------------------


@pytest.mark.parametrize("jit", [lambda f: f, filter_jit], ids=["eager", "jit"])
def test_breakpoint_opens_where_the_check_stands_and_goes_on_with_nan(jit, debugger, capsys):
    debugger("p inside\nbt\nc\n")
    x, inside = jit(lambda x: checked(x, "breakpoint"))(X)
    jax.effects_barrier()
    assert jnp.isnan(x).all()
    assert inside.tolist() == [0, 2, 4]
    said = capsys.readouterr().out
    assert said.startswith("too large\n(check at ")
    assert "[0., 2., 4.]" in said
    assert said.count("File") == 1
    assert "y, inside" not in said
    assert 'error_if(x, x > 1, "too large", on_error=on_error)' in said


def test_breakpoint_shows_as_many_frames_as_the_environment_says(monkeypatch, debugger, capsys):
    def caller(x):
        return checked(x, "breakpoint")[0]

    monkeypatch.setenv("EQXLIKE_ON_ERROR_BREAKPOINT_FRAMES", "3")
    debugger("bt\nc\n")
    filter_jit(caller)(X).block_until_ready()
    jax.effects_barrier()
    said = capsys.readouterr().out
    # Of ours, and of JAX, there is none among them.
    assert said.count(f'File "{__file__}"') == said.count("File") == 3
    assert 'return checked(x, "breakpoint")[0]' in said


def test_breakpoint_does_not_open_where_the_check_passes(debugger, capsys):
    debugger("")
    assert filter_jit(lambda x: checked(x, "breakpoint"))(X - 5)[0].tolist() == [-5, -4, -3]
    assert capsys.readouterr().out == ""


def test_each_breakpoint_opens(debugger, capsys):
    debugger("c\nc\n")

    @filter_jit
    def function(x):
        a = error_if(x, x > 1, "first", on_error="breakpoint")
        return a + error_if(2 * x, x > 1, "second", on_error="breakpoint")

    function(X).block_until_ready()
    jax.effects_barrier()
    said = capsys.readouterr().out
    assert ("first\n" in said, "second\n" in said) == (True, True)


def test_breakpoint_says_which_members_of_a_batch_fail(debugger, capsys):
    debugger("c\nc\nc\n")
    x = jax.vmap(lambda x: checked(x, "breakpoint")[0])(X)
    jax.effects_barrier()
    assert jnp.isnan(x).tolist() == [False, False, True]
    assert "failed for batch index 2)" in capsys.readouterr().out


# --- the environment ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["EQXLIKE_ON_ERROR", "EQX_ON_ERROR"])
def test_environment_says_what_is_the_default(monkeypatch, name):
    monkeypatch.setenv(name, "nan")
    assert jnp.isnan(checked(X)[0]).all()
    with pytest.raises(EqxlikeRuntimeError):
        checked(X, "raise")


def test_our_variable_comes_before_that_of_equinox(monkeypatch):
    monkeypatch.setenv("EQXLIKE_ON_ERROR", "raise")
    monkeypatch.setenv("EQX_ON_ERROR", "off")
    with pytest.raises(EqxlikeTracetimeError):
        error_if(X, True, "")


@pytest.mark.parametrize("name", ["EQXLIKE_ON_ERROR", "EQX_ON_ERROR"])
def test_unknown_word_in_the_environment_is_an_error_that_names_the_variable(monkeypatch, name):
    monkeypatch.setenv(name, "ignore")
    with pytest.raises(ValueError, match=f"{name} is 'ignore'; expected is one of raise, "):
        checked(X)


@pytest.mark.parametrize("number", ["0", "-1", "many", ""])
@pytest.mark.parametrize("library", ["EQXLIKE", "EQX"])
def test_number_of_frames_that_is_none_is_an_error(monkeypatch, library, number):
    name = f"{library}_ON_ERROR_BREAKPOINT_FRAMES"
    monkeypatch.setenv(name, number)
    with pytest.raises(ValueError, match=f"{name} is '{number}'; expected is how many"):
        checked(X, "breakpoint")
