"""What stands in `equinox.internal` stands here too, and is called in the same way."""

import pathlib

import equinox.internal

import eqxlike.internal
from tests.test_equinox_names import parameters_of

# Each with what there is in its place.
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


def test_every_name_is_here():
    missing = [name for name in NAMES if not hasattr(eqxlike.internal, name)]
    assert missing == sorted(LEFT_OUT)


def test_difference_in_parameters_is_one():
    differ = [
        name
        for name in sorted(set(NAMES) - set(LEFT_OUT))
        if parameters_of(getattr(eqxlike.internal, name))
        != parameters_of(getattr(equinox.internal, name))
    ]
    assert differ == sorted(CALLED_DIFFERENTLY)


PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "internal.md").read_text()


def test_page_names_what_is_here():
    public = [name for name in dir(eqxlike.internal) if not name.startswith("_")]
    assert [name for name in [*public, *LEFT_OUT] if f"`{name}`" not in PAGE] == []
