"""What differs between the arguments of two traces, and what to do about it."""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

from ._outline import FROZEN, Outline


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


class ArrayForm(NamedTuple):
    """The form of an array: arrays of one form share a trace. The array itself is not kept.

    - `shape`: its shape; a size that is a symbol, in an export, is a text.
    - `dtype`: the name of its dtype, as in `"float32"`.
    - `weak_type`: whether it gives way to the dtype of others, as a Python number does.
    - `sharding`: how it is sharded over the axes of a mesh, as far as the trace depends on that;
      `"no mesh"` if it does not.
    - `text`: JAX's own text for the type. It has what else there may be, such as a memory space.
    """

    shape: tuple[int | str, ...]
    dtype: str
    weak_type: bool
    sharding: str
    text: str

    def __str__(self) -> str:
        on = "" if self.sharding == _NO_MESH else f" on {self.sharding}"
        weak = " (weak type)" if self.weak_type else ""
        return f"{self.dtype}[{','.join(map(str, self.shape))}]{weak}{on}"


Settings = tuple[tuple[str, str], ...]
"""Names and values of JAX's settings, as text: a value may be a device."""


class Arguments(NamedTuple):
    """What was known of the arguments of a call when it was traced.

    - `outline`: what is static in them.
    - `forms`: the forms of their arrays, in order.
    - `settings`: JAX's settings.
    """

    outline: Outline
    forms: tuple[ArrayForm, ...]
    settings: Settings

    def described(self) -> dict[str, str]:
        """A text for each array and each static value, by path."""
        found: dict[str, str] = {}
        stack = [("", (self.outline, self.forms))]
        while stack:
            path, (outline, forms) = stack.pop()
            if outline.kind == "node":
                rows = zip(outline.child_names(), outline.parts(forms), strict=True)
                stack += [(path + name, part) for name, part in rows][::-1]
            else:
                found[path] = str(forms[0]) if outline.kind == "array" else outline.text
        return found


def find_differences(before: Arguments, after: Arguments) -> Iterator[TraceDifference]:
    """What differs between two traces, settings first."""
    if before.settings is not after.settings:
        old = dict(before.settings)
        for name, value in after.settings:
            if old.get(name) != value:
                yield _difference(name, "setting", old.get(name), value)
    # The walk takes no Python stack: a tree may be as deep as `flatten` allows.
    stack = [("", (before.outline, before.forms), (after.outline, after.forms))]
    while stack:
        path, old, new = stack.pop()
        (first, forms), (second, other_forms) = old, new
        if first.kind == second.kind == "array":
            yield from _between_forms(path, forms[0], other_forms[0])
        elif first.kind == second.kind == "static":
            yield from _between_statics(path, first, second)
        elif not _are_alike(first, second):
            yield _between_types(path, old, new)
        else:
            parts, others = first.parts(forms), second.parts(other_forms)
            rows = zip(first.child_names(), parts, others, strict=False)
            if first.names != second.names:
                by_name = dict(zip(first.child_names(), parts, strict=True))
                others_by_name = dict(zip(second.child_names(), others, strict=True))
                names = {**by_name, **others_by_name}
                rows = [(name, by_name.get(name), others_by_name.get(name)) for name in names]
            below = []
            for name, part, other in rows:
                if part is None or other is None:
                    found = _describe(part), _describe(other)
                    yield _difference(path + name, "structure", *found)
                # Of a large tree, as a rule, all parts but a few are the same.
                elif part != other:
                    below.append((path + name, part, other))
            stack += reversed(below)


_Part = tuple[Outline, tuple[ArrayForm, ...]]
"""An outline, and the forms of the arrays in it."""


def _are_alike(first: Outline, second: Outline) -> bool:
    """Whether two nodes are of one type, and their children belong together by name."""
    if first.kind != second.kind or first.fingerprint != second.fingerprint:
        return False
    return not first.is_sequence or len(first.children) == len(second.children)


def _between_forms(path: str, before: ArrayForm, after: ArrayForm) -> Iterator[TraceDifference]:
    for field, old, new in zip(ArrayForm._fields, before[:-1], after[:-1], strict=False):
        if old != new:
            is_wide = field == "dtype" and not _WIDE.isdisjoint((old, new))
            what = field.replace("_", " ")
            yield _difference(path, what, old, new, advice="64 bits" if is_wide else what)
    if before[:-1] == after[:-1] and before.text != after.text:
        yield _difference(path, "type", before.text, after.text)


_WIDE = {"float64", "int64", "uint64", "complex128"}


def _between_statics(path: str, before: Outline, after: Outline) -> Iterator[TraceDifference]:
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


def _between_types(path: str, before: _Part, after: _Part) -> TraceDifference:
    first, second = before[0], after[0]
    other = _describe(after)
    advice = "structure"
    if first.kind != second.kind:
        advice = "structure" if "node" in (first.kind, second.kind) else "array"
    elif first.text == second.text:
        advice = "length"
        if first.fingerprint != second.fingerprint:
            advice, other = "class", f"another class {other}"
    elif first.text.partition(FROZEN)[0] == second.text.partition(FROZEN)[0]:
        advice = "frozen"
    return _difference(path, "structure", _describe(before), other, advice=advice)


def _describe(part: _Part | None) -> str:
    """A part in a message, where what it is compared with is something else."""
    if part is None:
        return "absent"
    outline, forms = part
    return f"the array {forms[0]}" if outline.kind == "array" else outline.describe()


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
        "`x.astype(jnp.float32)`."
    ),
    "64 bits": (
        "A dtype is part of a compiled function. NumPy has 64 bits where JAX has 32: give the "
        "dtype where the array is made, as in `np.zeros(3, np.float32)`, or cast it before."
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


_MAX_FORMS = 4096
_NO_MESH = "no mesh"


@functools.lru_cache(_MAX_FORMS)
def form_of_type(aval: Any) -> ArrayForm:
    """The form of the arrays of this type, which `jax.typeof` gives."""
    sharding = getattr(aval, "sharding", None)
    mesh, text = getattr(sharding, "mesh", None), _NO_MESH
    if mesh is not None and not mesh.empty:
        is_sharded = any(axis is not None for axis in sharding.spec)  # pyright: ignore
        text = f"{describe_mesh(mesh)}{f', {sharding.spec}' if is_sharded else ''}"  # pyright: ignore
    return ArrayForm(
        tuple(size if type(size) is int else str(size) for size in getattr(aval, "shape", ())),
        str(getattr(aval, "dtype", aval)),
        bool(getattr(aval, "weak_type", False)),
        text,
        str(aval),
    )


def describe_mesh(mesh: Any) -> str:
    """The names and sizes of its axes."""
    return f"mesh({', '.join(f'{name}={size}' for name, size in mesh.shape.items())})"
