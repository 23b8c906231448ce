"""The form of a pytree, as plain data: the inputs and outputs of a program, described without
classes.

A form describes where the arrays are, their shapes and dtypes, and the nodes around them. It knows
tuples, lists, dictionaries, `None` and named tuples; any other node, such as a Module, is a record
of named children. So it can be read by a process that cannot import the class.
"""

import collections
import dataclasses
import functools
import hashlib
import inspect
import re
import sys
from collections.abc import Iterator
from typing import Any, Literal

import jax
import jax.tree_util as jtu
import numpy as np

from .._dtypes import is_key
from .._module import Module
from .._pytree import children_with_keys, is_array, is_frozen
from .._transforms import is_array_or_struct

Kind = Literal["none", "tuple", "list", "dict", "namedtuple", "record"]


@dataclasses.dataclass(frozen=True)
class ArrayForm:
    """An array.

    - `shape`: sizes, and expressions such as `batch` or `2*batch`.
    - `dtype`: as in `float32` or `key<fry>`.
    """

    shape: tuple[int | str, ...]
    dtype: str


@dataclasses.dataclass(frozen=True)
class StaticForm:
    """A leaf that is not an array: part of the program.

    - `value`: the value, if it `is_plain`: a bool, a number or a string.
    - `text`: what else identifies it: the name of a function, the `repr` of an object.
    """

    value: bool | int | float | str | None
    text: str
    is_plain: bool


@dataclasses.dataclass(frozen=True)
class NodeForm:
    """A node.

    - `name`: the name of its class, for a named tuple or a record.
    - `keys`: those of a dictionary; the names of the children of a named tuple or a record.
    - `statics`: name and text of each static part of a record.
    """

    kind: Kind
    name: str
    keys: tuple[Any, ...]
    children: tuple["Form", ...]
    statics: tuple[tuple[str, str], ...] = ()


Form = ArrayForm | StaticForm | NodeForm

_KEYS = (str, int, float, bool)
"""The types of dictionary keys that a file can hold."""

_MAX_TEXT = 100
"""Of a longer text of a static leaf only so much is kept, and a digest."""

_MAX_SHOWN = 4
"""A Module of more arrays is shown only by their number."""


def form_of(tree: Any, path: str, array_forms: Iterator[ArrayForm]) -> Form:
    """The form of a tree.

    **Arguments:**

    - `path`: the name of the tree, such as `x`.
    - `array_forms`: the form of each array of the tree, and of each `jax.ShapeDtypeStruct`.

    **Raises:** `TypeError`, with the path, for a dictionary with keys that a file cannot hold.
    """
    tree = _unmarked(tree)
    if is_array_or_struct(tree):
        return next(array_forms)
    if tree is None:
        return NodeForm("none", "", (), ())
    if jtu.all_leaves([tree]):
        is_plain = type(tree) in (bool, int, float, str)
        return StaticForm(tree if is_plain else None, _text_of(tree), is_plain)
    kind, name, children = _open(tree)
    for key, _ in children:
        if type(key) not in _KEYS:
            raise TypeError(
                f"export writes dictionaries with keys that are strings or numbers, and {path} has "
                f"the key {key!r}: pass or return it under another name."
            )
    forms = [form_of(child, path_below(path, kind, key), array_forms) for key, child in children]
    keys = tuple(key for key, _ in children)
    return NodeForm(kind, name, keys, tuple(forms), _statics_of(tree))


def path_below(path: str, kind: Kind, key: Any) -> str:
    """The path of the child with this key."""
    return f"{path}.{key}" if kind in ("namedtuple", "record") else f"{path}[{key!r}]"


def arrays_in(form: Form, tree: Any, path: str) -> Iterator[tuple[ArrayForm, Any, str]]:
    """Each array of a tree that should have this form, with its own form and its path.

    For a record, any node with children of the same names is accepted, and so is a dictionary of
    them, which may omit parts without arrays.

    **Raises:** `TypeError`, with the path, if the tree has another form; `ValueError` if it
    has another static value.
    """
    tree = _unmarked(tree)
    if isinstance(form, ArrayForm):
        yield form, tree, path
        return
    if isinstance(form, StaticForm):
        _check_static(form, tree, path)
        return
    children = _children(form, tree)
    if children is None:
        raise TypeError(f"{path} must be {describe(form)}; it is {describe_other(tree)}.")
    expected = dict(form.statics)
    for name, text in _statics_of(tree):
        if expected.get(name, text) != text:
            raise _other_static(path_below(path, form.kind, name), expected[name], text)
    for key, child_form in zip(form.keys, form.children, strict=True):
        if key in children:
            yield from arrays_in(child_form, children[key], path_below(path, form.kind, key))
        elif form.kind != "record" or any(True for _ in array_forms_in(child_form)):
            below = path_below(path, form.kind, key)
            raise TypeError(f"{below} is missing: it must be {describe(child_form)}.")
    more = [key for key in children if key not in form.keys]
    if more:
        below = path_below(path, form.kind, more[0])
        raise TypeError(f"{below} is one too many: {path} must be {describe(form)}.")


