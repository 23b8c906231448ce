"""The differences between two traces, advice on how to avoid them, and texts of static values."""

import contextlib
import functools
import os
import types
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import jax

from ..._partition import PLAIN_TYPES, ArrayForm, Node, StaticKey, Tree, differing, identity_of
from ..._pytree import elements, is_array


class TraceDifference(NamedTuple):
    """One thing that differs between two traces.

    - `path`: the name of the argument and the path in it, such as `"model.layers[0].weight"`; or
      the name of a setting of JAX.
    - `what`: what differs. For an array, `"shape"`, `"dtype"`, `"weak type"`, `"sharding"` or
      `"type"`. Otherwise `"static value"`, `"structure"` or `"setting"`; or `"function"` if the two
      traces have different functions that are defined at the same lines.
    - `before`, `after`: the old and the new value. A shape is a tuple, a weak type is a boolean,
      and any other value is a string.
    - `advice`: how to avoid the difference, in a sentence or two.
    """

    path: str
    what: str
    before: Any
    after: Any
    advice: str

    def __str__(self) -> str:
        if self.what == "setting":
            return f"JAX's setting {self.path}: {self.before} -> {self.after}"
        what = "" if self.what in ("structure", "function") else f"{self.what} "
        return f"{self.path}: {what}{self.before} -> {self.after}"


Settings = tuple[tuple[str, str], ...]
"""Names and values of JAX's settings. All values are text, because a value may be any object."""


class Arguments(NamedTuple):
    """A description of the arguments of a traced call, and of JAX's settings."""

    tree: Tree
    settings: Settings


def find_differences(before: Arguments, after: Arguments) -> Iterator[TraceDifference]:
    """Finds the differences between two traces. Differences of settings come first."""
    if before.settings is not after.settings:
        old = dict(before.settings)
        for name, value in after.settings:
            if old.get(name) != value:
                yield _difference(name, "setting", old.get(name), value)
    for path, old, new in differing(before.tree, after.tree):
        if old is None or new is None:
            yield _difference(path, "structure", _describe(old), _describe(new))
        elif old.node.kind == new.node.kind == "array":
            yield from _between_arrays(path, old.arrays[0], new.arrays[0])
        elif old.node.is_static and new.node.is_static:
            yield from _between_statics(path, old.node, new.node)
        else:
            yield _between_types(path, old, new)


def _between_arrays(path: str, before: ArrayForm, after: ArrayForm) -> Iterator[TraceDifference]:
    for what, old, new in zip(_PARTS_OF_TYPE, before[:-1], after[:-1], strict=True):
        if old != new:
            yield _difference(path, what, old, new)
    if before[:-1] == after[:-1] and before.text != after.text:
        yield _difference(path, "type", before.text, after.text)


_PARTS_OF_TYPE = ("shape", "dtype", "weak type", "sharding")


def _between_statics(path: str, before: Node, after: Node) -> Iterator[TraceDifference]:
    if before.fingerprint == after.fingerprint:
        return
    if before.names == after.names and len(before.children) == len(after.children):
        rows = zip(before.child_names(), before.children, after.children, strict=True)
        found = [each for name, *two in rows for each in _between_statics(path + name, *two)]
        if found:
            yield from found
            return
    text, advice = after.text, after.advice if after.advice == before.advice else "value"
    if text == before.text:
        text = f"another {text.removeprefix('a ').removeprefix('the ')}"
    elif advice == "function":
        advice = "value"  # These are two different functions.
    yield _difference(path, "static value", before.text, text, advice=advice)


def _between_types(path: str, before: Tree, after: Tree) -> TraceDifference:
    first, second = before.node, after.node
    texts, advice = [_describe(before), _describe(after)], "structure"
    if not first.is_node and not second.is_node:
        advice = "array"
    elif first.fingerprint == second.fingerprint:
        advice = "length"
    elif first.text == second.text and first.kind == second.kind:
        advice = "class" if first.frozen == second.frozen else "frozen"
        texts[1] = f"another class {texts[1]}" if advice == "class" else texts[1]
    return _difference(path, "structure", *texts, advice=advice)


def _describe(tree: Tree | None) -> str:
    """Describes a part of the arguments that is of different kinds in the two traces."""
    if tree is None:
        return "absent"
    node = tree.node
    if node.kind == "array":
        return f"the array {tree.arrays[0]}"
    if node.is_static:
        return "None" if node.text == "None" else f"the static value {node.text}"
    if node.names is None:
        return f"a {node.text} of length {len(node.children)}"
    return f"{node.text} with frozen {', '.join(node.frozen)}" if node.frozen else node.text


