"""What differs between the arguments of two traces, and what to do about it."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from ._outline import FROZEN, ArrayForm, Outline, Settings

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
        "How an array lies over a mesh is part of a compiled function. Place it the same way "
        "before each call, by `jax.device_put` or `eqxlike.filter_shard`."
    ),
    "type": "JAX tells these types of arrays apart. Pass the same one at each call.",
    "number": (
        "What is no array is static: each new number is compiled for. If the function only "
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
        "What is no array is static: each new value is compiled for. Pass the same few values, or "
        "an array where the function only computes with it."
    ),
    "field": (
        "A static field is part of a compiled function: each new value is compiled for. Leave it "
        "as it is, or, for a number, let the field hold an array and be no `static=True`."
    ),
    "array": (
        "An array is traced, and what is no array is static. Pass an array at each call, or at "
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
        forms = iter(self.forms)
        stack = [("", self.outline)]
        while stack:
            path, outline = stack.pop()
            if outline.kind == "array":
                found[path] = str(next(forms))
            elif outline.kind == "static":
                found[path] = outline.text
            else:
                pairs = zip(outline.child_names(), outline.children, strict=True)
                stack += [(path + name, child) for name, child in pairs][::-1]
        return found


def find_differences(before: Arguments, after: Arguments) -> Iterator[TraceDifference]:
    """What differs between two traces, settings first."""
    if before.settings is not after.settings:
        old = dict(before.settings)
        for name, value in after.settings:
            if old.get(name) != value:
                yield _difference(name, "setting", old.get(name), value)
    yield from _between_outlines(before, after)


def definition_difference(name: str) -> TraceDifference:
    """Says that the function is another one."""
    return _difference(
        name, "function", "a function", "another one, from the same lines", advice="definition"
    )


def _difference(
    path: str, what: str, before: Any, after: Any, *, advice: str | None = None
) -> TraceDifference:
    return TraceDifference(path, what, before, after, _ADVICE[advice or what])


def _between_outlines(before: Arguments, after: Arguments) -> Iterator[TraceDifference]:
    # Each entry has the place of the first array below it, in the forms of either trace.
    stack = [("", before.outline, 0, after.outline, 0)]
    while stack:
        path, first, start, second, other_start = stack.pop()
        if first.kind == second.kind == "array":
            yield from _between_forms(path, before.forms[start], after.forms[other_start])
        elif first.kind == second.kind == "static":
            yield from _between_statics(path, first, second)
        elif not _are_alike(first, second):
            texts = _describe(before, (first, start)), _describe(after, (second, other_start))
            yield _between_types(path, first, second, *texts)
        elif first.names == second.names:
            starts = _starts(first, start), _starts(second, other_start)
            rows = zip(first.children, starts[0], second.children, starts[1], strict=True)
            # Of a large tree, as a rule, all children but a few are equal.
            stack += [
                (path + first.child_name(index), child, at, other, other_at)
                for index, (child, at, other, other_at) in enumerate(rows)
                if child is not other
                or before.forms[at : at + child.num_arrays]
                != after.forms[other_at : other_at + child.num_arrays]
            ][::-1]
        else:
            starts = _starts(first, start), _starts(second, other_start)
            children = dict(_named_children(first, starts[0]))
            others = dict(_named_children(second, starts[1]))
            pairs = []
            for name in {**children, **others}:
                if name in children and name in others:
                    pairs.append((path + name, *children[name], *others[name]))
                else:
                    texts = (
                        _describe(before, children.get(name)),
                        _describe(after, others.get(name)),
                    )
                    yield _difference(path + name, "structure", *texts)
            stack += reversed(pairs)


def _are_alike(first: Outline, second: Outline) -> bool:
    """Whether two nodes are of one type, and their children belong together by name."""
    if first.kind != second.kind or first.fingerprint != second.fingerprint:
        return False
    return not first.is_sequence or len(first.children) == len(second.children)


def _starts(outline: Outline, start: int) -> Iterator[int]:
    for child in outline.children:
        yield start
        start += child.num_arrays


def _named_children(
    outline: Outline, starts: Iterable[int]
) -> Iterator[tuple[str, tuple[Outline, int]]]:
    for name, child, start in zip(outline.child_names(), outline.children, starts, strict=True):
        yield name, (child, start)


def _describe(arguments: Arguments, found: tuple[Outline, int] | None) -> str:
    """The outline whose first array has this place, beside something else."""
    if found is None:
        return "absent"
    outline, start = found
    is_array = outline.kind == "array"
    return f"the array {arguments.forms[start]}" if is_array else outline.describe()


_WIDE = {"float64", "int64", "uint64", "complex128"}

_PROPERTIES = {
    "shape": "shape",
    "dtype": "dtype",
    "weak type": "weak_type",
    "sharding": "sharding",
}
"""What may differ between two forms, and the fields that have it."""


def _between_forms(path: str, before: ArrayForm, after: ArrayForm) -> Iterator[TraceDifference]:
    for what, field in _PROPERTIES.items():
        old, new = getattr(before, field), getattr(after, field)
        if old != new:
            is_wide = what == "dtype" and not _WIDE.isdisjoint((old, new))
            yield _difference(path, what, old, new, advice="64 bits" if is_wide else what)
    if before[:-1] == after[:-1] and before.text != after.text:
        yield _difference(path, "type", before.text, after.text)


def _between_statics(path: str, before: Outline, after: Outline) -> Iterator[TraceDifference]:
    if before.fingerprint == after.fingerprint:
        return
    if before.children and before.names == after.names:
        pairs = list(zip(before.child_names(), before.children, after.children, strict=False))
        found = [
            each
            for name, child, other in pairs
            for each in _between_statics(path + name, child, other)
        ]
        if found and len(before.children) == len(after.children):
            yield from found
            return
    is_shown_alike = after.text == before.text
    other = after.text
    if is_shown_alike:
        other = f"another {other.removeprefix('a ').removeprefix('the ')}"
    advice = after.advice if after.advice == before.advice else "value"
    if advice == "function" and not is_shown_alike:
        advice = "value"  # It is not the same one, defined again and again.
    yield _difference(path, "static value", before.text, other, advice=advice)


def _unfrozen(outline: Outline) -> str:
    """The name of the type of a node, whatever is frozen in it."""
    return outline.text.partition(FROZEN)[0]


def _between_types(
    path: str, first: Outline, second: Outline, before: str, after: str
) -> TraceDifference:
    advice = "structure"
    if {first.kind, second.kind} == {"array", "static"}:
        advice = "array"
    elif first.kind == second.kind and first.text == second.text:
        advice = "length"
        if first.fingerprint != second.fingerprint:
            advice, after = "class", f"another class {after}"
    elif first.kind == second.kind == "node" and _unfrozen(first) == _unfrozen(second):
        advice = "frozen"
    return _difference(path, "structure", before, after, advice=advice)
