"""Pytrees compared: prefixes, equality, differences, and messages that say where they are."""

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


# --- A pytree one level at a time, or every node of it with its path ---


def tree_flatten_one_level(pytree: PyTree) -> tuple[list[PyTree], Any]:
    """The children of a node, and the treedef that makes it of them.

    **Arguments:**

    - `pytree`: any pytree.

    **Returns:** `(children, treedef)`, with `treedef.unflatten(children)` being the node again.
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

    A leaf has no children, and a treedef that says that it is a leaf. A node may be its own child.
    """
    # Not JAX's function of that name: in jax 0.10.2 all fields of a namedtuple get one key.
    paths_and_children, treedef = jtu.tree_flatten_with_path(node, is_leaf=_is_below_root())
    return [(path[0], child) for path, child in paths_and_children if path], treedef


def children_with_keys(node: Any) -> list[tuple[Any, Any]]:
    """The children of `node`, each with its key in a path; none for a leaf."""
    return [] if jtu.all_leaves([node]) else flatten_one_level_with_keys(node)[0]


def _is_below_root() -> Callable[[Any], bool]:
    """An `is_leaf` for one flattening, in which JAX asks of the root first, then of its children.

    To compare each with the root instead would be an endless descent for a list that holds itself.
    """
    calls = itertools.count()
    return lambda _: next(calls) > 0


def walk(pytree: PyTree, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every node of `pytree` with its path, leaves too, each before what is below it."""
    yield path, pytree
    for key, child in children_with_keys(pytree):
        yield from walk(child, (*path, key))


def contains_itself(node: Any, name: str, above: tuple[Any, ...], below: tuple[Any, ...]) -> str:
    """The message for a node at the path `above` in the tree `name` that is `below` once more."""
    return (
        f"A pytree must not contain itself: the {type(node).__name__} at {name}"
        f"{jtu.keystr(above)} is at {name}{jtu.keystr(below)} too, so that walking down the tree "
        "would never end. Put a copy, or something else, in one of the two places."
    )


# Mapping over a prefix and the trees it is a prefix of, with errors that say where it is not.


def map_prefix(
    function: Callable[..., Any],
    *pytrees: PyTree,
    names: Sequence[str],
    advice: str,
    is_leaf: Callable[[Any], bool] | None = None,
) -> PyTree:
    """`jax.tree_util.tree_map`, but its error tells the trees apart.

    JAX's own calls all of them `tree_map tree`. `names` are those that the user knows them by, and
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


# --- A check that a pytree is a tree: no node inside itself, none in two places ---


def tree_check(pytree: PyTree) -> None:
    """Raises if a node of `pytree` contains itself, or stands in two places.

    JAX flattens and rebuilds what crosses `jax.jit`, `jax.grad` and the like, and one object in two
    places comes out as two. That is allowed, but is a surprise to whoever meant them to stay one.
    Leaves may stand anywhere as often as they like, and so may nodes without children, such as
    `None` and `()`: nothing can tell two of them apart.

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

    `above` has the nodes on the way down to it, `finished` those that lie behind: with the nodes
    themselves, since a child may be made again by each flattening, and an `id` used again.
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
    - `typematch`: also ask that corresponding leaves have the same type, so that `1`, `1.0`,
      `np.ones(())` and `jnp.ones(())` differ.
    - `rtol`, `atol`: scalars; with either, floating-point and complex arrays need only be close:
      `|x - y| <= atol + rtol * |y|`.

    Arrays are equal if shape, dtype and all elements are; an array never equals what is not one.

    **Returns:** a `bool`, or under a transformation, if it depends on traced values, a boolean
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
            if typematch and not _same_type(x, y):
                return False
            same = _leaves_equal(x, y, rtol, atol)
            if isinstance(same, Tracer):
                traced.append(same)
            elif not same:
                return False
    if traced:
        return jnp.all(jnp.stack(traced))
    return True


def _same_type(x: Any, y: Any) -> bool:
    # A tracer stands for a JAX array.
    if isinstance(x, jax.Array) and isinstance(y, jax.Array):
        return True
    return type(x) is type(y)


def _leaves_equal(x: Any, y: Any, rtol: Any, atol: Any) -> Any:
    if not (is_array(x) and is_array(y)):
        return not is_array(x) and not is_array(y) and bool(x == y)
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    numpy = np if not isinstance(x, jax.Array) and not isinstance(y, jax.Array) else jnp
    is_exact = isinstance(rtol, float | int) and rtol == 0 and isinstance(atol, float | int)
    is_exact = is_exact and atol == 0
    if is_exact or not jnp.issubdtype(x.dtype, jnp.inexact):
        same = numpy.all(x == y)
    else:
        same = numpy.allclose(x, y, rtol=rtol, atol=atol)
    return same if isinstance(same, Tracer) else bool(same)
