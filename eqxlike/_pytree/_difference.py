"""Comparing pytrees: prefixes, equality, differences, and messages that locate them."""

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
"""Whether a node matches another with everything below; `None` to compare their children."""


class Difference(NamedTuple):
    """A place at which two trees differ, and what each has there."""

    path: tuple[Any, ...]
    first: PyTree
    second: PyTree

    def explain(self, first_name: str, second_name: str) -> str:
        """The place and what each tree has there, as a sentence without its end.

        **Arguments:**

        - `first_name`, `second_name`: the user's names of the two trees.
        """
        place = jtu.keystr(self.path)
        first, second = f"{first_name}{place}", f"{second_name}{place}"
        of_first = _describe_beside(self.first, self.second)
        of_second = _describe_beside(self.second, self.first)
        if of_first == of_second:
            # Two classes may have the same name, and a function may be defined twice.
            return f"{first} and {second} are both {of_first}, but not the same one"
        return f"{first} is {of_first}, and {second} is {of_second}"


def find_difference(
    first: PyTree, second: PyTree, fits: Fits = lambda first, second: None
) -> Difference | None:
    """The first place at which `second` does not match `first`; `None` if there is none.

    **Arguments:**

    - `fits`: called as `fits(first, second)` for each pair of nodes, from the roots down. If it
      returns `None`, the two must be nodes of one type, with the same keys and the same metadata,
      whose children match; or both must be leaves, of any value.

    >>> find_difference({"a": (1, 2)}, {"a": (1, [2])}).explain("one", "other")
    "one['a'][1] is a leaf of type int, and other['a'][1] is a list of length 1"
    """
    is_fit = fits(first, second)
    if is_fit is not None:
        return None if is_fit else Difference((), first, second)
    children, treedef = flatten_one_level_with_keys(first)
    others, other_treedef = flatten_one_level_with_keys(second)
    is_one = treedef == other_treedef
    # If two nodes differ only in their metadata, a difference below them says more, such as an
    # array of another shape, or a frozen one.
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
    """A `fits` for `find_difference`: arrays and structs match if shape and dtype agree."""
    if not _has_shape(first) or not _has_shape(second):
        return False if _has_shape(first) or _has_shape(second) else None
    # Compares JAX's dtypes: NumPy has 64 bits where JAX has 32.
    return first.shape == second.shape and jnp.result_type(first) == jnp.result_type(second)


def describe_node(node: Any) -> str:
    """A node of a tree, or a leaf, as a message describes it, without the value."""
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
    """`node` as a message describes it, with what distinguishes it from `other`."""
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
    """The static fields of a dataclass whose values differ from those of `other`, of its type."""
    if not dataclasses.is_dataclass(node):
        return []
    names = [field.name for field in dataclasses.fields(node) if field.metadata.get("static")]
    values = [(name, getattr(node, name, None)) for name in names]
    return [(name, value) for name, value in values if _differ(value, getattr(other, name, None))]


def _differ(value: Any, other: Any) -> bool:
    # `1 == True`, but in a trace they are two.
    return type(value) is not type(other) or bool(value != other)


def _has_shape(node: Any) -> bool:
    return is_array(node) or isinstance(node, jax.ShapeDtypeStruct)


# --- A pytree one level at a time, or every node of it with its path ---


def tree_flatten_one_level(pytree: PyTree) -> tuple[list[PyTree], Any]:
    """The children of a node, and the treedef that rebuilds it from them.

    **Arguments:**

    - `pytree`: any pytree.

    **Returns:** `(children, treedef)`; `treedef.unflatten(children)` is the node again.
    The only child of a leaf is the leaf itself, as in `jax.tree_util.tree_flatten`.

    **Raises:** `ValueError` if the node is one of its own children.

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
    """The children of `node`, each with its key in a path, and the treedef of this one level.

    A leaf has no children, and the treedef of a leaf. A node may be its own child.
    """
    # Not JAX's function of that name: in jax 0.10.2 it gives all fields of a namedtuple one key.
    paths_and_children, treedef = jtu.tree_flatten_with_path(node, is_leaf=_is_below_root())
    return [(path[0], child) for path, child in paths_and_children if path], treedef


def children_with_keys(node: Any) -> list[tuple[Any, Any]]:
    """The children of `node`, each with its key in a path; none for a leaf."""
    return [] if jtu.all_leaves([node]) else flatten_one_level_with_keys(node)[0]


def _is_below_root() -> Callable[[Any], bool]:
    """An `is_leaf` for one flattening, in which JAX asks about the root first, then its children.

    Comparing each with the root instead would not terminate for a list that contains itself.
    """
    calls = itertools.count()
    return lambda _: next(calls) > 0


def walk(pytree: PyTree, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every node of `pytree` with its path, including leaves, each before its descendants."""
    yield path, pytree
    for key, child in children_with_keys(pytree):
        yield from walk(child, (*path, key))


