"""`eqxlike.internal` has every name of `equinox.internal`, with the same parameters."""

import pathlib

import equinox.internal

import eqxlike.internal
from tests.test_equinox_names import parameters_of

# Maps a missing name to its replacement.
LEFT_OUT = {
    "maybe_set_p": "a buffer is written by primitives of JAX and a linear call",
    "noinline_p": "noinline is a jit",
    "to_onnx": "jax2onnx and jax2tf export programs of JAX",
}
CALLED_DIFFERENTLY = {
    "buffer_at_set": "its second parameter has the name that it has in NumPy, `index`",
    "filter_primitive_transpose": "`rule` is None by default, not an object of its own",
    "scan": "`kind` may be left out",
    "while_loop": "`kind` may be left out",
}

NAMES = [name for name in dir(equinox.internal) if not name.startswith("_")]


def test_only_the_listed_names_are_missing():
    missing = [name for name in NAMES if not hasattr(eqxlike.internal, name)]
    assert missing == sorted(LEFT_OUT)


def test_parameters_differ_only_as_listed():
    libraries = (eqxlike.internal, equinox.internal)
    for name in sorted(set(NAMES) - set(LEFT_OUT)):
        ours, theirs = (parameters_of(getattr(library, name)) for library in libraries)
        assert (ours != theirs) == (name in CALLED_DIFFERENTLY), name


PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "internal.md").read_text()


def test_page_names_every_public_name():
    public = [name for name in dir(eqxlike.internal) if not name.startswith("_")]
    assert [name for name in [*public, *LEFT_OUT] if f"`{name}`" not in PAGE] == []
