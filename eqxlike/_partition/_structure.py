"""Structures: what is left of trees when their arrays are taken away.

A `Structure` is interned: as long as it lives, an equal one is the same object, so that on a warm
call "is it the same structure?" is one comparison of identities. It is made of the Structures of
its children, down to arrays and static leaves. Each type of node has a file in `_node_types`.
"""

import threading
import types
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from ._guard import GuardWriter
from ._rebuild import RebuildWriter
from ._static_key import StaticKey

MIN_RUN = 16
"""Fewer nodes side by side are handled one by one: code without a loop is faster then."""


class Structure:
    """The base of the types of node. `intern` and its kin make instances; identity compares them.

    - `node_type`: the type of the node.
    - `meta`: all else that the node needs to be built again; the value, for a static leaf.
    - `static`: the key of all that is static in the node itself.
    - `children`: the Structures of the children; or one `Row`, for many leaves.
    - `num_arrays`: the number of arrays in the subtree.
    - `is_cacheable`: whether nothing inside can change behind the back of whoever holds the arrays:
      no list, no dict, no foreign node, no mutable static value.
    - `is_exact`: whether two trees of this Structure with the same arrays are interchangeable, even
      in what their equality ignores.
    - `anchor`: a function somewhere inside that was defined in another, and may not live for long.
    - `generated`: functions generated for this Structure, on first use.
    """

    __slots__ = (
        "__weakref__",
        "anchor",
        "children",
        "generated",
        "is_cacheable",
        "is_exact",
        "meta",
        "node_type",
        "num_arrays",
        "static",
    )

    is_fixed: bool = True
    """Whether nodes of this type are immutable themselves."""

    takes_sequence: bool = False
    """Whether the children of a node of this type may be taken as one sequence."""

    is_leaf: bool = False
    is_row: bool = False

    def __init__(
        self, node_type: type, meta: Any, static: StaticKey, children: tuple["Structure", ...]
    ):
        self.node_type = node_type
        self.meta = meta
        self.static = static
        self.children = children
        self.num_arrays = sum(child.num_arrays for child in children)
        self.is_cacheable = (
            self.is_fixed and static.is_immutable and all(child.is_cacheable for child in children)
        )
        self.is_exact = static.is_exact and all(child.is_exact for child in children)
        own = (each for each in static.held if _is_short_lived(each))
        inner = (child.anchor for child in children if child.anchor is not None)
        self.anchor: types.FunctionType | None = next(own, None) or next(inner, None)
        self.generated: dict[Hashable, Any] = {}

    @property
    def has_row(self) -> bool:
        """Whether the children are the leaves of one `Row`."""
        return len(self.children) == 1 and self.children[0].is_row

    @property
    def has_run(self) -> bool:
        """Whether the children are many nodes of one Structure, for which a loop is written."""
        return (
            self.takes_sequence
            and len(self.children) >= MIN_RUN
            and not self.children[0].is_leaf
            and self.children.count(self.children[0]) == len(self.children)
        )

    @property
    def has_sequence(self) -> bool:
        """Whether the children are taken as one sequence."""
        return self.has_row or self.has_run

    @property
    def is_cacheable_module(self) -> bool:
        return False

    @property
    def can_stay_lazy(self) -> bool:
        """Whether a Module of this Structure may be built without its fields."""
        return False

    def is_current(self) -> bool:
        """Whether the static objects that it was made of are unchanged."""
        if self.is_exact:
            return True
        return self.static.is_current() and all(child.is_current() for child in self.children)

    def rebuilder(self, *, cache: bool) -> Callable[[tuple[Any, ...]], Any]:
        """The function from a tuple of `num_arrays` arrays to a tree of this Structure.

        **Arguments:**

        - `cache`: whether the outermost Modules built cache their partition, and stay lazy where
          they can. The arrays must be concrete then: a tracer must not be cached.
        """
        rebuild = self.generated.get(cache)
        if rebuild is None:
            rebuild = self.generated[cache] = RebuildWriter(cache).write(self)
        return rebuild

    def write_build(self, writer: RebuildWriter, parts: list[str]) -> str:
        """Writes how to build a node of this type, and returns the expression for it.

        **Arguments:**

        - `parts`: the expressions of the children; or one for the sequence of all.
        """
        raise NotImplementedError

    def write_guard(self, writer: GuardWriter, name: str) -> Sequence[str]:
        """Writes the guard that asks whether `name` is a node of this Structure, children left out.

        **Returns:** the names of the children; or one for the sequence of all.
        """
        raise NotImplementedError