def contains_itself(node: Any, name: str, above: tuple[Any, ...], below: tuple[Any, ...]) -> str:
    """The message for a node at the path `above` in the tree `name` that recurs at `below`."""
    return (
        f"A pytree must not contain itself: the {type(node).__name__} at {name}"
        f"{jtu.keystr(above)} is at {name}{jtu.keystr(below)} too, so that walking down the tree "
        "would never end. Put a copy, or something else, in one of the two places."
    )


# Mapping over a prefix and the trees it is a prefix of, with errors that locate a mismatch.


def map_prefix(
    function: Callable[..., Any],
    *pytrees: PyTree,
    names: Sequence[str],
    advice: str,
    is_leaf: Callable[[Any], bool] | None = None,
) -> PyTree:
    """`jax.tree_util.tree_map`, with an error that distinguishes the trees.

    JAX's own calls all of them `tree_map tree`. `names` are the user's names for them, and
    `advice` ends the message.
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
                raise ValueError(f"pytree structure error: {explained}. {advice}") from None
        raise


# --- Checking that a pytree is a tree: no node inside itself, none in two places ---


def tree_check(pytree: PyTree) -> None:
    """Raises an error if a node of `pytree` contains itself, or occurs in two places.

    JAX flattens and rebuilds whatever crosses `jax.jit`, `jax.grad` and the like, so one object in
    two places becomes two. That is allowed, but surprising if they should remain one.
    Leaves may occur any number of times, and so may nodes without children, such as
    `None` and `()`: nothing can distinguish two of them.

    **Arguments:**

    - `pytree`: any pytree.

    **Raises:** `ValueError` that names both places.

    >>> weights = [1.0, 2.0]
    >>> tree_check({"first": weights, "second": list(weights)})
    >>> tree_check({"first": weights, "second": weights})
    Traceback (most recent call last):
    ...
    ValueError: The list at pytree['first'] stands at pytree['second'] too...
    """
    _check(pytree, (), {}, {})


Path = tuple[Any, ...]


def _check(
    node: Any, path: Path, above: dict[int, Path], finished: dict[int, tuple[Path, Any]]
) -> None:
    """Walks down from `node`.

    `above` has the nodes on the way down to it, `finished` those already visited. They hold the
    nodes themselves, since each flattening may make a child again, and an `id` may be reused.
    """
    children = children_with_keys(node)
    if not children:
        return
    if id(node) in above:
        raise ValueError(contains_itself(node, "pytree", above[id(node)], path))
    if id(node) in finished:
        first, _ = finished[id(node)]
        raise ValueError(
            f"The {type(node).__name__} at pytree{jtu.keystr(first)} stands at "
            f"pytree{jtu.keystr(path)} too, as one and the same object. JAX rebuilds a pytree that "
            "crosses `jax.jit`, `jax.grad` and the like, and would make two separate objects of "
            "it. Put it in one place and use it from there, or a copy in the other."
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
    """Whether all `pytrees` have the same structure and equal leaves.

    **Arguments:**

    - `*pytrees`: any number of pytrees of any structure.
    - `typematch`: also require that corresponding leaves have the same type, so that `1`, `1.0`,
      `np.ones(())` and `jnp.ones(())` differ.
    - `rtol`, `atol`: scalars; if either is set, floating-point and complex arrays need only be
      close: `|x - y| <= atol + rtol * |y|`.

    Arrays are equal if shape, dtype and all elements are; an array never equals anything else.

    **Returns:** a `bool`; under a transformation, if it depends on traced values, a boolean
    scalar array.

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
            # A tracer counts as a JAX array.
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
        # By NumPy where it can: JAX compiles two programs for each shape.
        same = np.array_equal(x, y) if is_on_cpu(x) and is_on_cpu(y) else jnp.all(x == y)
    else:
        are_of_jax = isinstance(x, jax.Array) or isinstance(y, jax.Array)
        same = (jnp if are_of_jax else np).allclose(x, y, rtol=rtol, atol=atol)
    return same if isinstance(same, Tracer) else bool(same)
