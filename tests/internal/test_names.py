"""What stands in `equinox.internal` stands here too, and is called in the same way."""

import inspect
import pathlib
import re
import types
from typing import Any

import equinox.internal

import eqxlike.internal

PLAIN = (bool, int, float, str, types.NoneType)

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


def _parameters(callable_: Any) -> list[tuple[Any, ...]] | None:
    """What a caller needs to know of each parameter; `None` of what is not called."""
    try:
        signature = inspect.signature(callable_)
    except (TypeError, ValueError):
        return None
    return [(each.name, each.kind, _default(each)) for each in signature.parameters.values()]


def _default(parameter: inspect.Parameter) -> Any:
    if parameter.default is parameter.empty or type(parameter.default) in PLAIN:
        return parameter.default
    return "some object"


def test_every_name_is_here():
    missing = [name for name in NAMES if not hasattr(eqxlike.internal, name)]
    assert missing == sorted(LEFT_OUT)


def test_difference_in_parameters_is_one():
    differ = [
        name
        for name in sorted(set(NAMES) - set(LEFT_OUT))
        if _parameters(getattr(eqxlike.internal, name))
        != _parameters(getattr(equinox.internal, name))
    ]
    assert differ == sorted(CALLED_DIFFERENTLY)


PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "internal.md").read_text()


def test_page_names_what_is_here():
    public = [name for name in dir(eqxlike.internal) if not name.startswith("_")]
    assert [name for name in [*public, *LEFT_OUT] if f"`{name}`" not in PAGE] == []


def test_page_names_tests_that_are_there():
    root = pathlib.Path(__file__).parents[2]
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
    missing = [
        (file, name) for file, name in named if f"def {name}(" not in (root / file).read_text()
    ]
    assert len(named) > 5
    assert missing == []
