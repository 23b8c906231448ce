"""Short runs of the scripts in `examples/` that compare several methods."""

import functools
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxlike import bayes
from tests import scripts


def load(name, module_name=None):
    return scripts.load(scripts.EXAMPLES / f"{name}.py", module_name)


@pytest.mark.parametrize(
    ("coverage", "nll", "status"),
    [(0.9, 0.07, 0), (0.84, 0.06, 1), (0.96, 0.06, 1), (0.9, 0.08, 1)],
)
def test_exit_status_tells_if_the_coverage_is_reached(coverage, nll, status, monkeypatch, capsys):
    monkeypatch.syspath_prepend(scripts.EXAMPLES)  # as Python does for a script
    script = load("bnn_coverage")
    diabetes = {name: {"coverage": 0.9} for name in ("plain", "ridge")}
    digits = {name: {"nll": 0.07} for name in ("plain", "logistic")}
    found = {
        "diabetes": diabetes | {"bayesian": {"coverage": coverage}},
        "digits": digits | {"bayesian": {"nll": nll}},
    }
    # Replaces the results of training.
    monkeypatch.setattr(script, "metrics", lambda name, seed, steps: found[name])
    assert script.main(["--seeds", "2"]) == status
    (mean,) = [line for line in capsys.readouterr().out.splitlines() if line.split()[0] == "mean"]
    numbers = [float(number) for number in re.findall(r"\d\.\d{4}", mean)]
    assert numbers == [coverage, 0.9, 0.9, nll, 0.07, 0.07]


def test_ranks_of_each_method_are_counted_in_ten_bins(monkeypatch, capsys):
    even = np.arange(100)
    ranks = np.stack([even, np.full(100, 99), even // 2], axis=1)
    monkeypatch.setattr(bayes, "simulation_ranks", lambda *args, **kwargs: ranks)
    load("simulation_based_calibration").main([])
    pattern = r"^(.{10})  (\w+) +\[([ \d]+)\]  p = (\S+)$"
    lines = re.findall(pattern, capsys.readouterr().out, re.MULTILINE)
    assert [(method.strip(), unknown) for method, unknown, _, _ in lines] == [
        (method, unknown)
        for method in ("NUTS", "Laplace", "mean field")
        for unknown in ("slope", "intercept", "noise")
    ]
    counts = [[*map(int, line[2].split())] for line in lines[:3]]
    assert counts == [[10] * 10, [0] * 9 + [100], [20] * 5 + [0] * 5]
    assert float(lines[0][3]) == 1
    assert float(lines[1][3]) < 1e-100


SAME = ("Python", "scan", "scan, unroll=4", "fori_loop", "while_loop", "eqxlike, checkpointed")


def test_loops_agree_and_only_a_python_loop_grows():
    script = load("loops", "loops_example")
    args = script.arguments_of(3)
    for names in ((*SAME, "scan in scan"), ("scan with cond", "scan with where")):
        first, *others = [script.loop(name, 4)(*args) for name in names]
        for other in others:
            np.testing.assert_allclose(other, first, rtol=1e-5)

    def count(name, turns):
        return script.count_operations(jax.make_jaxpr(script.loop(name, turns))(*args).jaxpr)

    assert count("Python", 8) == 2 * count("Python", 4) == 16
    for name in script.LOOPS:
        if name != "Python":
            assert count(name, 8) == count(name, 4)


@pytest.mark.usefixtures("promotion")
def test_classifiers_agree_and_reuse_their_buffers(monkeypatch, capsys):
    script = load("mlp_classifier")
    monkeypatch.setattr(script, "BATCH_SIZE", 16)
    monkeypatch.setattr(script, "load_digits", functools.cache(script.load_digits))
    assert script.main(["--epochs", "1", "--rounds", "2"]) == 0
    parts = capsys.readouterr().out.split("\n\n")
    rows = [[re.split(r"\s{2,}", line.strip()) for line in part.splitlines()] for part in parts]
    reached, modes, buffers = ({name: cells for name, *cells in part} for part in rows[:3])
    accuracy, loss, *_ = reached["eqxlike"]
    assert float(accuracy.removesuffix("%")) > 30
    assert reached["raw JAX"][:2] == [accuracy, loss]
    errors = {name: cells[0] for name, cells in modes.items() if name.endswith(")")}
    assert set(errors) == {"Checkpointed()", "Forward()", "FiniteDifference(order=4)"}
    assert all(float(error) < 1e-4 for error in errors.values())
    for name in ("step", "ad.value_and_grad_into"):
        size, aliased, deleted, in_place = buffers[name]
        assert size == aliased
        for found in (deleted, in_place):
            number, _, total = found.split()
            assert number == total


X = jnp.linspace(-3, 3, 7)


def test_foreign_functions_have_the_values_and_gradients_of_the_formula(monkeypatch, tmp_path):
    script, has_compiler = load("foreign_function"), shutil.which("c++")
    if has_compiler:
        quick = tmp_path / "compiler"
        quick.write_text(f'#!/bin/sh\nexec "{has_compiler}" "$@" -O0\n')
        quick.chmod(0o755)
        monkeypatch.setenv("CXX", str(quick))
    ways = script.ways(tmp_path)[0]
    numbers = np.asarray(X, np.float64)
    s = 1 / (1 + np.exp(-script.BETA * numbers))
    slope = s + script.BETA * numbers * s * (1 - s)
    for name in ("C++ by jax.ffi", "callback, NumPy", "callback, C++ by ctypes"):
        if name not in ways:
            assert has_compiler is None
            continue
        function = jax.jit(ways[name])
        np.testing.assert_allclose(function(X), numbers * s, rtol=1e-5)
        np.testing.assert_allclose(jax.vmap(jax.grad(function))(X), slope, rtol=1e-5, atol=1e-7)


def test_functions_without_a_compiler_are_left_out(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    found, left_out = load("foreign_function").ways(tmp_path)
    assert "callback, NumPy" in found
    message = "left out: C++ by jax.ffi, ctypes and cffi: there is no C++ compiler: install g++ or "
    assert left_out[0] == f"{message}clang++, or set CXX"


def test_plan_of_a_training_lists_memory_and_communication(capsys):
    load("plan_training").main(["--devices", "8", "--width", "128", "--depth", "2"])
    lines = [line.replace(",", "").split() for line in capsys.readouterr().out.splitlines()]
    sizes = {line[0]: [*map(int, line[1:3])] for line in lines if line and line[0] == "model"}
    weights, biases = 2 * 4 * 2 * 4 * 128 * 128, 2 * 4 * 5 * 128
    assert sizes["model"] == [weights + biases, weights // 8 + biases]
    assert {"all-gather", "all-reduce"} <= {line[0] for line in lines if line}
