"""Structures: trees without their arrays.

A `Structure` is interned: while it is alive, any equal Structure is the same object. So a warm call
compares Structures by identity. The Structure of a node contains the Structures of its children,
down to arrays and static leaves. There is a subclass of `Structure` for each type of node.
"""

import itertools
import threading
import types
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax.tree_util as jtu

from .._module import BoundMethod, CachedPartition, can_stay_lazy, set_cached, stored_fields
from .._traceback import compile_function, tuple_of
from . import _writers as writers
from ._static_key import Snapshot, StaticKey, snapshot_of

_MIN_RUN = 16
"""If fewer than this many children have the same Structure, code without a loop is faster."""


class Structure:
    """Base class of the Structures of all types of node. Instances are compared by identity.

    `intern` and `make_private` make the instances.

    - `node_type`: the type of the node.
    - `meta`: everything else that is needed to rebuild the node. For a static leaf, it is the
      value.
    - `static`: the key of everything static in the node itself.
    - `children`: the Structures of the children. If the node has many leaves, it is a single `Row`.
    - `num_arrays`: the number of arrays in the subtree.
    - `is_cacheable`: `True` if there is no list, dict or foreign node in the subtree, so that only
      the static containers in `snapshot` can change.
    - `snapshot`: the contents of the lists, dicts and other containers in static fields, or `None`.
    - `interned`: for a Structure from `make_private`, the Structure with this key in the table,
      which may hold other static objects that are equal. Otherwise `None`.
    - `is_exact`: `True` if two trees of this Structure with the same arrays are interchangeable in
      every respect, not only in the parts that their `==` compares.
    - `anchor`: a nested function or a lambda among the static values, or `None`. Such a function
      may have a short life.
    - `has_row`: `True` if the children are a single `Row`.
    - `has_run`: `True` if there are many children and all have the same Structure. Then the
      generated code has a loop.
    - `has_sequence`: `True` if the generated code handles all children as one sequence.
    - `generated`: functions that are generated for this Structure on first use.
    """

    __slots__ = (
        "__weakref__",
        "anchor",
        "children",
        "generated",
        "has_row",
        "has_run",
        "has_sequence",
        "interned",
        "is_cacheable",
        "is_exact",
        "meta",
        "node_type",
        "num_arrays",
        "snapshot",
        "static",
    )

    is_immutable: bool = True
    """Whether a node of this type is immutable, apart from its children."""

    takes_sequence: bool = False
    """Whether generated code may handle the children of a node of this type as one sequence."""

    is_leaf: bool = False
    is_row: bool = False

    is_cacheable_module: bool = False
    """Whether a Module of this Structure caches its partition."""

    can_stay_lazy: bool = False
    """Whether a Module of this Structure can be lazy: built without its fields."""

    write_build: Callable[["Structure", writers.RebuildWriter, list[str]], str]
    """Writes the code that builds a node of this type."""

    write_guard: Callable[["Structure", writers.GuardWriter, str], Sequence[str]]
    """Writes the guard that checks if a value is a node with this Structure."""

    def __init__(
        self,
        node_type: type,
        meta: Any,
        static: StaticKey,
        children: tuple["Structure", ...],
    ):
        self.node_type = node_type
        self.meta = meta
        self.static = static
        self.children = children
        self.num_arrays = sum(child.num_arrays for child in children)
        is_fixed = self.is_immutable and static.is_fixed
        self.is_cacheable = is_fixed and all(child.is_cacheable for child in children)
        inside = (child.snapshot.containers for child in children if child.snapshot is not None)
        containers = (*itertools.chain(*inside), *static.containers)
        has_snapshot = self.is_cacheable and containers
        self.snapshot: Snapshot | None = snapshot_of(containers) if has_snapshot else None
        self.interned: Structure | None = None
        self.is_exact = static.is_exact and all(child.is_exact for child in children)
        own = (
            each
            for each in static.held
            if isinstance(each, types.FunctionType)
            and ("<locals>" in each.__qualname__ or each.__name__ == "<lambda>")
        )
        inner = (child.anchor for child in children if child.anchor is not None)
        self.anchor: types.FunctionType | None = next(own, None) or next(inner, None)
        self.has_row = len(children) == 1 and children[0].is_row
        self.has_run = (
            self.takes_sequence
            and len(children) >= _MIN_RUN
            and not children[0].is_leaf
            and children.count(children[0]) == len(children)
        )
        self.has_sequence = self.has_row or self.has_run
        self.generated: dict[Hashable, Any] = {}

    def is_current(self) -> bool:
        """Whether the static objects in this Structure are unchanged."""
        if self.is_exact:
            return True
        return self.static.is_current() and all(child.is_current() for child in self.children)

    def rebuilder(self, *, cache: bool) -> Callable[[tuple[Any, ...]], Any]:
        """Returns a function that takes a tuple of `num_arrays` arrays and builds the tree.

        **Arguments:**

        - `cache`: if `True`, the outermost Modules that the function builds cache their partition,
          and stay lazy if they can. Then the arrays must be concrete, since a tracer must not be
          cached.
        """
        rebuild = self.generated.get(cache)
        if rebuild is None:
            rebuild = self.generated[cache] = writers.RebuildWriter(cache).write(self)
        return rebuild


