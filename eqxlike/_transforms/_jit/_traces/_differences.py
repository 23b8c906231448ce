"""What differs between the arguments of two traces, and what to do about it."""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

from ...._partition import ArrayForm, Node, Tree, differing


class TraceDifference(NamedTuple):
    """One thing that differs between two traces.

    - `path`: where, by the name of the argument and the path in it: `"model.layers[0].weight"`;
      the name of the setting, if it is one of JAX's.
    - `what`: `"shape"`, `"dtype"`, `"weak type"`, `"sharding"` or `"type"` of an array, `"static
      value"`, `"structure"`, `"setting"`, or `"function"` for another function from the same lines.
    - `before`, `after`: what it was and what it is: a tuple for a shape, a boolean for a weak type,
      else a text.
    - `advice`: what to do about it, a sentence or two.
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
"""Names and values of JAX's settings, as text: a value may be a device."""


class Arguments(NamedTuple):
    """What was known of the arguments of a call when it was traced, and JAX's settings."""

    tree: Tree
    settings: Settings


def find_differences(before: Arguments, after: Arguments) -> Iterator[TraceDifference]:
    """What differs between two traces, settings first."""
    if before.settings is not after.settings:
        old = dict(before.settings)
        for name, value in after.settings:
            if old.get(name) != value:
                yield _difference(name, "setting", old.get(name), value)
    for path, old, new in differing(before.tree, after.tree):
        if old is None or new is None:
            yield _difference(path, "structure", _describe(old), _describe(new))
        elif old.node.kind == new.node.kind == "array":
            yield from _between_forms(path, old.arrays[0], new.arrays[0])
        elif old.node.is_static and new.node.is_static:
            yield from _between_statics(path, old.node, new.node)
        else:
            yield _between_types(path, old, new)


def _between_forms(path: str, before: ArrayForm, after: ArrayForm) -> Iterator[TraceDifference]:
    for what, old, new in zip(_PARTS_OF_FORM, before[:-1], after[:-1], strict=True):
        if old != new:
            yield _difference(path, what, old, new)
    if before[:-1] == after[:-1] and before.text != after.text:
        yield _difference(path, "type", before.text, after.text)


_PARTS_OF_FORM = ("shape", "dtype", "weak type", "sharding")


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
        advice = "value"  # It is not the same one, defined again and again.
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
    """A part in a message, where what it is compared with is something else."""
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
    """The difference of a function from another one from the same lines."""
    after = "another one, from the same lines"
    return _difference(name, "function", "a function", after, advice="definition")


def _difference(
    path: str, what: str, before: Any, after: Any, *, advice: str | None = None
) -> TraceDifference:
    return TraceDifference(path, what, before, after, _ADVICE[advice or what])


_ADVICE = {
    "shape": (
        "A shape is part of a compiled function. Keep shapes as they are from call to call: drop "
        "the last batch if it is smaller, or pad it."
    ),
    "dtype": (
        "A dtype is part of a compiled function. Cast the array before the call, as in "
        "`x.astype(jnp.float32)`. NumPy has 64 bits where JAX has 32."
    ),
    "weak type": (
        "An array is of weak type if it was made of Python numbers alone. Give it a dtype, as in "
        "`jnp.asarray(0.1, dtype=jnp.float32)`."
    ),
    "sharding": (
        "How an array is sharded over a mesh is part of a compiled function. Place it the same way "
        "before each call, by `jax.device_put` or `eqxlike.filter_shard`."
    ),
    "type": "JAX tells these types of arrays apart. Pass the same one at each call.",
    "number": (
        "What is not an array is static: each new number is compiled for. If the function only "
        "computes with it, pass an array, as in `jnp.asarray(0.1, dtype=jnp.float32)`."
    ),
    "function": (
        "A function is compared by identity: one that is defined again at each call is compiled "
        "for at each call. Define it once, outside of the loop."
    ),
    "object": (
        "This object is compared by identity. Pass the same one at each call, or give its class "
        "`__eq__` and `__hash__`, as `@dataclasses.dataclass(frozen=True)` does; if it holds "
        "arrays, make it an `eqxlike.Module`."
    ),
    "value": (
        "What is not an array is static: each new value is compiled for. Pass the same few values, "
        "or an array where the function only computes with it."
    ),
    "field": (
        "A static field is part of a compiled function: each new value is compiled for. Leave it "
        "as it is, or, for a number, let the field hold an array, without `static=True`."
    ),
    "array": (
        "An array is traced, and what is not an array is static. Pass an array at each call, or at "
        "none: `jnp.asarray(0.1, dtype=jnp.float32)` makes one of a number."
    ),
    "length": (
        "How many elements there are is part of a compiled function. Keep the length, or stack the "
        "elements in one array."
    ),
    "structure": (
        "The structure of the arguments is part of a compiled function. Pass the same types with "
        "the same keys at each call, and an array of zeros where there is nothing to pass."
    ),
    "frozen": (
        "What is frozen is part of a compiled function. Freeze it before the loop, and pass a "
        "model with the same arrays frozen at each call."
    ),
    "class": (
        "Classes are compared by identity. Define the class once: running its definition again "
        "makes another one."
    ),
    "setting": (
        "Settings of JAX are part of a compiled function. Choose them once, at the start of the "
        "program, or always call the function under the same ones."
    ),
    "definition": (
        "Each function is compiled by itself. Define and wrap it once, outside of the loop or the "
        "function that calls it."
    ),
}


# --- What JAX knows of an array when it traces ---


@functools.lru_cache(4096)
def form_of_type(aval: Any) -> ArrayForm:
    """The form of the arrays of this type, which `jax.typeof` gives."""
    sharding: Any = getattr(aval, "sharding", None)
    mesh, text = getattr(sharding, "mesh", None), "no mesh"
    if mesh is not None and not mesh.empty:
        is_sharded = any(axis is not None for axis in sharding.spec)
        text = f"{describe_mesh(mesh)}{f', {sharding.spec}' if is_sharded else ''}"
    is_weak = bool(getattr(aval, "weak_type", False))
    return ArrayForm.of(aval)._replace(weak_type=is_weak, sharding=text, text=str(aval))


def describe_mesh(mesh: Any) -> str:
    """The names and sizes of its axes."""
    return f"mesh({', '.join(f'{name}={size}' for name, size in mesh.shape.items())})"