class Opened(NamedTuple):
    """A node opened one level, which needs only the Structures of its children to be interned.

    - `structure_type`: the subclass of `Structure`.
    - `make_meta`: a function that makes the `meta` of a new Structure.
    - `static`: what is static in the node itself, and distinguishes it.
    - `children`: the children, which are flattened next.
    - `name_child`: a function from the index of a child to its name in a path.
    """

    structure_type: type[Structure]
    make_meta: Callable[[], Any]
    static: Any
    children: Sequence[Any]
    name_child: Callable[[int], str]


def _is_short_lived(value: Any) -> bool:
    if not isinstance(value, types.FunctionType):
        return False
    return "<locals>" in value.__qualname__ or value.__name__ == "<lambda>"


class _Interned(weakref.ref[Structure]):
    """A Structure in the table. As a key it is equal to that of the Structure, and to no other."""

    __slots__ = ("hash", "key")

    key: Hashable
    hash: int

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        return other is self.key


def _forget(interned: _Interned) -> None:
    # Garbage collection calls this, anywhere. A `WeakValueDictionary` would call the `__eq__` of
    # users' objects here. If that calls JAX while jaxlib 0.10.2 takes a traceback (Python 3.11),
    # jaxlib releases code objects twice, and the process crashes later.
    _table.pop(interned, None)


def _find(key: Hashable) -> Structure | None:
    interned = _table.get(key)
    return None if interned is None else interned()


_table: dict[Hashable, _Interned] = {}
# Garbage collection may run code that takes the lock again in the thread that holds it.
_lock = threading.RLock()


def intern(
    structure_type: type[Structure],
    node_type: type,
    make_meta: Callable[[], Any],
    static: StaticKey,
    children: tuple[Structure, ...],
) -> Structure:
    """The one Structure with these parts; `static` decides what its meta is."""
    # The key has the `id`s of the class and the children, which the Structure itself keeps alive. A
    # key that held them might keep the Structure alive, through a closure with a compiled function.
    key = (structure_type, id(node_type), static.key, tuple(map(id, children)))
    found = _find(key)
    if found is None or not found.static.is_current():
        made = structure_type(node_type, make_meta(), static, children)
        with _lock:
            found = _find(key)
            # A Structure whose meta was changed in place meanwhile gives way.
            if found is None or not found.static.is_current():
                # A dict keeps the key that it has, and the entry must have that very one.
                _table.pop(key, None)
                entry = _Interned(made, _forget)
                entry.key, entry.hash = key, hash(key)
                _table[key], found = entry, made
    return found


Intern = Callable[
    [type[Structure], type, Callable[[], Any], StaticKey, tuple[Structure, ...]], Structure
]


def make_private(
    structure_type: type[Structure],
    node_type: type,
    make_meta: Callable[[], Any],
    static: StaticKey,
    children: tuple[Structure, ...],
) -> Structure:
    """A new Structure with these very objects in it, or the interned one if that is exact."""
    if static.is_exact and all(child.is_exact for child in children):
        return intern(structure_type, node_type, make_meta, static, children)
    made = structure_type(node_type, make_meta(), static, children)
    made.is_cacheable = False
    return made


def make_output(
    structure_type: type[Structure],
    node_type: type,
    make_meta: Callable[[], Any],
    static: StaticKey,
    children: tuple[Structure, ...],
) -> Structure:
    """The Structure of a node of an output: no other, equal object is given back for one in it."""
    make = intern if static.is_exact else make_private
    return make(structure_type, node_type, make_meta, static, children)


NOTHING = StaticKey(None)
"""The key of a node that has nothing static."""


def no_meta() -> None:
    """The meta of a node that needs none."""


def num_interned() -> int:
    """The number of Structures alive."""
    return len(_table)
