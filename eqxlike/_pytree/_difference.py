"""Comparing pytrees: differences and messages that locate them, prefixes, equality."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Bool, PyTree

from .._compat import Tracer
from ._predicates import is_array, is_on_cpu

Fits = Callable[[Any, Any], bool | None]
"""A function of two nodes that says whether their whole subtrees match. If it returns `None`,
`find_difference` compares the children.
"""


class Difference(NamedTuple):
    """A path at which two trees differ, and the node of each tree there."""

    path: tuple[Any, ...]
    first: PyTree
    second: PyTree

    def explain(self, first_name: str, second_name: str) -> str:
        """Returns a clause that describes the difference, for use in a message.

        **Arguments:**

        - `first_name`, `second_name`: the user's names of the two trees.
        """
        place = jtu.keystr(self.path)
        first, second = f"{first_name}{place}", f"{second_name}{place}"
        first_text = _describe_against(self.first, self.second)
        second_text = _describe_against(self.second, self.first)
        if first_text == second_text:
            # Two classes may have the same name, and a function may be defined twice.
            return f"{first} and {second} are both {first_text}, but not the same one"
        return f"{first} is {first_text}, and {second} is {second_text}"


def find_difference(
    first: PyTree, second: PyTree, fits: Fits = lambda first, second: None
) -> Difference | None:
    """The first difference between two trees; `None` if they match.

    **Arguments:**

    - `fits`: a function that is called as `fits(first, second)` for each pair of nodes, from the
      roots down. If it returns a bool, the bool decides whether the two subtrees match. If it
      returns `None`, two nodes match if they have the same type, keys and metadata, and their
      children match; two leaves always match.

    >>> find_difference({"a": (1, 2)}, {"a": (1, [2])}).explain("one", "other")
    "one['a'][1] is a leaf of type int, and other['a'][1] is a list of length 1"
    """
    are_matching = fits(first, second)
    if are_matching is not None:
        return None if are_matching else Difference((), first, second)
    children, treedef = flatten_one_level_with_keys(first)
    others, other_treedef = flatten_one_level_with_keys(second)
    has_same_treedef = treedef == other_treedef
    # If two nodes have the same type and keys, but different metadata, look for a difference in
    # their children first. Such a difference, for example between the shapes of two arrays, is more
    # useful.
    keys, other_keys = ([key for key, _ in each] for each in (children, others))
    has_same_name = type(first).__qualname__ == type(second).__qualname__
    if has_same_treedef or (keys and keys == other_keys and has_same_name):
        for (key, child), (_, other) in zip(children, others, strict=True):
            if found := find_difference(child, other, fits):
                return found._replace(path=(key, *found.path))
    return None if has_same_treedef else Difference((), first, second)


def same_shape_and_dtype(first: Any, second: Any) -> bool | None:
    """A `fits` for `find_difference`: arrays and structs match if shape and dtype agree."""
    if not _has_shape(first) or not _has_shape(second):
        return False if _has_shape(first) or _has_shape(second) else None
    # Compares JAX's dtypes, since NumPy has 64 bits by default and JAX has 32.
    return first.shape == second.shape and jnp.result_type(first) == jnp.result_type(second)


def describe_node(node: Any) -> str:
    """Describes a node or a leaf for an error message. The text does not contain its value."""
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


def _describe_against(node: Any, other: Any) -> str:
    """Describes `node` for an error message, with details that distinguish it from `other`."""
    if not _has_shape(node) and jtu.all_leaves([node, other]):
        return repr(node)
    text = describe_node(node)
    if type(node) is not type(other) or text != describe_node(other):
        return text
    fields = dataclasses.fields(node) if dataclasses.is_dataclass(node) else ()
    names = [field.name for field in fields if field.metadata.get("static")]
    values = [(name, getattr(node, name, None), getattr(other, name, None)) for name in names]
    statics = [f"{name}={value!r}" for name, value, others in values if _differ(value, others)]
    if statics:
        return f"{text} with {', '.join(statics)}"
    (children, treedef), (others, other_treedef) = map(flatten_one_level_with_keys, (node, other))
    if len(children) != len(others):
        return f"{text} with {len(children)} {'child' if len(children) == 1 else 'children'}"
    metadata, other_metadata = treedef.node_data()[1], other_treedef.node_data()[1]
    return f"{text} with the metadata {metadata!r}" if _differ(metadata, other_metadata) else text


def _differ(value: Any, other: Any) -> bool:
    # `1 == True`, but JAX traces again if `True` replaces `1`.
    return type(value) is not type(other) or bool(value != other)


def _has_shape(node: Any) -> bool:
    return is_array(node) or isinstance(node, jax.ShapeDtypeStruct)


# --- Flattening a pytree by one level, and iterating over all of its nodes ---


def tree_flatten_one_level(pytree: PyTree) -> tuple[list[PyTree], Any]:
    """Flattens a pytree by one level, into the children of its root.

    **Arguments:**

    - `pytree`: any pytree.

    **Returns:** `(children, treedef)`; `treedef.unflatten(children)` rebuilds the pytree. For a
    leaf, the only child is the leaf itself, as in `jax.tree_util.tree_flatten`.

    **Raises:** `ValueError` if the root is one of its own children.

    >>> tree_flatten_one_level({"a": 3, "b": (1, None)})
    ([3, (1, None)], PyTreeDef({'a': *, 'b': *}))
    >>> tree_flatten_one_level(4)
    ([4], PyTreeDef(*))
    """
    children, treedef = flatten_one_level_with_keys(pytree)
    if not children:
        return [pytree] * treedef.num_leaves, treedef
    for key, child in children:
        if child is pytree:
            raise ValueError(contains_itself(pytree, "pytree", (), (key,)))
    return [child for _, child in children], treedef


def flatten_one_level_with_keys(node: Any) -> tuple[list[tuple[Any, Any]], Any]:
    """The children of `node`, each with its path key, and the treedef of this level.

    A leaf has no children. A node may be its own child.
    """
    # JAX has a function of the same name, but in jax 0.10.2 it returns the same key for all fields
    # of a namedtuple. Here, JAX calls `is_leaf` for the root first, and then for the children. So
    # `is_leaf` counts its calls: with `lambda child: child is not node`, flattening a list that
    # contains itself would never end.
    calls = itertools.count()
    paths_and_children, treedef = jtu.tree_flatten_with_path(
        node, is_leaf=lambda _: next(calls) > 0
    )
    return [(path[0], child) for path, child in paths_and_children if path], treedef


def children_with_keys(node: Any) -> list[tuple[Any, Any]]:
    """The children of `node`, each with its path key; empty for a leaf."""
    return [] if jtu.all_leaves([node]) else flatten_one_level_with_keys(node)[0]


def walk(pytree: PyTree, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Iterates over all nodes and leaves of `pytree` with their paths, parents before children."""
    yield path, pytree
    for key, child in children_with_keys(pytree):
        yield from walk(child, (*path, key))


