"""What may move: hidden copies are refused, by path and line."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxlike as eqx

HOST = np.ones(3, np.float32)


@pytest.fixture
def x():
    return jnp.ones(3)


@pytest.fixture
def double():
    return eqx.filter_jit(lambda model, x: model["weight"] * x)


def _line(text):
    """The line of this file that ends so, as in an error."""
    lines = pathlib.Path(__file__).read_text().splitlines()
    return f"{__file__}:{next(at for at, line in enumerate(lines, 1) if line.endswith(text))}"


def _notes(caught):
    return "\n".join(caught.value.__notes__)


def test_explicit_names_path_and_line_of_an_array_of_numpy(double, x):
    double({"weight": x}, HOST)
    with (
        pytest.raises(RuntimeError, match="Disallowed host-to-device") as caught,
        eqx.transfers("explicit"),
    ):
        double({"weight": HOST}, x)  # an array
    notes = _notes(caught)
    assert "NumPy arrays, which each call copies to the device: model['weight']. Put" in notes
    assert f"{_line('# an array')} copies implicitly between host and device" in notes


def test_explicit_names_the_line_of_a_number(x):
    with (
        pytest.raises(RuntimeError, match="Disallowed host-to-device") as caught,
        eqx.transfers("explicit"),
    ):
        x * 2.0  # a number
    assert f"{_line('# a number')} copies implicitly between host and device" in _notes(caught)
    with (
        pytest.raises(RuntimeError) as caught,
        eqx.transfers("explicit"),
        eqx.transfers("explicit"),
    ):
        x * 2.0
    assert _notes(caught).count("copies implicitly between host and device") == 1


def test_explicit_takes_what_was_asked_for(double, x):
    with eqx.transfers("explicit"):
        output = double({"weight": jax.device_put(HOST)}, x)
        assert jax.device_get(output).tolist() == [1.0, 1.0, 1.0]
        # A number in a step is part of the program.
        assert eqx.filter_jit(lambda x, rate: x * rate)(x, 0.5).tolist() == [0.5] * 3


def test_transparent_lets_all_pass_within_another(double, x):
    with eqx.transfers("explicit"), eqx.transfers("transparent"):
        assert double({"weight": HOST}, x).tolist() == [1.0] * 3


def test_another_mode_is_refused_with_what_tells_of_callbacks():
    message = r"'transparent' or 'explicit', got 'exclusive'\. .* `eqxlike\.graph\.report\("
    with pytest.raises(ValueError, match=message), eqx.transfers("exclusive"):
        pass