# --- The types of node ---


class ArrayLeaf(Structure):
    """An array. Arrays are traced."""

    __slots__ = ()

    is_leaf = True
    write_build = writers.build_array
    write_guard = writers.guard_array


class StaticLeaf(Structure):
    """`None`, or a value that is neither an array nor a node. Its `meta` is the value."""

    __slots__ = ()

    is_leaf = True
    write_build = writers.build_static_leaf
    write_guard = writers.guard_static_leaf


class TupleNode(Structure):
    """A plain tuple."""

    __slots__ = ()

    takes_sequence = True
    write_build = writers.build_tuple
    write_guard = writers.guard_sequence


class ListNode(Structure):
    """A list, which may change between two calls.

    So a Module that contains a list does not cache its partition: `is_immutable` is `False` for the
    list, which makes `Structure.is_cacheable` `False` for the Module. The generated guard reads the
    type, the length and the elements of the list in each call.
    """

    __slots__ = ()

    is_immutable = False
    takes_sequence = True
    write_build = writers.build_list
    write_guard = writers.guard_sequence


class NamedTupleNode(Structure):
    """A namedtuple of a class that is not registered with JAX."""

    __slots__ = ()

    write_build = writers.build_named_tuple
    write_guard = writers.guard_named_tuple


class DictNode(Structure):
    """A plain dict. Its `meta` is a `DictKeys`."""

    __slots__ = ()

    is_immutable = False
    takes_sequence = True
    write_build = writers.build_dict
    write_guard = writers.guard_dict


class DictKeys(NamedTuple):
    """The keys of a dict in JAX's sorted order, and in the insertion order of the first dict."""

    keys: tuple[Any, ...]
    as_inserted: tuple[Any, ...]


class ForeignNode(Structure):
    """A node of any other type that is registered with JAX. Its `meta` is a `ForeignMeta`."""

    __slots__ = ()

    is_immutable = False
    takes_sequence = True
    write_build = writers.build_foreign
    write_guard = writers.guard_foreign


class ForeignMeta:
    """The treedef that rebuilds a node, and the data that its flattening function returned."""

    __slots__ = ("data", "treedef")

    def __init__(self, value: Any, data: Any):
        self.data = data
        # JAX calls `is_leaf` for the node itself first, and then for its children. `is_leaf` counts
        # its calls: comparing each object with the node would be wrong for a node that contains
        # itself.
        is_child = itertools.chain((False,), itertools.repeat(True))
        self.treedef = jtu.tree_structure(value, is_leaf=lambda _: next(is_child))


