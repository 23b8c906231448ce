"""The described inputs and outputs of a program: made from trees, compared with others, rebuilt.

A description has no classes, so that a process can read it that cannot import them: a node that is
none of Python's, such as a Module, is a record of named children.
"""

import collections
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from .._partition import ArrayForm, Node, Tree, describe, describe_by_text, flatten, key_of
from .._pytree import is_array


def check_keys(node: Node, path: str) -> None:
    """Raises `TypeError`, with the path, for a dictionary with keys that a file cannot hold."""
    for name, child in zip(node.child_names(), node.children, strict=True):
        if key_of(name) is None:
            raise TypeError(
                f"export writes dictionaries with keys that are strings, numbers or tuples, and "
                f"{path} has the key {name[1:-1]}: pass or return it under another name."
            )
        check_keys(child, path + name)


def given_tree(tree: Any) -> Tree:
    """The tree in words, with its arrays; each number in it is plain."""
    arrays, structure = flatten(tree, by_identity=True)
    return Tree(describe(structure, _describe_given), tuple(arrays))


def _describe_given(value: Any, _: Any = None, *, of_node: bool = False) -> Node:
    node = describe_by_text(value, of_node=of_node)
    if isinstance(value, int | float | complex | np.generic):
        node.value = (value,)
    return node


def arrays_in(form: Tree, tree: Tree, path: str) -> Iterator[tuple[ArrayForm, Any, str]]:
    """Each array of a tree that should have this form, with its own form and its path.

    In place of a record, any node whose children have the same names is accepted, and a dictionary
    with these names as keys, which may omit parts without arrays. In place of an array there may be
    a plain value, or another `Tree`.

    **Arguments:**

    - `tree`: a `given_tree`.

    **Raises:** `TypeError`, with the path, if the tree has another form; `ValueError` if it
    has another static value.
    """
    expected, given = form.node, tree.node
    if expected.kind == "array":
        yield form.arrays[0], _leaf_of(tree), path
        return
    if expected.is_static:
        if not given.is_static or given.text != expected.text:
            raise ValueError(
                f"{path} was {expected.text} when this was exported, which is part of the program; "
                f"it is {describe_other(tree)}. What is to vary must be an array when it is "
                "exported."
            )
        return
    parts, others = list(form.parts()), {key_of(name): (name, part) for name, part in tree.parts()}
    if expected.kind == "namedtuple" and given.kind == "tuple" and len(parts) == len(others):
        others = {
            key_of(name): other for (name, _), other in zip(parts, others.values(), strict=True)
        }
    elif given.kind not in (expected.kind, "dict" if expected.kind == "record" else ""):
        raise TypeError(f"{path} must be {form}; it is {describe_other(tree)}.")
    # A static part comes first: it says more than what differs because of it.
    for name, part in sorted(parts, key=lambda each: each[1].node.kind != "field"):
        _, other = others.pop(key_of(name), (None, None))
        if other is not None:
            yield from arrays_in(part, other, path + name)
        elif expected.kind != "record" or part.arrays:
            raise TypeError(f"{path}{name} is missing: it must be {part}.")
    for name, part in others.values():
        if part.node.kind != "field":
            raise TypeError(f"{path}{name} is one too many: {path} must be {form}.")


def _leaf_of(tree: Tree) -> Any:
    """The array or plain value that a tree consists of; else the tree."""
    if tree.node.kind == "array":
        return tree.arrays[0]
    return tree.node.value[0] if tree.node.value else tree


def build(node: Node, arrays: Iterator[Any]) -> Any:
    """The tree of this form with these arrays; a record becomes a dictionary."""
    if node.kind == "array":
        return next(arrays)
    if node.is_static:
        return node.value[0]
    named = zip(node.child_names(), node.children, strict=True)
    # A value that is not plain, such as an activation function, is in the program.
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
    """The paths of static leaves that `build` could neither return nor omit."""
    if node.kind == "static" and not node.value and not is_in_record:
        yield path
    for name, child in zip(node.child_names(), node.children, strict=True):
        yield from lost_in(child, path + name, is_in_record=node.kind == "record")


def describe_arguments(inputs: Tree) -> str:
    """The arguments of a program, such as `x: float32[batch, 64], scale: float32[]`."""
    return ", ".join(f"{name}: {form}" for name, form in inputs.parts())


def describe_other(leaf: Any) -> str:
    """The argument that was passed instead, in a message."""
    if isinstance(leaf, Tree):
        leaf = _leaf_of(leaf)
    if isinstance(leaf, Tree):
        return leaf.node.text if leaf.node.is_static else f"of type {leaf.node.text}"
    return str(ArrayForm.of(leaf)) if is_array(leaf) else repr(leaf)


@functools.lru_cache(256)
def _named_tuple(name: str, fields: tuple[str, ...]) -> type:
    # Python refuses a name that is not an identifier, and renames such fields, as `rename=True`
    # did when the tuple was made.
    return collections.namedtuple(name, fields, rename=True)
