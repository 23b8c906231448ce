"""Differences between two pytrees, and messages that say where they are."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import PyTree

from ._levels import flatten_one_level_with_keys
from ._predicates import is_array

Fits = Callable[[Any, Any], bool | None]
"""Whether a node fits another with all that is below: `None` if their children are to be asked."""


class Difference(NamedTuple):
    """A place at which two trees differ, with what stands there in each."""

    path: tuple[Any, ...]
    first: PyTree
    second: PyTree

    def explain(self, first_name: str, second_name: str) -> str:
        """The place and what stands there, in a sentence without its end.

        **Arguments:**

        - `first_name`, `second_name`: what the user calls the two trees.
        """
        place = jtu.keystr(self.path)
        first, second = f"{first_name}{place}", f"{second_name}{place}"
        of_first = _describe_beside(self.first, self.second)
        of_second = _describe_beside(self.second, self.first)
        if of_first == of_second:
            # Two classes may have one name, and a function may be defined twice.
            return f"{first} and {second} are both {of_first}, but not the same one"
        return f"{first} is {of_first}, and {second} is {of_second}"


def find_difference(
    first: PyTree, second: PyTree, fits: Fits = lambda first, second: None
) -> Difference | None:
    """The first place at which `second` does not fit `first`; `None` if there is none.

    **Arguments:**

    - `fits`: called as `fits(first, second)` for each pair of nodes, from the roots down. Where it
      returns `None` the two must be nodes of one type, with the same keys and the same metadata,
      whose children fit; or both must be leaves, of whatever value.

    >>> find_difference({"a": (1, 2)}, {"a": (1, [2])}).explain("one", "other")
    "one['a'][1] is a leaf of type int, and other['a'][1] is a list of length 1"
    """
    is_fit = fits(first, second)
    if is_fit is not None:
        return None if is_fit else Difference((), first, second)
    children, treedef = flatten_one_level_with_keys(first)
    others, other_treedef = flatten_one_level_with_keys(second)
    is_one = treedef == other_treedef
    # Two nodes that only differ in what they hold beside their children: what differs below says
    # more, such as an array of another shape, or one that is frozen.
    if is_one or _are_alike(first, second, children, others):
        for (key, child), (_, other) in zip(children, others, strict=True):
            if found := find_difference(child, other, fits):
                return found._replace(path=(key, *found.path))
    return None if is_one else Difference((), first, second)


def _are_alike(first: Any, second: Any, children: list[Any], others: list[Any]) -> bool:
    names = [type(node).__qualname__ for node in (first, second)]
    keys = [[key for key, _ in each] for each in (children, others)]
    return names[0] == names[1] and keys[0] == keys[1] and len(keys[0]) > 0


def same_shape_and_dtype(first: Any, second: Any) -> bool | None:
    """A `fits` for `find_difference`: arrays and structs of one shape and dtype do."""
    if not _has_shape(first) or not _has_shape(second):
        return False if _has_shape(first) or _has_shape(second) else None
    # JAX's dtypes are compared: NumPy has 64 bits where JAX has 32.
    return first.shape == second.shape and jnp.result_type(first) == jnp.result_type(second)


def describe_node(node: Any) -> str:
    """A node of a tree, or a leaf, as a message calls it; the value is not shown."""
    if node is None:
        return "None"
    if _has_shape(node):
        return f"an array of shape {node.shape} and dtype {node.dtype}"
    if jtu.all_leaves([node]):
        return f"a leaf of type {type(node).__name__}"
    name = type(node).__name__
    text = f"a {name}" if type(node) in (tuple, list, dict) else f"a node of type {name}"
    if isinstance(node, tuple | list):
        return f"{text} of length {len(node)}"
    return f"{text} with the keys {list(node)}" if isinstance(node, dict) else text


def _describe_beside(node: Any, other: Any) -> str:
    """`node` as a message calls it, with what tells it from `other`."""
    if not _has_shape(node) and jtu.all_leaves([node, other]):
        return repr(node)
    text = describe_node(node)
    if type(node) is not type(other) or text != describe_node(other):
        return text
    statics = [f"{name}={value!r}" for name, value in _differing_statics(node, other)]
    if statics:
        return f"{text} with {', '.join(statics)}"
    (children, treedef), (others, other_treedef) = map(flatten_one_level_with_keys, (node, other))
    if len(children) != len(others):
        return f"{text} with {len(children)} {'child' if len(children) == 1 else 'children'}"
    metadata, other_metadata = treedef.node_data()[1], other_treedef.node_data()[1]
    return f"{text} with the metadata {metadata!r}" if _differ(metadata, other_metadata) else text


def _differing_statics(node: Any, other: Any) -> list[tuple[str, Any]]:
    """The static fields of a dataclass with the values that `other`, of its type, does not have."""
    if not dataclasses.is_dataclass(node):
        return []
    names = [field.name for field in dataclasses.fields(node) if field.metadata.get("static")]
    values = [(name, getattr(node, name, None)) for name in names]
    return [(name, value) for name, value in values if _differ(value, getattr(other, name, None))]


def _differ(value: Any, other: Any) -> bool:
    # `1 == True`, and to a trace they are two.
    return type(value) is not type(other) or bool(value != other)


def _has_shape(node: Any) -> bool:
    return is_array(node) or isinstance(node, jax.ShapeDtypeStruct)
