"""The description of an exported program, and the file that holds it.

A file is two lines, then the program serialised by `jax.export`. The first line has a magic string
and the SHA-256 of everything after this line. The second line is JSON: the format number, and a
description of the inputs and outputs of the program. Reading a file executes no code.

A description contains no classes, so that a process without the source of the classes can read it.
In a description, a custom node, such as a Module, is a record of named children.
"""

import collections
import dataclasses
import functools
import hashlib
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from .. import extend, is_array
from ..extend import ArrayForm, Node, Tree, describe, flatten, key_of

FORMAT = 1
_MAGIC = b"eqxlike.export "


@dataclasses.dataclass(frozen=True)
class Header:
    """The description of a program.

    - `name`: name of the function.
    - `inputs`: structure and array types of the inputs. The root has a child for each argument.
    - `outputs`: structure and array types of the outputs.
    - `platforms`: platforms on which the program runs.
    - `vjp_order`: how many times the program can be differentiated.
    - `calling_convention_version`: version of `jax.export`'s calling convention.
    - `versions`: maps the names of the libraries that exported the program to their versions.
    """

    name: str
    inputs: Tree
    outputs: Tree
    platforms: tuple[str, ...]
    vjp_order: int
    calling_convention_version: int
    versions: dict[str, str]

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the arguments."""
        return tuple(self.inputs.node.child_names())

    def write(self, path: pathlib.Path, program: bytes) -> None:
        """Writes a program to `path`, and replaces an existing file atomically.

        **Raises:** `OSError` if the file cannot be written.
        """
        trees = {"inputs": extend.to_plain(self.inputs), "outputs": extend.to_plain(self.outputs)}
        content = json.dumps({"format": FORMAT} | vars(self) | trees).encode() + b"\n" + program
        with extend.open_to_replace(path) as file:
            file.write(_MAGIC + _checksum(content) + b"\n" + content)


def read(path: pathlib.Path) -> tuple[Header, bytes]:
    """Reads a program from `path`.

    **Raises:**

    - `OSError` if the file cannot be read.
    - `ValueError` if the file is not an exported program, is damaged, or has a newer format.
    """
    first, _, content = path.read_bytes().partition(b"\n")
    if not first.startswith(_MAGIC):
        raise ValueError(f"{path} is not an exported program: pass a file that `save` has written.")
    if first != _MAGIC + _checksum(content):
        raise ValueError(f"{path} is cut off or damaged: its checksum differs from its content.")
    text, _, program = content.partition(b"\n")
    try:
        plain = json.loads(text)
        version = plain.pop("format")
        header = _header_from(plain) if version <= FORMAT else None
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
        raise ValueError(f"{path} is damaged: its header does not describe a program.") from None
    if header is None:
        raise ValueError(
            f"{path} was written by a newer version of eqxlike, in format {version}; this one "
            f"reads formats up to {FORMAT}: update eqxlike, or export again."
        )
    return header, program


def _checksum(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


def _header_from(plain: dict[str, Any]) -> Header:
    """Builds the header from JSON data. Raises an error of any type if the data are invalid."""
    read: dict[str, Any] = {name: extend.from_plain(plain[name]) for name in ("inputs", "outputs")}
    read |= {name: int(plain[name]) for name in ("vjp_order", "calling_convention_version")}
    read["platforms"] = tuple(map(str, plain["platforms"]))
    read["versions"] = {name: str(version) for name, version in plain["versions"].items()}
    header = Header(**plain | read)
    for tree in (header.inputs, header.outputs):
        build(tree.node, iter(tree.arrays))
    if len(set(header.parameters)) != len(header.inputs.node.children):
        raise ValueError(header.parameters)
    if b"\0" in header.name.encode():
        # JAX names the program after the function, and this name may not contain a null byte.
        raise ValueError(header.name)
    return header


# --- Descriptions of inputs and outputs ---


def check_keys(node: Node, path: str) -> None:
    """Raises `TypeError` with the path if a dictionary key cannot be written to a file."""
    for name, child in zip(node.child_names(), node.children, strict=True):
        if key_of(name) is None:
            raise TypeError(
                f"export writes dictionaries whose keys are strings, numbers or tuples, but {path} "
                f"has the key {name[1:-1]}: use another key."
            )
        check_keys(child, path + name)


def given_tree(tree: Any) -> Tree:
    """Describes an argument of a call. NumPy and Python numbers count as plain values."""
    arrays, structure = flatten(tree, by_identity=True)
    return Tree(describe(structure, _describe_given), tuple(arrays))


def _describe_given(value: Any, _: Any = None, *, of_node: bool = False) -> Node:
    node = extend.describe_by_text(value, of_node=of_node)
    if isinstance(value, int | float | complex | np.generic):
        node.value = (value,)
    return node


def arrays_in(expected: Tree, given: Tree, path: str) -> Iterator[tuple[ArrayForm, Any, str]]:
    """Compares an argument with its description and yields its arrays.

    A node with the same field names, or a dictionary of the fields, may replace a record. The
    dictionary may omit fields without arrays. The yielded arrays are not checked. The caller must
    check each array, since a plain value or a `Tree` may be in its place.

    **Arguments:**

    - `expected`: the description.
    - `given`: the argument, as `given_tree` describes it.
    - `path`: path of the argument.

    **Returns:** an iterator over tuples `(expected, array, path)`. `expected` is the type that the
    array must have.

    **Raises:** `TypeError` with the path if the structure differs; `ValueError` if a static value
    differs.
    """
    node, given_node = expected.node, given.node
    if node.kind == "array":
        yield expected.arrays[0], _leaf_of(given), path
        return
    if node.is_static:
        if not given_node.is_static or given_node.text != node.text:
            raise ValueError(
                f"{path} must be {node.text}, the static value with which the program was "
                f"exported; it is {describe_other(given)}. To vary it, export it as an array."
            )
        return
    parts = list(expected.parts())
    others = {key_of(name): (name, part) for name, part in given.parts()}
    if node.kind == "namedtuple" and given_node.kind == "tuple" and len(parts) == len(others):
        others = {
            key_of(name): other for (name, _), other in zip(parts, others.values(), strict=True)
        }
    elif given_node.kind not in (node.kind, "dict" if node.kind == "record" else ""):
        raise TypeError(f"{path} must be {expected}; it is {describe_other(given)}.")
    # Static fields are compared first, since a different static field may cause other differences.
    for name, part in sorted(parts, key=lambda each: each[1].node.kind != "field"):
        _, other = others.pop(key_of(name), (None, None))
        if other is not None:
            yield from arrays_in(part, other, path + name)
        elif node.kind != "record" or part.arrays:
            raise TypeError(f"{path}{name} is missing: it must be {part}.")
    for name, part in others.values():
        if part.node.kind != "field":
            raise TypeError(f"{path}{name} is unexpected: {path} must be {expected}.")


def _leaf_of(tree: Tree) -> Any:
    """Returns the array or plain value if the tree is a single leaf, otherwise the tree."""
    if tree.node.kind == "array":
        return tree.arrays[0]
    return tree.node.value[0] if tree.node.value else tree


def build(node: Node, arrays: Iterator[Any]) -> Any:
    """Rebuilds a tree from its description and its arrays. Records become dictionaries."""
    if node.kind == "array":
        return next(arrays)
    if node.is_static:
        return node.value[0]
    named = zip(node.child_names(), node.children, strict=True)
    # Static values that are not plain, such as activation functions, are omitted.
    kept = [
        (key_of(name), build(child, arrays))
        for name, child in named
        if child.kind != "field" and (child.value or not child.is_static)
    ]
    children = [child for _, child in kept]
    match node.kind:
        case "tuple":
            return tuple(children)
        case "list":
            return children
        case "namedtuple":
            return _named_tuple(node.text, tuple(name for name, _ in kept))(*children)
    return dict(kept)


def lost_in(node: Node, path: str, *, is_in_record: bool = False) -> Iterator[str]:
    """The paths of static leaves that `build` can neither return nor omit."""
    if node.kind == "static" and not node.value and not is_in_record:
        yield path
    for name, child in zip(node.child_names(), node.children, strict=True):
        yield from lost_in(child, path + name, is_in_record=node.kind == "record")


def describe_arguments(inputs: Tree) -> str:
    """Formats the arguments of a program, such as `x: float32[batch, 64], scale: float32[]`."""
    return ", ".join(f"{name}: {part}" for name, part in inputs.parts())


def describe_other(leaf: Any) -> str:
    """Describes an argument for an error message."""
    if isinstance(leaf, Tree):
        leaf = _leaf_of(leaf)
    if isinstance(leaf, Tree):
        return leaf.node.text if leaf.node.is_static else f"of type {leaf.node.text}"
    return str(ArrayForm.of(leaf)) if is_array(leaf) else repr(leaf)


@functools.lru_cache(256)
def _named_tuple(name: str, fields: tuple[str, ...]) -> type:
    # The class of the original tuple may have been made with `rename=True`, and then may have field
    # names such as `_0`. Only `rename=True` accepts these names.
    return collections.namedtuple(name, fields, rename=True)
