"""Structures: what is left of a tree when its arrays are taken away, each kept once.

A `Structure` is interned: as long as it lives, an equal one is the same object, so that on a warm
call "is it the same structure?" is one comparison of identities. It is made of the Structures of
its children, down to `ARRAY` and to static leaves.
"""

import functools
import threading
import types
import weakref
from collections.abc import Callable, Hashable
from typing import Any

from .._module import can_stay_unread, is_incomplete, stored_fields
from ._rebuild import RebuildWriter, tuple_of
from ._static_key import StaticKey


class Structure:
    """Base of the sorts of node. Made by `intern` only; compared by identity.

    - `kind`: the type of the node.
    - `meta`: what else the node needs to be built again; the value, for a static leaf.
    - `children`: the Structures of the children.
    - `num_arrays`: how many arrays the subtree holds.
    - `is_keepable`: whether nothing inside can change behind the back of who holds the arrays:
        no list, no dict, no foreign node, no mutable static value.
    - `anchor`: a function somewhere inside that was made in another, and may not live for long.
    - `generated`: functions generated for this Structure, made on first use.
    """

    __slots__ = (
        "__weakref__",
        "anchor",
        "children",
        "generated",
        "held",
        "is_keepable",
        "kind",
        "meta",
        "num_arrays",
    )

    is_fixed: bool = True
    """Whether nodes of this sort are immutable themselves."""

    def __init__(self, kind: type, meta: Any, key: StaticKey, children: tuple["Structure", ...]):
        self.kind = kind
        self.meta = meta
        self.held = key.held
        self.children = children
        self.num_arrays = sum(child.num_arrays for child in children)
        self.is_keepable = (
            self.is_fixed and key.is_immutable and all(child.is_keepable for child in children)
        )
        own = (each for each in key.held if _is_short_lived(each))
        inner = (child.anchor for child in children if child.anchor is not None)
        self.anchor: types.FunctionType | None = next(own, None) or next(inner, None)
        self.generated: dict[Hashable, Any] = {}

    @property
    def is_keepable_module(self) -> bool:
        return False

    @property
    def can_stay_unread(self) -> bool:
        """Whether a Module of this Structure may be built without its fields."""
        return False

    def rebuilder(self, *, keep: bool) -> Callable[[tuple[Any, ...]], Any]:
        """The function from a tuple of `num_arrays` arrays to a tree of this Structure.

        **Arguments:**

        - `keep`: whether the outermost Modules built keep their partition, and stay unread where
            they can. Only for arrays that are concrete: a tracer must not be kept.
        """
        rebuild = self.generated.get(keep)
        if rebuild is None:
            rebuild = self.generated[keep] = RebuildWriter(keep).write(self)
        return rebuild

    def write(self, writer: RebuildWriter, parts: list[str]) -> str:
        """Writes how to build a node of this sort, and returns the expression for it.

        **Arguments:**

        - `parts`: the expressions of the children.
        """
        raise NotImplementedError


def _is_short_lived(value: Any) -> bool:
    if not isinstance(value, types.FunctionType):
        return False
    return "<locals>" in value.__qualname__ or value.__name__ == "<lambda>"


class ArrayLeaf(Structure):
    __slots__ = ()

    def write(self, writer: RebuildWriter, parts: list[str]) -> str:
        return writer.array()


class StaticLeaf(Structure):
    """A leaf that is no array, or `None`; `meta` is its value."""

    __slots__ = ()

    def write(self, writer: RebuildWriter, parts: list[str]) -> str:
        return writer.constant(self.meta)


