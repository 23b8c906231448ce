"""Files of exported programs: errors for damaged and for too new files name the file."""

import hashlib
import json
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import eqxlike as eqx


def _linear(x):
    return 2 * x + 1


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    path = tmp_path_factory.mktemp("exported") / "linear"
    eqx.export(_linear, jnp.ones(3)).save(path)
    return path.read_bytes()


@pytest.fixture
def saved(tmp_path, content):
    """Saves the program of `_linear`, and returns the path."""
    path = tmp_path / "linear"
    path.write_bytes(content)
    return path


def test_file_cut_short_anywhere_is_refused(saved):
    content = saved.read_bytes()
    for size in (0, 5, 16, 40, 70, 300, len(content) - 1):
        saved.write_bytes(content[:size])
        with pytest.raises(ValueError, match=r"is cut off|is not an exported program") as caught:
            eqx.load_exported(saved)
        assert str(saved) in str(caught.value)
    np.save(saved.with_suffix(".npy"), np.ones(3))
    with pytest.raises(ValueError, match=r"linear\.npy is not an exported program"):
        eqx.load_exported(saved.with_suffix(".npy"))


def test_flipped_bit_anywhere_is_refused(saved):
    content = saved.read_bytes()
    for place in [*range(72), *range(72, len(content), 97), len(content) - 1]:
        saved.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(ValueError, match=r"is damaged|is cut off|is not an exported program"):
            eqx.load_exported(saved)


def _rewritten(content: bytes, version: int = 1, **changes: Any) -> bytes:
    """The content of a valid file with a changed format or changed entries in its header."""
    _, header, program = content.split(b"\n", 2)
    header = json.loads(header) | {"format": version, **changes}
    rest = json.dumps(header).encode() + b"\n" + program
    return b"eqxlike.export " + hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest


def test_newer_format_and_newer_jax_are_refused_by_name(saved, content):
    saved.write_bytes(_rewritten(content, version=2))
    with pytest.raises(ValueError, match="newer version of eqxlike, in format 2; this one reads"):
        eqx.load_exported(saved)
    changes = {"calling_convention_version": 99, "versions": {"jax": "9.9"}}
    saved.write_bytes(_rewritten(content, **changes))
    with pytest.raises(ValueError, match=r"by jax 9\.9, with calling convention 99; jax .* reads"):
        eqx.load_exported(saved)


def test_unknown_operation_of_a_newer_jax_is_refused_by_name(saved, monkeypatch):
    saved.write_bytes(_rewritten(saved.read_bytes(), versions={"jax": "99.0"}))

    def unknown(self):
        raise jax.errors.JaxRuntimeError("Failed to deserialize StableHLO\nand more")

    monkeypatch.setattr(jax.export.Exported, "mlir_module", unknown)
    message = r"by jax 99\.0, and jax .* cannot read it \(Failed"
    with pytest.raises(ValueError, match=message) as caught:
        eqx.load_exported(saved)
    assert "\n" not in str(caught.value)


def _of(node, *arrays):
    return {"node": node, "arrays": arrays}


def _node(kind, names, *children, value=()):
    return [kind, "", names, children, value]


ARRAY, EMPTY = ["array", "", [], [], []], _node("tuple", None)


def test_header_that_describes_no_program_or_another_one_is_refused(saved, content):
    for changes in [
        {"inputs": _of(["pickle", "", [], [], []])},
        {"inputs": None},
        {"inputs": _of(ARRAY)},
        {"inputs": _of(_node("record", ["x"], ARRAY), [[], "float32"], [[], "float32"])},
        {"inputs": _of(_node("record", ["x"], ARRAY), [[], 32])},
        {"inputs": _of(_node("record", ["x", "x"], EMPTY, EMPTY))},
        {"inputs": _of(_node("record", ["x"], EMPTY, EMPTY))},
        {"platforms": 3},
        {"vjp_order": "once"},
        {"vjp_order": float("inf")},
        {"versions": ["jax"]},
        {"more": 1},
        {"format": "1"},
        {"name": None},
        {"name": "a\0b"},
        {"name": "\ud800"},
        {"outputs": _of(["dict", "", ["[[]]"], [EMPTY], []])},
        {"outputs": _of(["namedtuple", "", [], [], []])},
        {"outputs": _of(["static", "<sin>", [], [], []])},
    ]:
        saved.write_bytes(_rewritten(content, **changes))
        with pytest.raises(ValueError, match="its header does not describe a program"):
            eqx.load_exported(saved)
    for dtype in ("int32", "nope", ""):
        saved.write_bytes(_rewritten(content, outputs=_of(ARRAY, [[], dtype])))
        with pytest.raises(ValueError, match="damaged: its header describes another program"):
            eqx.load_exported(saved)


def test_failed_save_leaves_the_old_file(saved, monkeypatch):
    before = saved.read_bytes()
    monkeypatch.setattr("os.replace", lambda *paths: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        eqx.export(_linear, jnp.ones(3)).save(saved)
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]
    with pytest.raises(FileNotFoundError, match="missing/program"):
        eqx.export(_linear, jnp.ones(3)).save(saved.parent / "missing" / "program")