def another_function(name: str) -> TraceDifference:
    """The difference between two functions defined at the same lines."""
    after = "another function from the same lines"
    return _difference(name, "function", "a function", after, advice="definition")


def _difference(
    path: str, what: str, before: Any, after: Any, *, advice: str | None = None
) -> TraceDifference:
    return TraceDifference(path, what, before, after, _ADVICE[advice or what])


_ADVICE = {
    "shape": (
        "A function is compiled for each shape. Pass the same shapes in each call: drop the last "
        "batch if it is smaller, or pad it."
    ),
    "dtype": (
        "A function is compiled for each dtype. Cast the array before the call, as in "
        "`x.astype(jnp.float32)`. NumPy uses 64 bits where JAX uses 32."
    ),
    "weak type": (
        "An array made only of Python numbers has a weak type. Give it a dtype, as in "
        "`jnp.asarray(0.1, dtype=jnp.float32)`."
    ),
    "sharding": (
        "A function is compiled for each sharding. Shard the array in the same way before each "
        "call, with `jax.device_put` or `eqxlike.filter_shard`."
    ),
    "type": "A function is compiled for each type of array. Pass the same type in each call.",
    "number": (
        "A Python number is static: the function is compiled for each new number. If it only "
        "computes with the number, pass an array: `jnp.asarray(0.1, dtype=jnp.float32)`."
    ),
    "function": (
        "Functions are compared by identity: a function argument that is defined again for each "
        "call causes a compilation in each call. Define it once, outside of the loop."
    ),
    "object": (
        "This object is compared by identity. Pass the same object in each call, or give its class "
        "`__eq__` and `__hash__`, as `@dataclasses.dataclass(frozen=True)` does; if it holds "
        "arrays, make it an `eqxlike.Module`."
    ),
    "value": (
        "Everything that is not an array is static: the function is compiled for each new value. "
        "Pass the same few values, or an array if the function only computes with the value."
    ),
    "field": (
        "A function is compiled for each new value of a static field. Keep the value, or, if it is "
        "a number, store an array in a field without `static=True`."
    ),
    "array": (
        "Arrays are traced, and everything else is static. Pass an array in each call, or in none: "
        "`jnp.asarray(0.1, dtype=jnp.float32)` makes an array of a number."
    ),
    "length": (
        "A function is compiled for each number of elements. Keep the length, or stack the "
        "elements in one array."
    ),
    "structure": (
        "A function is compiled for each structure of its arguments. Pass the same types with the "
        "same keys in each call, and an array of zeros instead of a missing array."
    ),
    "frozen": (
        "A function is compiled for each set of frozen arrays. Freeze them before the loop, and "
        "pass a model with the same arrays frozen in each call."
    ),
    "class": (
        "Classes are compared by identity. Define the class once: running its definition again "
        "makes another class."
    ),
    "setting": (
        "A function is compiled for each combination of JAX's settings. Set them once, at the "
        "start of the program, or always call the function with the same settings."
    ),
    "definition": (
        "Each function is compiled separately. Define and wrap it once, outside of the loop or the "
        "function that calls it."
    ),
}


# --- The types of arrays ---


@functools.lru_cache(4096)
def form_of_type(aval: Any) -> ArrayForm:
    """The `ArrayForm` of arrays of type `aval`, which is a type that `jax.typeof` returns."""
    sharding: Any = getattr(aval, "sharding", None)
    mesh, text = getattr(sharding, "mesh", None), "no mesh"
    if mesh is not None and not mesh.empty:
        is_sharded = any(axis is not None for axis in sharding.spec)
        text = f"{describe_mesh(mesh)}{f', {sharding.spec}' if is_sharded else ''}"
    is_weak = bool(getattr(aval, "weak_type", False))
    return ArrayForm.of(aval)._replace(weak_type=is_weak, sharding=text, text=str(aval))


def describe_mesh(mesh: Any) -> str:
    """The names and sizes of the axes of a mesh."""
    return f"mesh({', '.join(f'{name}={size}' for name, size in mesh.shape.items())})"


# --- Static values, with fingerprints that differ for different values ---


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
        text = _static_text(value)
    except Exception:
        return f"<{type(value).__name__}>"
    return text if len(text) <= _MAX_CHARACTERS else text[:_MAX_CHARACTERS] + "..."


def _static_text(value: Any) -> str:
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
