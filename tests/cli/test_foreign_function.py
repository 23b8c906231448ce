"""The script that calls C++, Numba and NumPy from JAX, in a short form."""

import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import scripts

PATH = scripts.EXAMPLES / "foreign_function.py"


@pytest.fixture(scope="module")
def script():
    return scripts.load(PATH)


@pytest.fixture(scope="module")
def ways(script, tmp_path_factory):
    """The function in each way that there is here, compiled fast."""
    folder = tmp_path_factory.mktemp("built")
    with pytest.MonkeyPatch.context() as patch:
        if compiler := shutil.which("c++"):
            quick = folder / "compiler"
            quick.write_text(f'#!/bin/sh\nexec "{compiler}" "$@" -O0\n')
            quick.chmod(0o755)
            patch.setenv("CXX", str(quick))
        return script.ways(folder)[0]


X = jnp.linspace(-3, 3, 7)


@pytest.mark.parametrize("name", ["C++ by jax.ffi", "callback, NumPy", "callback, C++ by ctypes"])
def test_values_gradients_and_batches_are_those_of_the_formula(ways, script, name):
    if name not in ways:
        assert shutil.which("c++") is None
        return
    numbers = np.asarray(X, np.float64)
    s = 1 / (1 + np.exp(-script.BETA * numbers))
    slope = s + script.BETA * numbers * s * (1 - s)
    function = jax.jit(ways[name])
    np.testing.assert_allclose(function(X), numbers * s, rtol=1e-5)
    np.testing.assert_allclose(jax.vmap(jax.grad(function))(X), slope, rtol=1e-5, atol=1e-7)


def test_kernel_is_one_operation_of_the_program(ways):
    if "C++ by jax.ffi" in ways:
        program = jax.jit(jax.vmap(ways["C++ by jax.ffi"])).lower(jnp.ones((2, 3))).as_text()
        assert len(re.findall("stablehlo.custom_call", program)) == 1


def test_missing_compiler_is_one_line_and_the_rest_goes_on(script, monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    found, left_out = script.ways(tmp_path)
    assert "callback, NumPy" in found
    assert left_out[0] == (
        "left out: C++ by jax.ffi, ctypes and cffi: there is no C++ compiler: install g++ or "
        "clang++, or set CXX"
    )


def test_kernel_is_for_the_cpu(script, monkeypatch, capsys):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert script.main([]) == 2
    assert capsys.readouterr().err == "The kernel is for the CPU: set JAX_PLATFORMS=cpu\n"
