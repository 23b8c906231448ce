"""Wrong use ends in one line on standard error and status 2."""

import importlib.util
import types

import jax
import pytest

from eqxlike import __version__
from eqxlike._cli import main


@pytest.fixture
def one_line_error(capsys):
    """Runs the command line, which must refuse; returns the one line that it says."""

    def run(*arguments):
        assert main(arguments) == 2
        err = capsys.readouterr().err
        assert "\n" not in err.removesuffix("\n")
        assert err.endswith("\n")
        return err

    return run


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--data", "iris"], "argument --data: invalid choice: 'iris'"),
        (["--steps", "0"], "argument --steps: must be an integer of at least 1, got '0'"),
        (["--seed", "-1"], "argument --seed: must be an integer of at least 0 and at most 2147"),
        (["--seed", "2147483648"], "argument --seed: must be an integer of at least 0"),
        (["--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
    ],
)
def test_wrong_argument(one_line_error, arguments, said):
    assert said in one_line_error("demo", *arguments)


def test_out_that_lies_in_a_file(one_line_error, tmp_path):
    (tmp_path / "file").write_text("in the way")
    out = tmp_path / "file" / "results"
    assert f"argument --out: cannot write to '{out}'" in one_line_error("demo", "--out", str(out))


def test_missing_extra_names_what_to_install(one_line_error, tmp_path, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "sklearn" else find_spec(name)
    )
    said = one_line_error("demo", "--out", str(tmp_path / "results"))
    assert said.endswith("the demo needs scikit-learn: pip install 'eqxlike[demo]'\n")


def test_device_that_is_not_there(one_line_error, tmp_path, monkeypatch):
    device = types.SimpleNamespace(platform="cpu", device_kind="cpu")
    monkeypatch.setattr(jax, "devices", lambda: [device])
    said = one_line_error("demo", "--device", "gpu", "--out", str(tmp_path))
    assert "argument --device: JAX runs on cpu here, not on gpu" in said


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"