def contains_itself(node: Any, name: str, above: tuple[Any, ...], below: tuple[Any, ...]) -> str:
    """The error message for a `node` at path `above` that contains itself, at path `below`."""
    return (
        f"A pytree must not contain itself: the {type(node).__name__} at {name}"
        f"{jtu.keystr(above)} is at {name}{jtu.keystr(below)} too, so that a walk over the tree "
        "would never end. Replace the inner object by a copy, or by something else."
    )


# --- Mapping over a prefix and further trees, with errors that locate a mismatch ---


def map_prefix(
    function: Callable[..., Any],
    *pytrees: PyTree,
    names: Sequence[str],
    hint: str,
    is_leaf: Callable[[Any], bool] | None = None,
) -> PyTree:
    """`jax.tree_util.tree_map`, with an error that names the trees.

    JAX's own error calls every tree `tree_map tree`.

    **Arguments:**

    - `names`: the names of `pytrees` in the message.
    - `hint`: a sentence at the end of the message that says what to do.
    """

    def fits(prefix: Any, _: Any) -> bool | None:
        is_end = jtu.all_leaves([prefix]) or (is_leaf is not None and is_leaf(prefix))
        return True if is_end else None

    try:
        return jtu.tree_map(function, *pytrees, is_leaf=is_leaf)
    except ValueError:
        prefix, *others = pytrees
        for name, full in zip(names[1:], others, strict=True):
            if difference := find_difference(prefix, full, fits):
                explained = difference.explain(names[0], name)
                raise ValueError(f"pytree structure error: {explained}. {hint}") from None
        raise


# --- Checking that a pytree is a tree: each node occurs once ---


