"""Implicit copies between host and device raise an error with path and line."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxlike as eqx

HOST = np.ones(3, np.float32)


X = jnp.ones(3)
double = eqx.filter_jit(lambda model, x: model["weight"] * x)


def _line(text):
    """The line of this file that ends with `text`, in the format of an error message."""
    lines = pathlib.Path(__file__).read_text().splitlines()
    return f"{__file__}:{next(at for at, line in enumerate(lines, 1) if line.endswith(text))}"


def _notes(caught):
    return "\n".join(caught.value.__notes__)


def test_explicit_names_path_and_line_of_a_numpy_array():
    double({"weight": X}, HOST)
    with (
        pytest.raises(RuntimeError, match="Disallowed host-to-device") as caught,
        eqx.transfers("explicit"),
    ):
        double({"weight": HOST}, X)  # an array
    notes = _notes(caught)
    assert "NumPy arrays, which each call copies to the device: model['weight']. Put" in notes
    assert f"{_line('# an array')} copies implicitly between host and device" in notes


def test_explicit_names_the_line_of_a_number():
    with (
        pytest.raises(RuntimeError, match="Disallowed host-to-device") as caught,
        eqx.transfers("explicit"),
    ):
        X * 2.0  # a number
    assert f"{_line('# a number')} copies implicitly between host and device" in _notes(caught)
    with (
        pytest.raises(RuntimeError) as caught,
        eqx.transfers("explicit"),
        eqx.transfers("explicit"),
    ):
        X * 2.0
    assert _notes(caught).count("copies implicitly between host and device") == 1


def test_explicit_allows_explicit_copies_and_numbers_of_a_program():
    with eqx.transfers("explicit"):
        output = double({"weight": jax.device_put(HOST)}, X)
        assert jax.device_get(output).tolist() == [1.0, 1.0, 1.0]
        # A number in a compiled function is a constant of its program.
        assert eqx.filter_jit(lambda x, rate: x * rate)(X, 0.5).tolist() == [0.5] * 3


def test_transparent_inside_explicit_allows_implicit_copies():
    with eqx.transfers("explicit"), eqx.transfers("transparent"):
        assert double({"weight": HOST}, X).tolist() == [1.0] * 3


def test_unknown_mode_is_refused_and_names_the_report_of_callbacks():
    message = r"'transparent' or 'explicit', got 'exclusive'\. .* `eqxlike\.graph\.report\("
    with pytest.raises(ValueError, match=message), eqx.transfers("exclusive"):
        pass