class ModuleNode(Structure):
    """A Module. Its `meta` holds the values of its static fields.

    - `is_incomplete`: `True` if the Module lacks fields, because its `__init__` is running, or if
      the Module has metadata. Then `meta` holds more than these values.
    """

    __slots__ = ("is_cacheable_module", "is_incomplete")

    write_build = writers.build_module
    write_guard = writers.guard_module

    def __init__(self, node_type: Any, meta: Any, *parts: Any):
        super().__init__(node_type, meta, *parts)
        self.is_incomplete = type(meta) is not tuple
        # Each access to a method makes a new bound method, so a partition that is cached on it
        # would be lost. The instance of the method caches its partition instead.
        is_method = issubclass(node_type, BoundMethod)
        self.is_cacheable_module = self.is_cacheable and not is_method

    @property
    def is_immutable(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.node_type._eqxlike_class.traits.is_immutable  # pyright: ignore

    @property
    def can_stay_lazy(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.is_cacheable and can_stay_lazy(self.node_type)

    def fields(self, dynamic: tuple[Any, ...]) -> dict[str, Any]:
        """Builds the fields of an instance with these arrays; returns them by name."""
        return stored_fields(self.rebuilder(cache=False)(dynamic))

    def cache(self, module: Any) -> CachedPartition | None:
        """Caches the partition of an instance that has no cache yet, such as a new instance.

        **Returns:** the partition, or `None` if the instance is not of this Structure.
        """
        take = self.generated.get("take")
        if take is None:
            writer = writers.GuardWriter(None, None, None, reads_fields=True)
            writer.write(self, "module")
            lines = [*writer.function("take(module)"), f"    return {tuple_of(writer.arrays)}"]
            origin = f"arrays of {self.node_type.__name__}"
            take = self.generated["take"] = compile_function(lines, writer.namespace, origin)
        arrays = take(module)
        if arrays is None:
            return None
        partition = CachedPartition(arrays, self)
        set_cached(module, partition)
        return partition


class Row(Structure):
    """Stands for all children of a node with many leaves, so that a leaf needs no Structure.

    Its `meta` is a `RowLeaves`.
    """

    __slots__ = ()

    is_row = True
    write_build = writers.build_row
    write_guard = writers.guard_row

    def __init__(self, node_type: type, meta: "RowLeaves", *parts: Any):
        super().__init__(node_type, meta, *parts)
        self.num_arrays = len(meta.array_places)


class RowLeaves(NamedTuple):
    """The leaves of a row, with `None` for each array, and the positions of the arrays."""

    leaves: tuple[Any, ...]
    array_places: tuple[int, ...]
    static_places: tuple[int, ...]


# --- The table of Structures ---


def intern(
    structure_type: type[Structure],
    node_type: type,
    make_meta: Callable[[], Any],
    static: StaticKey,
    children: tuple[Structure, ...],
) -> Structure:
    """The unique Structure with these parts. `static` determines the result of `make_meta`."""
    # The key has only the `id`s of the class and the children; the Structure keeps these objects
    # alive. If the key held the objects, it could keep the Structure alive: a closure among them
    # may refer to a compiled function, and this function to the Structure.
    key = (structure_type, id(node_type), static.key, tuple(map(id, children)))
    found = _find(key)
    if found is None or not (found.is_exact or found.static.is_current()):
        made = structure_type(node_type, make_meta(), static, children)
        with _lock:
            found = _find(key)
            # If the `meta` of a Structure was changed in place, the Structure is replaced.
            if found is None or not found.static.is_current():
                # Assigning to an existing item of a dict keeps its old key object, but
                # `_Interned.__eq__` compares with the new key object. So the item is removed first.
                _table.pop(key, None)
                entry = _Interned(made, _forget)
                entry.key, entry.hash = key, hash(key)
                _table[key], found = entry, made
    return found


Parts = tuple[type[Structure], type, Callable[[], Any], StaticKey, tuple[Structure, ...]]
"""The arguments of `intern`."""

Intern = Callable[[*Parts], Structure]


def make_private(*parts: *Parts) -> Structure:
    """A new Structure that holds these objects, not the equal objects of an interned Structure.

    If the new Structure is exact, the interned Structure is returned instead.
    """
    structure_type, node_type, make_meta, static, children = parts
    if static.is_exact and all(child.is_exact for child in children):
        return intern(*parts)
    made = structure_type(node_type, make_meta(), static, children)
    made.interned = intern(*parts[:-1], tuple(child.interned or child for child in children))
    return made


def num_interned() -> int:
    """The number of Structures that are alive."""
    return len(_table)


class _Interned(weakref.ref[Structure]):
    """A weak reference to a Structure in the table. It equals only the key of this Structure."""

    __slots__ = ("hash", "key")

    key: Hashable
    hash: int

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        return other is self.key


def _forget(interned: _Interned) -> None:
    # Garbage collection may call this function at any moment. A `WeakValueDictionary` would call
    # the `__eq__` of users' objects here, and an `__eq__` may call JAX. If this happens while
    # jaxlib 0.10.2 takes a traceback (Python 3.11), jaxlib releases code objects twice, and the
    # process crashes later.
    _table.pop(interned, None)


def _find(key: Hashable) -> Structure | None:
    interned = _table.get(key)
    return None if interned is None else interned()


_table: dict[Hashable, _Interned] = {}
# Reentrant: while a thread holds the lock, garbage collection may run code in this thread that
# takes the lock again.
_lock = threading.RLock()


# --- Leaves ---


NOTHING = StaticKey(None)
"""The key of a node without static parts."""

ARRAY = ArrayLeaf(object, None, NOTHING, ())
ARRAY.num_arrays = 1


def static_leaf(value: Any, make: Intern = intern) -> Structure:
    """The Structure of a static leaf. Raises `TypeError` if `value` is not hashable."""
    return make(StaticLeaf, type(value), lambda: value, StaticKey(value), ())


def identity_leaf(value: Any) -> Structure:
    """The Structure of an unhashable static leaf that is compared by identity."""
    static = StaticKey(value, by_identity=True)
    return intern(StaticLeaf, type(value), lambda: value, static, ())


def opaque_leaf(value: Any) -> Structure:
    """The Structure of an unhashable static leaf that equals no other leaf."""
    static = StaticKey(object())
    static.is_immutable = static.is_fixed = static.is_exact = False
    return intern(StaticLeaf, type(value), lambda: value, static, ())