def tree_check(pytree: PyTree) -> None:
    """Raises an error if a node of `pytree` contains itself, or occurs in two places.

    `jax.jit`, `jax.grad` and other transformations flatten and rebuild their arguments, so one
    object in two places becomes two objects. Sharing an object is allowed, but surprising if the
    two places should remain equal. Leaves, and nodes without children such as `None` and `()`, may
    occur any number of times.

    **Arguments:**

    - `pytree`: any pytree.

    **Raises:** `ValueError` if a node contains itself or occurs in two places. The message has both
    paths.

    >>> weights = [1.0, 2.0]
    >>> tree_check({"first": weights, "second": list(weights)})
    >>> tree_check({"first": weights, "second": weights})
    Traceback (most recent call last):
    ...
    ValueError: The list at pytree['first'] is at pytree['second'] too...
    """
    _check(pytree, (), {}, {})


def _check(node: Any, path: tuple[Any, ...], above: dict, finished: dict) -> None:
    """Checks the subtree of `node`.

    `above` maps the `id` of each ancestor to its path. `finished` maps the `id` of each node that
    was already visited to its path and the node itself. So `finished` keeps these nodes alive.
    Otherwise a later node could get the same `id`, since flattening may make new children.
    """
    children = children_with_keys(node)
    if not children:
        return
    if id(node) in above:
        raise ValueError(contains_itself(node, "pytree", above[id(node)], path))
    if id(node) in finished:
        first, _ = finished[id(node)]
        raise ValueError(
            f"The {type(node).__name__} at pytree{jtu.keystr(first)} is at "
            f"pytree{jtu.keystr(path)} too, as the same object. `jax.jit`, `jax.grad` and other "
            "transformations rebuild a pytree, and would make two separate objects of it. Keep it "
            "in one place only, or put a copy in the other place."
        )
    above[id(node)] = path
    for key, child in children:
        _check(child, (*path, key), above, finished)
    del above[id(node)]
    finished[id(node)] = (path, node)


# --- Equality of pytrees: structure, types, values ---


def tree_equal(
    *pytrees: PyTree,
    typematch: bool = False,
    rtol: float | np.ndarray | np.number | Array = 0.0,
    atol: float | np.ndarray | np.number | Array = 0.0,
) -> bool | Bool[Array, ""]:
    """Returns `True` if all `pytrees` have the same structure and equal leaves.

    **Arguments:**

    - `*pytrees`: any number of pytrees of any structure.
    - `typematch`: also require that corresponding leaves have the same type, so that `1`, `1.0`,
      `np.ones(())` and `jnp.ones(())` differ.
    - `rtol`, `atol`: scalars; if either is set, floating-point and complex arrays need only be
      close: `|x - y| <= atol + rtol * |y|`.

    Two arrays are equal if their shapes, dtypes and elements are equal. An array never equals a
    leaf that is not an array.

    **Returns:** a `bool`, or a traced boolean scalar if the result depends on traced values.

    >>> tree_equal((1, np.ones(2)), (1, np.ones(2)))
    True
    >>> tree_equal(1, 1.0), tree_equal(1, 1.0, typematch=True)
    (True, False)
    """
    if len(pytrees) < 2:
        return True
    first_leaves, first_treedef = jtu.tree_flatten(pytrees[0])
    traced: list[Bool[Array, ""]] = []
    for pytree in pytrees[1:]:
        leaves, treedef = jtu.tree_flatten(pytree)
        if treedef != first_treedef:
            return False
        for x, y in zip(first_leaves, leaves, strict=True):
            # A tracer and a JAX array have different classes, but count as the same type.
            are_of_jax = typematch and isinstance(x, jax.Array) and isinstance(y, jax.Array)
            if typematch and not are_of_jax and type(x) is not type(y):
                return False
            same = _leaves_equal(x, y, rtol, atol)
            if isinstance(same, Tracer):
                traced.append(same)
            elif not same:
                return False
    return jnp.all(jnp.stack(traced)) if traced else True


def _leaves_equal(x: Any, y: Any, rtol: Any, atol: Any) -> Any:
    if not (is_array(x) and is_array(y)):
        return not is_array(x) and not is_array(y) and bool(x == y)
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    is_exact = all(isinstance(each, float | int) and each == 0 for each in (rtol, atol))
    if is_exact or not jnp.issubdtype(x.dtype, jnp.inexact):
        # Compares with NumPy if possible, since JAX would compile two programs for each shape.
        same = np.array_equal(x, y) if is_on_cpu(x) and is_on_cpu(y) else jnp.all(x == y)
    else:
        are_of_jax = isinstance(x, jax.Array) or isinstance(y, jax.Array)
        same = (jnp if are_of_jax else np).allclose(x, y, rtol=rtol, atol=atol)
    return same if isinstance(same, Tracer) else bool(same)