def build(form: Form, arrays: Iterator[Any]) -> Any:
    """The tree of this form with these arrays; a record becomes a dictionary."""
    if isinstance(form, ArrayForm):
        return next(arrays)
    if isinstance(form, StaticForm):
        return form.value
    children = [build(child, arrays) for child in form.children]
    match form.kind:
        case "none":
            return None
        case "tuple":
            return tuple(children)
        case "list":
            return children
        case "namedtuple":
            return _named_tuple(form.name, form.keys)(*children)
        case "dict":
            return dict(zip(form.keys, children, strict=True))
        case "record":
            # A value that is not plain, such as an activation function, is in the program.
            return {
                key: child
                for key, child, child_form in zip(form.keys, children, form.children, strict=True)
                if not isinstance(child_form, StaticForm) or child_form.is_plain
            }


def lost_in(form: Form, path: str, *, is_in_record: bool = False) -> Iterator[str]:
    """The paths of static leaves that `build` could neither return nor omit."""
    if isinstance(form, NodeForm):
        for key, child in zip(form.keys, form.children, strict=True):
            below = path_below(path, form.kind, key)
            yield from lost_in(child, below, is_in_record=form.kind == "record")
    elif isinstance(form, StaticForm) and not form.is_plain and not is_in_record:
        yield path


def describe(form: Form) -> str:
    """One line, such as `(float32[batch, 64], {'scale': float32[]})`; for a Module of many arrays,
    only their number.
    """
    if isinstance(form, ArrayForm):
        return f"{form.dtype}[{', '.join(map(str, form.shape))}]"
    if isinstance(form, StaticForm):
        return form.text
    num_arrays = len(list(array_forms_in(form)))
    if form.kind in ("namedtuple", "record") and num_arrays > _MAX_SHOWN:
        return f"{form.name} of {num_arrays} arrays"
    texts = list(map(describe, form.children))
    named = [f"{key}={text}" for key, text in zip(form.keys, texts, strict=True)]
    match form.kind:
        case "none":
            return "None"
        case "tuple":
            return f"({', '.join(texts)}{',' if len(texts) == 1 else ''})"
        case "list":
            return f"[{', '.join(texts)}]"
        case "dict":
            pairs = zip(form.keys, texts, strict=True)
            return f"{{{', '.join(f'{key!r}: {text}' for key, text in pairs)}}}"
        case "namedtuple" | "record":
            return f"{form.name}({', '.join(named)})"


def to_plain(form: Form) -> dict[str, Any]:
    """The form as JSON data."""
    if not isinstance(form, NodeForm):
        return {"is": "array" if isinstance(form, ArrayForm) else "static", **vars(form)}
    return {
        "is": form.kind,
        "name": form.name,
        "keys": list(form.keys),
        "children": list(map(to_plain, form.children)),
        "statics": list(form.statics),
    }


def from_plain(plain: dict[str, Any]) -> Form:
    """The form from JSON data; raises anything if the data are not a form."""
    kind, rest = plain["is"], {name: value for name, value in plain.items() if name != "is"}
    if kind == "array":
        shape = (size if isinstance(size, int) else str(size) for size in rest["shape"])
        return ArrayForm(tuple(shape), str(rest["dtype"]))
    if kind == "static":
        return StaticForm(rest["value"], str(rest["text"]), bool(rest["is_plain"]))
    children = tuple(map(from_plain, rest["children"]))
    if not all(type(key) in _KEYS for key in rest["keys"]):
        raise ValueError(rest["keys"])
    if kind == "namedtuple":
        _named_tuple(rest["name"], tuple(rest["keys"]))
    elif kind not in ("none", "tuple", "list", "dict", "record"):
        raise ValueError(kind)
    if len(children) != len(rest["keys"]):
        raise ValueError(rest["keys"])
    statics = tuple((str(name), str(text)) for name, text in rest["statics"])
    return NodeForm(kind, rest["name"], tuple(rest["keys"]), children, statics)


def array_forms_in(form: Form) -> Iterator[ArrayForm]:
    """The form of each array, in order."""
    if isinstance(form, NodeForm):
        for child in form.children:
            yield from array_forms_in(child)
    elif isinstance(form, ArrayForm):
        yield form


def _open(node: Any) -> tuple[Kind, str, list[tuple[Any, Any]]]:
    """The kind of a node, the name of its class, and its children by key."""
    name = type(node).__name__
    if isinstance(node, dict):
        return "dict", "", [(key.key, child) for key, child in children_with_keys(node)]
    fields = getattr(node, "_fields", None)
    if isinstance(node, tuple) and fields is not None:
        return "namedtuple", name, list(zip(fields, node, strict=True))
    if type(node) is tuple or type(node) is list:
        return ("tuple" if type(node) is tuple else "list"), "", list(enumerate(node))
    return "record", name, [(_name_of(key), child) for key, child in children_with_keys(node)]


