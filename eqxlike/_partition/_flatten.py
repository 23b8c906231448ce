"""Taking a tree apart into its arrays and its Structure, and keeping the result on Modules."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu
import numpy as np

from .._checking import PartitionError, is_checking
from .._compat import Tracer
from .._module import INITIALISING, Module, ModuleMeta, get_kept, is_incomplete, set_kept
from .._pytree import is_array
from ._static_key import ATOMS
from ._structure import (
    ARRAY,
    DictNode,
    ForeignNode,
    ListNode,
    ModuleNode,
    NamedTupleNode,
    Structure,
    TupleNode,
    intern,
    static_leaf,
)

_MAX_DEPTH = 20_000
"""Deeper trees, and cycles, raise RecursionError. The walk itself takes no Python stack."""

concrete_array_types: set[type] = {np.ndarray}
"""Types whose instances are known to be arrays and no tracers; filled as they are met."""


class _Node(NamedTuple):
    """A node, opened one level: with children, it could be interned."""

    sort: type[Structure]
    meta: Any
    meta_key: Any
    children: Any


class _Frame:
    """A node whose children are being walked."""

    __slots__ = ("children", "first_array", "node", "num_candidates", "specs", "value")

    def __init__(self, value: Any, node: _Node, first_array: int, num_candidates: int):
        self.value = value
        self.node = node
        self.children: Iterator[Any] = iter(node.children)
        self.specs: list[Structure] = []
        self.first_array = first_array
        self.num_candidates = num_candidates

    def close(self) -> Structure:
        sort, meta, meta_key, _ = self.node
        try:
            return intern(sort, type(self.value), meta, meta_key, tuple(self.specs))
        except TypeError as error:
            raise _Unhashable(self.value, error) from None


def flatten(tree: Any, *, with_abstract: bool = False) -> tuple[list[Any], Structure]:
    """The arrays of `tree`, in tree order, and its Structure.

    The outermost Modules that nothing can change behind their back keep their part, so that the
    next call takes it from them.

    **Arguments:**

    - `tree`: any pytree.
    - `with_abstract`: count each `jax.ShapeDtypeStruct` as an array, for ahead-of-time lowering.

    **Returns:** `(arrays, structure)`.

    **Raises:** `TypeError` naming the path of a static leaf that is not hashable;
    `RecursionError` if the tree is too deep or has a cycle; under `checking_partitions`,
    `PartitionError` if a Module was changed.
    """
    try:
        return _flatten(tree, with_abstract)
    except _Unhashable as unhashable:
        raise TypeError(_explain(unhashable, tree)) from None


def _flatten(tree: Any, with_abstract: bool) -> tuple[list[Any], Structure]:
    arrays: list[Any] = []
    # Modules that may keep their partition, each with the range of its arrays. One that stands
    # inside another gives way to it.
    candidates: list[tuple[Module, int, int, Structure]] = []
    frames: list[_Frame] = []
    frame = _Frame(None, _Node(TupleNode, None, None, (tree,)), 0, 0)
    while True:
        specs = frame.specs
        for value in frame.children:
            kind = type(value)
            if kind in concrete_array_types:
                arrays.append(value)
                specs.append(ARRAY)
                continue
            if isinstance(kind, ModuleMeta):
                kept = get_kept(value)
                if kept is not None and kept is not INITIALISING:
                    if is_checking():
                        _check(value, kept)
                    arrays += kept[0]
                    specs.append(kept[1])
                    continue
            elif kind in ATOMS:
                specs.append(_static_leaf(value))
                continue
            node = _open(value, kind)
            if node is None:
                if is_array(value) or (with_abstract and isinstance(value, jax.ShapeDtypeStruct)):
                    arrays.append(value)
                    specs.append(ARRAY)
                else:
                    specs.append(_static_leaf(value))
                continue
            if len(frames) >= _MAX_DEPTH:
                raise RecursionError(
                    f"a pytree is nested more than {_MAX_DEPTH} deep, or contains itself"
                )
            frames.append(frame)
            frame = _Frame(value, node, len(arrays), len(candidates))
            break
        else:
            if not frames:
                _keep(candidates, arrays)
                return arrays, specs[0]
            closed = frame
            spec = closed.close()
            frame = frames.pop()
            frame.specs.append(spec)
            if closed.node.sort is ModuleNode and spec.is_keepable:
                if get_kept(closed.value) is not INITIALISING:
                    del candidates[closed.num_candidates :]
                    candidates.append((closed.value, closed.first_array, len(arrays), spec))


def _open(value: Any, kind: type) -> _Node | None:
    """The node `value` is, or `None` if it is a leaf."""
    if isinstance(value, jax.Array | np.generic):
        if not isinstance(value, Tracer):
            concrete_array_types.add(kind)
        return None
    if isinstance(value, Module):
        children, statics = kind._eqxlike_codec.flatten(value)  # pyright: ignore
        is_complete = not is_incomplete(statics)
        return _Node(ModuleNode, statics, (is_complete, *statics), children)
    if kind is tuple:
        return _Node(TupleNode, None, None, value)
    if kind is list:
        return _Node(ListNode, None, None, value)
    # One level through JAX, which knows what is registered. It refuses keys that do not sort.
    children, treedef = jtu.tree_flatten(value, is_leaf=lambda node: node is not value)
    if len(children) == 1 and children[0] is value:
        return None
    if kind is dict:
        keys = tuple(sorted(value))
        return _Node(DictNode, keys, keys, children)
    node_data = treedef.node_data()
    # JAX says of a namedtuple what it says of a class registered by somebody: look at what it did.
    if isinstance(value, tuple) and [*map(id, children)] == [*map(id, value)]:
        return _Node(NamedTupleNode, None, None, children)
    return _Node(ForeignNode, treedef, (treedef, node_data), children)


def _keep(candidates: list[tuple[Module, int, int, Structure]], arrays: list[Any]) -> None:
    for module, start, stop, spec in candidates:
        dynamic = tuple(arrays[start:stop])
        if all(type(array) in concrete_array_types for array in dynamic):
            set_kept(module, (dynamic, spec))


def _check(module: Module, kept: tuple[tuple[Any, ...], Structure]) -> None:
    """Compares what is kept on `module` with a fresh flattening, by identity."""
    children, statics = type(module)._eqxlike_codec.flatten(module)
    arrays: list[Any] = []
    specs: list[Structure] = []
    for child in children:
        child_arrays, spec = _flatten(child, False)
        arrays += child_arrays
        specs.append(spec)
    meta_key = (not is_incomplete(statics), *statics)
    structure = intern(ModuleNode, type(module), statics, meta_key, tuple(specs))
    kept_arrays, kept_structure = kept
    if structure is not kept_structure or [*map(id, arrays)] != [*map(id, kept_arrays)]:
        raise PartitionError(
            f"a {type(module).__name__} was changed after its partition was kept: {module!r}. "
            "A Module is frozen; do not write to its `__dict__`, nor by `object.__setattr__`. "
            "`eqxlike.tree_at` makes a changed copy."
        )


class _Unhashable(Exception):
    def __init__(self, value: Any, error: TypeError):
        self.value = value
        self.error = error


def _static_leaf(value: Any) -> Structure:
    try:
        return static_leaf(value)
    except TypeError as error:
        raise _Unhashable(value, error) from None


def _explain(unhashable: _Unhashable, tree: Any) -> str:
    value = unhashable.value
    nodes = jtu.tree_leaves_with_path(tree, is_leaf=lambda node: node is value)
    path = jtu.keystr(next((path for path, node in nodes if node is value), ()))
    return (
        f"the static part of tree{path}, of type {type(value).__name__}, is not hashable "
        f"({unhashable.error}). What is no array is static: it is part of the key under which a "
        "compiled function is found, so it must be hashable."
    )
