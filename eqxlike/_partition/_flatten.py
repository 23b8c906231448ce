"""Taking a tree apart into its arrays and its Structure, and keeping the result on Modules."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu
import numpy as np

from .._checking import PartitionError, is_checking
from .._compat import Tracer
from .._module import INITIALISING, Module, ModuleMeta, get_kept, is_incomplete, set_kept
from .._pytree import is_array
from ._static_key import ATOMS, StaticKey
from ._structure import (
    ARRAY,
    NO_META,
    DictNode,
    ForeignNode,
    ListNode,
    ModuleNode,
    NamedTupleNode,
    Structure,
    TupleNode,
    held_leaf,
    intern,
    opaque_leaf,
    static_leaf,
)

_MAX_DEPTH = 20_000
"""Deeper trees, and cycles, raise RecursionError. The walk itself takes no Python stack."""

concrete_array_types: set[type] = {np.ndarray, jax.Ref}
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
        static = NO_META if meta_key is None else StaticKey(meta_key)
        return intern(sort, type(self.value), meta, static, tuple(self.specs))

    def key_of_child(self) -> str:
        """Of the child under way, as it stands in a path."""
        index = len(self.specs)
        sort, meta, _, _ = self.node
        if sort is ModuleNode and not is_incomplete(meta):
            return f".{type(self.value)._eqxlike_codec.dynamic_names[index]}"
        if sort is NamedTupleNode:
            return f".{type(self.value)._fields[index]}"
        if sort is DictNode:
            return f"[{meta[index]!r}]"
        return f"[{index}]"


def flatten(
    tree: Any, *, with_abstract: bool = False, is_outcome: bool = False, is_bound: bool = False
) -> tuple[list[Any], Structure]:
    """The arrays of `tree`, in tree order, and its Structure.

    The outermost Modules that nothing can change behind their back keep their part, so that the
    next call takes it from them.

    **Arguments:**

    - `tree`: any pytree.
    - `with_abstract`: count each `jax.ShapeDtypeStruct` as an array, for ahead-of-time lowering.
        Nothing is kept then.
    - `is_outcome`: take a static leaf that is not hashable as it is. What a function returns is no
        part of a key.
    - `is_bound`: tell a static leaf that is not hashable from others by its identity and by what it
        holds. A bound method is hashable whatever it is bound to.

    **Returns:** `(arrays, structure)`.

    **Raises:** `TypeError` naming the path of a static leaf that is not hashable;
    `RecursionError` if the tree is too deep or has a cycle; under `checking_partitions`,
    `PartitionError` if a Module was changed.
    """
    arrays: list[Any] = []
    # Modules that may keep their partition, each with the range of its arrays. One that stands
    # inside another gives way to it.
    candidates: list[tuple[Module, int, int, Structure]] = []
    frames: list[_Frame] = []
    frame = _Frame(None, _Node(TupleNode, None, None, (tree,)), 0, 0)
    make_unhashable = opaque_leaf if is_outcome else held_leaf if is_bound else None
    takes_kept = not with_abstract and not is_checking()
    while True:
        specs = frame.specs
        for value in frame.children:
            kind = type(value)
            if kind in concrete_array_types:
                arrays.append(value)
                specs.append(ARRAY)
                continue
            if isinstance(kind, ModuleMeta):
                kept = get_kept(value) if takes_kept else None
                if kept is not None and kept is not INITIALISING:
                    arrays += kept[0]
                    specs.append(kept[1])
                    continue
            elif kind in ATOMS:
                specs.append(_static_leaf(value, frames, frame, make_unhashable))
                continue
            node = _open(value, kind)
            if node is None:
                if is_array(value) or (with_abstract and isinstance(value, jax.ShapeDtypeStruct)):
                    arrays.append(value)
                    specs.append(ARRAY)
                else:
                    specs.append(_static_leaf(value, frames, frame, make_unhashable))
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
                if not with_abstract:
                    _keep(candidates, arrays)
                return arrays, specs[0]
            closed = frame
            frame = frames.pop()
            try:
                spec = closed.close()
            except TypeError as error:
                raise TypeError(_explain(closed.value, error, frames, frame)) from None
            frame.specs.append(spec)
            if closed.node.sort is ModuleNode:
                kept = get_kept(closed.value)
                is_checked = is_checking() and not with_abstract
                if is_checked and kept is not None and kept is not INITIALISING:
                    _check(closed.value, kept, arrays[closed.first_array :], spec)
                if spec.is_keepable and kept is not INITIALISING:
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
    if kind is dict:
        try:
            keys = tuple(sorted(value))
        except TypeError as error:
            raise TypeError(f"the keys of a dict in a pytree must be sortable: {error}") from None
        return _Node(DictNode, keys, keys, [value[key] for key in keys])
    # One level through JAX, which knows what is registered. The first node asked about is `value`
    # itself; not asked by identity, since it may contain itself.
    is_child = iter((False,))
    children, treedef = jtu.tree_flatten(value, is_leaf=lambda _: next(is_child, True))
    if len(children) == 1 and children[0] is value:
        return None
    node_data = treedef.node_data()
    # JAX says of a namedtuple what it says of a class registered by somebody: look at what it did.
    if isinstance(value, tuple) and node_data is not None and node_data[1] is None:
        if [*map(id, children)] == [*map(id, value)]:
            return _Node(NamedTupleNode, None, None, children)
    return _Node(ForeignNode, treedef, (treedef, node_data), children)


def _keep(candidates: list[tuple[Module, int, int, Structure]], arrays: list[Any]) -> None:
    for module, start, stop, spec in candidates:
        dynamic = tuple(arrays[start:stop])
        if all(type(array) in concrete_array_types for array in dynamic):
            set_kept(module, (dynamic, spec))


def _check(
    module: Module, kept: tuple[tuple[Any, ...], Structure], arrays: list[Any], spec: Structure
) -> None:
    """Compares what is kept on `module` with what it holds now, by identity."""
    kept_arrays, kept_spec = kept
    if spec is not kept_spec or [*map(id, arrays)] != [*map(id, kept_arrays)]:
        raise PartitionError(
            f"a {type(module).__name__} was changed after its partition was kept: {module!r}. "
            "A Module is frozen; do not write to its `__dict__`, nor by `object.__setattr__`. "
            "`eqxlike.tree_at` makes a changed copy."
        )


def _static_leaf(
    value: Any,
    frames: list[_Frame],
    frame: _Frame,
    make_unhashable: Callable[[Any], Structure] | None,
) -> Structure:
    try:
        return static_leaf(value)
    except TypeError as error:
        if make_unhashable is not None:
            return make_unhashable(value)
        raise TypeError(_explain(value, error, frames, frame)) from None


def _explain(value: Any, error: TypeError, frames: list[_Frame], frame: _Frame) -> str:
    path = "".join(each.key_of_child() for each in [*frames, frame][1:])
    return (
        f"the static part of tree{path}, of type {type(value).__name__}, is not hashable "
        f"({error}). What is no array is static: it is part of the key under which a compiled "
        "function is found, so it must be hashable."
    )