def _unmarked(node: Any) -> Any:
    """The node, without the mark of a frozen array, which a program does not record."""
    return node.value if is_frozen(node) else node


def _name_of(key: Any) -> str:
    for attribute in ("name", "key", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _children(form: NodeForm, tree: Any) -> dict[Any, Any] | None:
    """The children of a tree by the keys of the form; `None` for another kind of node."""
    if form.kind == "none":
        return {} if tree is None else None
    if tree is None or jtu.all_leaves([tree]):
        # A leaf may only replace a node without children.
        return None
    kind, _, children = _open(tree)
    if kind == form.kind or (form.kind == "record" and kind == "dict"):
        return dict(children)
    if form.kind == "namedtuple" and kind == "tuple" and len(children) == len(form.keys):
        return dict(zip(form.keys, tree, strict=True))
    return None


def _check_static(form: StaticForm, tree: Any, path: str) -> None:
    is_alike = type(tree) is type(form.value) if form.is_plain else True
    if not is_alike or _text_of(tree) != form.text:
        raise _other_static(
            path, form.text, describe_other(tree) if is_array(tree) else _text_of(tree)
        )


def _other_static(path: str, expected: str, found: str) -> ValueError:
    return ValueError(
        f"{path} was {expected} when this was exported, which is part of the program; it is "
        f"{found}. What is to vary must be an array when it is exported."
    )


def _statics_of(node: Any) -> tuple[tuple[str, str], ...]:
    """Name and text of each static field of a dataclass, such as a Module; of another node, of its
    metadata in JAX.
    """
    fields = dataclasses.fields(node) if dataclasses.is_dataclass(node) else ()
    named = [field.name for field in fields if field.metadata.get("static")]
    if named or isinstance(node, Module):
        return tuple((name, _text_of(getattr(node, name, None))) for name in named)
    if isinstance(node, tuple | list | dict):
        return ()
    structure: Any = jtu.tree_structure(node, is_leaf=lambda part: part is not node)
    _, data = structure.node_data()
    return () if data is None else (("static part", _text_of(data)),)


def _text_of(leaf: Any) -> str:
    """Text that identifies the leaf in another process too; a function by its name alone."""
    if inspect.ismethod(leaf):
        text = f"<{leaf.__qualname__} of {_text_of(leaf.__self__)}>"
    elif callable(leaf) and hasattr(leaf, "__qualname__"):
        text = f"<{leaf.__qualname__}>"
    elif isinstance(leaf, functools.partial):
        named = [part for pair in sorted(leaf.keywords.items()) for part in pair]
        text = f"<partial of {', '.join(map(_text_of, [leaf.func, *leaf.args, *named]))}>"
    elif isinstance(leaf, set | frozenset):
        text = f"{type(leaf).__name__}({{{', '.join(sorted(map(_text_of, leaf)))}}})"
    elif is_array(leaf) or isinstance(leaf, np.ndarray):
        array: Any = leaf
        array = np.asarray(jax.random.key_data(array) if is_key(array) else array)
        text = f"<{leaf.dtype}{list(leaf.shape)} of {_digest(array.tobytes())}>"
    else:
        # NumPy shortens arrays by default, and shows eight digits.
        with np.printoptions(threshold=sys.maxsize, floatmode="unique", legacy=False):
            text = re.sub(" at 0x[0-9a-f]+", "", repr(leaf))
        if type(leaf).__repr__ is object.__repr__ and hasattr(leaf, "__dict__"):
            text += f" with {', '.join(map(_text_of_attribute, vars(leaf).items()))}"
    if len(text) <= _MAX_TEXT:
        return text
    return f"{' '.join(text[:_MAX_TEXT].split())}... ({_digest(text.encode())})"


def _text_of_attribute(named: tuple[str, Any]) -> str:
    name, value = named
    # Objects in an object may lead back to it.
    is_shown = is_array(value) or isinstance(value, np.ndarray | functools.partial | set)
    text = _text_of(value) if is_shown else re.sub(" at 0x[0-9a-f]+", "", repr(value))
    return f"{name}={text}"


def _digest(data: bytes) -> str:
    return f"SHA-256 {hashlib.sha256(data).hexdigest()[:16]}"


def form_of_array(array: Any) -> ArrayForm:
    """The form of an array, or of a `jax.ShapeDtypeStruct`, whose sizes may be symbolic."""
    shape = tuple(size if isinstance(size, int) else str(size) for size in array.shape)
    return ArrayForm(shape, str(array.dtype))


def describe_other(tree: Any) -> str:
    """The argument that was passed instead, in a message."""
    if is_array(tree):
        return describe(form_of_array(tree))
    if isinstance(tree, bool | int | float | complex | str | None):
        return repr(tree)
    return f"of type {type(tree).__name__}"


@functools.lru_cache(256)
def _named_tuple(name: str, fields: tuple[str, ...]) -> type:
    # Python refuses a name that is not an identifier, and renames such fields, as `rename=True`
    # did when the tuple was made.
    return collections.namedtuple(name, fields, rename=True)