class ModuleNode(Structure):
    """`kind` is the class and `meta` the values of its static fields."""

    __slots__ = ()

    @property
    def is_fixed(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.kind._eqxlike_is_fixed  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def is_keepable_module(self) -> bool:
        return self.is_keepable

    @property
    def can_stay_unread(self) -> bool:
        return self.is_keepable and can_stay_unread(self.kind)

    @property
    def num_fields(self) -> int:
        """How many fields an instance has."""
        return len(self.children) + len(self.meta)

    def fields(self, dynamic: tuple[Any, ...]) -> dict[str, Any]:
        """The fields of an instance with these arrays, by name."""
        return stored_fields(self.rebuilder(keep=False)(dynamic))

    def write(self, writer: RebuildWriter, parts: list[str]) -> str:
        codec = self.kind._eqxlike_codec  # pyright: ignore[reportAttributeAccessIssue]
        if is_incomplete(self.meta):
            unflatten, statics = writer.constant(codec.unflatten), writer.constant(self.meta)
            return writer.assign(f"{unflatten}({statics}, {tuple_of(parts)})")
        module = writer.assign(f"new({writer.constant(self.kind)})")
        names = (*codec.dynamic_names, *codec.static_names)
        values = (*parts, *map(writer.constant, self.meta))
        if names:
            writer.line(f"fields = stored_fields({module})")
        for name, value in zip(names, values, strict=True):
            writer.line(f"fields[{name!r}] = {value}")
        return module


class TupleNode(Structure):
    __slots__ = ()

    def write(self, writer: RebuildWriter, parts: list[str]) -> str:
        return writer.assign(tuple_of(parts))


class NamedTupleNode(Structure):
    __slots__ = ()

    def write(self, writer: RebuildWriter, parts: list[str]) -> str:
        return writer.assign(f"new_tuple({writer.constant(self.kind)}, {tuple_of(parts)})")


class ListNode(Structure):
    __slots__ = ()
    is_fixed = False

    def write(self, writer: RebuildWriter, parts: list[str]) -> str:
        return writer.assign(f"[{', '.join(parts)}]")


class DictNode(Structure):
    """`meta` is the tuple of keys, sorted as JAX sorts them."""

    __slots__ = ()
    is_fixed = False

    def write(self, writer: RebuildWriter, parts: list[str]) -> str:
        keys = map(writer.constant, self.meta)
        items = (f"{key}: {part}" for key, part in zip(keys, parts, strict=True))
        return writer.assign(f"{{{', '.join(items)}}}")


class ForeignNode(Structure):
    """Any other type registered with JAX; `meta` is the treedef of this one level."""

    __slots__ = ()
    is_fixed = False

    def write(self, writer: RebuildWriter, parts: list[str]) -> str:
        return writer.assign(f"{writer.constant(self.meta.unflatten)}({tuple_of(parts)})")


_interned: weakref.WeakValueDictionary[Hashable, Structure] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def intern(
    sort: type[Structure],
    kind: type,
    meta: Any,
    meta_key: StaticKey,
    children: tuple[Structure, ...],
) -> Structure:
    """The one Structure with these parts; `meta_key` tells its meta from others."""
    # By their `id`s: a child may hold a closure, and that a compiled function for this Structure.
    key = (sort, kind, meta_key.key, tuple(map(id, children)))
    found = _interned.get(key)
    if found is None:
        with _lock:
            found = _interned.get(key)
            if found is None:
                # The Structure holds what the `id`s are of, and its entry goes when it does.
                found = _interned[key] = sort(kind, meta, meta_key, children)
    return found


NO_META = StaticKey(None)

ARRAY = ArrayLeaf(object, None, NO_META, ())
ARRAY.num_arrays = 1


def static_leaf(value: Any) -> Structure:
    """The Structure of a static leaf. Raises `TypeError` if `value` is not hashable."""
    key = StaticKey((value,))
    meta = value
    if type(value) is functools.partial and not key.holds_mutable:
        # Its dict of keywords may be written to, and one of equal parts shares this Structure.
        meta = functools.partial(value.func, *value.args, **value.keywords)
    return intern(StaticLeaf, type(value), meta, key, ())


def held_leaf(value: Any) -> Structure:
    """The Structure of a static leaf that is not hashable, for as long as it holds what it does."""
    return intern(StaticLeaf, type(value), value, StaticKey(value, by_contents=True), ())


def opaque_leaf(value: Any) -> Structure:
    """The Structure of a static leaf that is not hashable, shared with nothing."""
    return intern(StaticLeaf, type(value), value, StaticKey((_Opaque(value),)), ())


class _Opaque:
    """Hashes by identity, and may change."""

    def __init__(self, value: Any):
        self.value = id(value)


def num_interned() -> int:
    """How many Structures are alive."""
    return len(_interned)
