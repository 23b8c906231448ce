"""The script that compares a classifier with raw JAX and PyTorch, in a short form."""

import contextlib
import functools
import importlib.util
import io
import re

import jax
import pytest

from tests import scripts

PATH = scripts.EXAMPLES / "mlp_classifier.py"


@pytest.fixture(scope="module")
def script():
    return scripts.load(PATH)


@pytest.fixture(scope="module")
def tables(script):
    """The tables that the script prints: the cells of their rows, by name."""
    with (
        pytest.MonkeyPatch.context() as patch,
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        contextlib.redirect_stdout(io.StringIO()) as output,
    ):
        patch.setattr(script, "BATCH_SIZE", 16)
        patch.setattr(script, "load_digits", functools.cache(script.load_digits))
        assert script.main(["--epochs", "1", "--rounds", "2"]) == 0
    parts = output.getvalue().split("\n\n")
    rows = [[re.split(r"\s{2,}", line.strip()) for line in part.splitlines()] for part in parts]
    return [{name: cells for name, *cells in part} for part in rows]


def test_classifiers_reach_the_same(tables):
    accuracy, loss, *_ = tables[0]["eqxlike"]
    assert float(accuracy.removesuffix("%")) > 30
    assert tables[0]["raw JAX"][:2] == [accuracy, loss]


def test_layer_by_another_mode_has_the_same_gradient(tables):
    errors = {name: cells[0] for name, cells in tables[1].items() if name.endswith(")")}
    assert set(errors) == {"Checkpointed()", "Forward()", "FiniteDifference(order=4)"}
    assert all(float(error) < 1e-4 for error in errors.values())


@pytest.mark.parametrize("name", ["step", "ad.value_and_grad_into"])
def test_buffers_are_written_again(tables, name):
    size, aliased, deleted, in_place = tables[2][name]
    assert size == aliased
    for found in (deleted, in_place):
        number, _, total = found.split()
        assert number == total


def test_what_the_user_writes_is_under_forty_lines():
    begin, end = "from here ...\n", "# ... to here."
    code = PATH.read_text().split(begin)[1].split(end)[0]
    assert "class Classifier" in code
    assert "def train" in code
    assert len([line for line in code.splitlines() if line.strip()]) < 40


@pytest.mark.parametrize(
    ("package", "options", "extra"), [("torch", ["--pytorch"], "pytorch"), ("sklearn", [], "demo")]
)
def test_missing_package_is_one_line(script, monkeypatch, capsys, package, options, extra):
    found = importlib.util.find_spec

    def find_spec(name):
        return None if name == package else found(name)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    assert script.main(options) == 2
    message = f"{package} is not installed: pip install 'eqxlike[{extra}]'\n"
    assert capsys.readouterr().err.endswith(message)
