"""Describes static values in text, with fingerprints that differ for different values."""

import contextlib
import functools
import os
import types
from collections.abc import Hashable
from typing import Any

import jax

from ...._partition import PLAIN_TYPES, Node, StaticKey, identity_of
from ...._pytree import elements, is_array

_MAX_ELEMENTS = 64
"""If a static container has more elements than this, they are not described. Each level of nesting
divides this limit by four.
"""

_MAX_DEPTH = 3
"""At this depth of nesting, the elements of a static container are not described."""


def describe_static(
    value: Any, static: StaticKey | None = None, *, of_node: bool = False, depth: int = 0
) -> Node:
    """Describes a static value, and its elements if it is a small container.

    **Arguments:**

    - `static`: the key of the value, if it is known.
    - `of_node`: whether the value is in the static part of a node. Such a value need not be
      hashable.
    - `depth`: the number of containers around the value.
    """
    kind = "field" if of_node else "static"
    is_number = type(value) in (int, float, complex) and depth == 0
    advice = "field" if of_node else "number" if is_number else "value"
    if type(value) in PLAIN_TYPES:
        # There may be thousands of these values, so this branch must be fast. Hash the text of the
        # value, because -1 and -2 have equal hashes, and 0.0 and -0.0 have equal hashes.
        text = repr(value)
        fingerprint = type(value).__name__, hash(text)
        text = text if len(text) <= _MAX_CHARACTERS else text_of_static(value)
        return Node(kind, text, fingerprint=fingerprint, advice=advice)
    if is_array(value):
        text = f"an array {jax.typeof(value)}"
        return Node(kind, text, fingerprint=identity_of(value), advice="object")
    try:
        static = StaticKey(value, of_node=of_node or depth > 0) if static is None else static
        fingerprint = (_hash_of(static.key), *map(identity_of, static.held))
    except Exception:
        static, fingerprint = None, identity_of(value)
    if _function_of(value) is not None:
        advice = "function"
    elif isinstance(value, type):
        advice = "class"
    elif static is None or static.held:
        advice = "object"
    names, parts = (), ()
    with contextlib.suppress(Exception):  # Reading an attribute may run any code.
        found = elements(value)
        if depth < _MAX_DEPTH and len(found[1]) <= _MAX_ELEMENTS >> 2 * depth:
            names, parts = found
    return Node(
        kind,
        text_of_static(value),
        names,
        tuple(describe_static(part, of_node=of_node, depth=depth + 1) for part in parts),
        fingerprint=(type(value).__name__, fingerprint),
        advice=advice,
    )


def _hash_of(key: Hashable) -> int:
    """The hash of the key of a static value. Python's own hash is equal for -1 and -2."""
    if isinstance(key, tuple | frozenset):
        return hash(type(key)(map(_hash_of, key)))
    return hash(repr(key) if type(key) in (int, float, complex) else key)


# --- Short texts for static values, functions, and places in files ---


_MAX_CHARACTERS = 200
"""At most this many characters of the text of a value are kept."""

_MAX_WRAPPERS = 8
"""At most this many wrappers around a function are removed. For example, `jax.nn.relu` has two."""


def text_of_static(value: Any) -> str:
    """A short text for a static value. Never raises, even if the `__repr__` of the value does."""
    try:
        text = _describe(value)
    except Exception:
        return f"<{type(value).__name__}>"
    return text if len(text) <= _MAX_CHARACTERS else text[:_MAX_CHARACTERS] + "..."


def _describe(value: Any) -> str:
    if (function := _function_of(value)) is not None:
        code = function.__code__
        name = function.__qualname__.rpartition("<locals>.")[2]
        if "site-packages" in code.co_filename:
            return f"{name} ({function.__module__.partition('.')[0]})"
        return f"{name} ({show_place(code.co_filename, code.co_firstlineno)})"
    if isinstance(value, type):
        return value.__qualname__
    if isinstance(value, functools.partial):
        return f"a partial of {text_of_static(value.func)}"
    # `repr` would print the arrays, so it would wait until the arrays are computed.
    attributes = getattr(value, "__dict__", None)
    if type(attributes) is dict and any(map(is_array, attributes.values())):
        return f"a {type(value).__name__}"
    return repr(value)


def _function_of(value: Any) -> types.FunctionType | None:
    """The Python function that `value` is, or wraps (as `jax.jit` does); otherwise `None`."""
    with contextlib.suppress(Exception):
        for _ in range(_MAX_WRAPPERS):
            if isinstance(value, types.MethodType):
                value = value.__func__
            if isinstance(value, types.FunctionType):
                return value
            value = None if isinstance(value, type) else getattr(value, "__wrapped__", None)
    return None


def show_place(file: str, line: int) -> str:
    """`file:line`, relative to the current directory if the file is below it."""
    return f"{file.removeprefix(os.path.join(os.getcwd(), ''))}:{line}"
