"""Flattening a tree into its arrays and its Structure, and caching the result on Modules."""

from collections.abc import Callable, Iterator
from typing import Any

import jax

from .._checking import PartitionError, is_checking
from .._module import INITIALISING, CachedPartition, Module, ModuleMeta, get_cached, set_cached
from .._pytree import is_array_or_traced_reference
from ._node_types import (
    ARRAY,
    MIN_ROW,
    ModuleNode,
    TupleNode,
    concrete_array_types,
    identity_leaf,
    make_row,
    opaque_leaf,
    open_node,
    static_leaf,
)
from ._static_key import ATOMS, StaticKey
from ._structure import (
    NOTHING,
    Intern,
    Opened,
    Structure,
    intern,
    make_output,
    make_private,
    no_meta,
)

_MAX_DEPTH = 20_000
"""Deeper trees, and cycles, raise RecursionError. The walk itself takes no Python stack."""


class _Frame:
    """A node whose children are being walked."""

    __slots__ = ("children", "first_array", "node", "num_candidates", "structures", "value")

    def __init__(self, value: Any, node: Opened, first_array: int, num_candidates: int):
        self.value = value
        self.node = node
        self.children: Iterator[Any] = iter(node.children)
        self.structures: list[Structure] = []
        self.first_array = first_array
        self.num_candidates = num_candidates

    def close(self, make: Intern) -> Structure:
        structure_type, make_meta, static, _, _ = self.node
        key = NOTHING if static is None else StaticKey(static, of_node=True)
        return make(structure_type, type(self.value), make_meta, key, tuple(self.structures))

    def name_of_child(self) -> str:
        """The name of the current child, as a path shows it."""
        return self.node.name_child(len(self.structures))


def flatten(
    tree: Any,
    *,
    with_abstract: bool = False,
    is_output: bool = False,
    by_identity: bool = False,
    is_private: bool = False,
    root: Callable[[], str] = lambda: "tree",
) -> tuple[list[Any], Structure]:
    """The arrays of `tree`, in tree order, and its Structure.

    The outermost Modules that hold nothing mutable cache their part for the next call.

    **Arguments:**

    - `tree`: any pytree.
    - `with_abstract`: count each `jax.ShapeDtypeStruct` as an array, for ahead-of-time lowering.
      Nothing is cached then.
    - `is_output`: accept a static leaf that is not hashable, or cannot be compared. The output of a
      function is not part of a key.
    - `by_identity`: compare such a leaf by identity. A method may be bound to it, and a bound
      method is always hashable.
    - `is_private`: make a Structure of these very objects, even if there is one of equal objects,
      so that these objects are returned. Nothing is cached.
    - `root`: gives the name of the tree in a message.

    **Returns:** `(arrays, structure)`.

    **Raises:** `TypeError` with the path of a static leaf that is not hashable, or cannot be
    compared; `RecursionError` if the tree is too deep or has a cycle; under `checking_partitions`,
    `PartitionError` if a Module was changed.
    """
    arrays: list[Any] = []
    # Modules that may cache their partition, each with the range of its arrays. Only the outermost
    # ones do.
    candidates: list[tuple[Module, int, int, Structure]] = []
    frames: list[_Frame] = []
    frame = _Frame(None, Opened(TupleNode, no_meta, None, (tree,), lambda index: root()), 0, 0)
    make_unhashable = opaque_leaf if is_output else identity_leaf if by_identity else None
    make = make_private if is_private else make_output if is_output else intern
    caches = not with_abstract and not is_private
    takes_cached = caches and not is_checking()
    while True:
        structures = frame.structures
        for value in frame.children:
            node_type = type(value)
            if node_type in concrete_array_types:
                arrays.append(value)
                structures.append(ARRAY)
                continue
            if isinstance(node_type, ModuleMeta):
                cached = get_cached(value) if takes_cached else None
                if cached is not None and cached is not INITIALISING:
                    arrays += cached.arrays
                    structures.append(cached.structure)
                    continue
            elif node_type in ATOMS:
                structures.append(_static_leaf(value, frames, frame, make, make_unhashable))
                continue
            node = open_node(value)
            if node is None:
                is_abstract = with_abstract and isinstance(value, jax.ShapeDtypeStruct)
                if is_abstract or is_array_or_traced_reference(value):
                    arrays.append(value)
                    structures.append(ARRAY)
                else:
                    structures.append(_static_leaf(value, frames, frame, make, make_unhashable))
                continue
            if len(frames) >= _MAX_DEPTH:
                raise RecursionError(
                    f"a pytree is nested more than {_MAX_DEPTH} deep, or contains itself"
                )
            frames.append(frame)
            frame = _Frame(value, node, len(arrays), len(candidates))
            if len(node.children) >= MIN_ROW and node.structure_type.takes_sequence:
                row = make_row(node.children, with_abstract=with_abstract)
                if row is not None:
                    frame.structures.append(row[0])
                    frame.children = iter(())
                    arrays += row[1]
            break
        else:
            if not frames:
                if caches:
                    _cache(candidates, arrays)
                return arrays, structures[0]
            closed = frame
            frame = frames.pop()
            try:
                structure = closed.close(make)
            except Exception as error:
                static = closed.node.static
                raise TypeError(
                    _explain(closed.value, static, error, frames, frame, of_node=True)
                ) from error
            frame.structures.append(structure)
            if closed.node.structure_type is ModuleNode:
                cached = get_cached(closed.value)
                is_checked = is_checking() and caches
                if is_checked and cached is not None and cached is not INITIALISING:
                    _check(closed.value, cached, arrays[closed.first_array :], structure)
                if structure.is_cacheable_module and cached is not INITIALISING:
                    del candidates[closed.num_candidates :]
                    candidates.append((closed.value, closed.first_array, len(arrays), structure))


def _cache(candidates: list[tuple[Module, int, int, Structure]], arrays: list[Any]) -> None:
    for module, start, stop, structure in candidates:
        dynamic = tuple(arrays[start:stop])
        if concrete_array_types.issuperset(map(type, dynamic)):
            set_cached(module, CachedPartition(dynamic, structure))


def _check(
    module: Module, cached: CachedPartition, arrays: list[Any], structure: Structure
) -> None:
    """Compares the cached partition of `module` with its fields now, by identity."""
    if structure is not cached.structure or [*map(id, arrays)] != [*map(id, cached.arrays)]:
        raise PartitionError(
            f"a {type(module).__name__} was changed after its partition was cached: {module!r}. "
            "A Module is frozen; do not write to its `__dict__`, nor by `object.__setattr__`. "
            "`eqxlike.tree_at` makes a changed copy."
        )


def _static_leaf(
    value: Any,
    frames: list[_Frame],
    frame: _Frame,
    make: Intern,
    make_unhashable: Callable[[Any], Structure] | None,
) -> Structure:
    try:
        return static_leaf(value, make)
    except Exception as error:
        if make_unhashable is not None:
            return make_unhashable(value)
        raise TypeError(_explain(value, value, error, frames, frame)) from error


def _explain(
    value: Any,
    static: Any,
    error: Exception,
    frames: list[_Frame],
    frame: _Frame,
    *,
    of_node: bool = False,
) -> str:
    path = "".join(each.name_of_child() for each in [*frames, frame])
    try:
        StaticKey(static, of_node=of_node)
        what = "not comparable"
    except Exception:
        what = "not hashable"
    return (
        f"the static part of {path}, of type {type(value).__name__}, is {what} ({error}). What is "
        "not an array is static: it is part of the key under which a compiled function is found, "
        "so it must be hashable, and `==` between two of them must be true or false."
    )
