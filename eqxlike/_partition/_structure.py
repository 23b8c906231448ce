"""Structures: what is left of a tree when its arrays are taken away, each kept once.

A `Structure` is interned: as long as it lives, an equal one is the same object, so that on a warm
call "is it the same structure?" is one comparison of identities. It is made of the Structures of
its children, down to `ARRAY` and to static leaves.
"""

import threading
import weakref
from collections.abc import Hashable
from typing import Any

from ._static_key import StaticKey


class Structure:
    """Base of the sorts of node. Made by `intern` only; compared by identity.

    - `kind`: the type of the node.
    - `meta`: what else the node needs to be built again; the value, for a static leaf.
    - `children`: the Structures of the children.
    - `num_arrays`: how many arrays the subtree holds.
    - `is_keepable`: whether nothing inside can change behind the back of who holds the arrays:
        no list, no dict, no foreign node, no mutable static value.
    - `generated`: functions generated for this Structure, made on first use.
    """

    __slots__ = (
        "__weakref__",
        "children",
        "generated",
        "held",
        "is_keepable",
        "kind",
        "meta",
        "num_arrays",
    )

    is_fixed = True
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
        self.generated: dict[Hashable, Any] = {}


class ArrayLeaf(Structure):
    __slots__ = ()


class StaticLeaf(Structure):
    """A leaf that is no array, or `None`; `meta` is its value."""

    __slots__ = ()


class ModuleNode(Structure):
    """`kind` is the class and `meta` the values of its static fields."""

    __slots__ = ()


class TupleNode(Structure):
    __slots__ = ()


class NamedTupleNode(Structure):
    __slots__ = ()


class ListNode(Structure):
    __slots__ = ()
    is_fixed = False


class DictNode(Structure):
    """`meta` is the tuple of keys, sorted as JAX sorts them."""

    __slots__ = ()
    is_fixed = False


class ForeignNode(Structure):
    """Any other type registered with JAX; `meta` is the treedef of this one level."""

    __slots__ = ()
    is_fixed = False


_interned: weakref.WeakValueDictionary[Hashable, Structure] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def intern(
    sort: type[Structure], kind: type, meta: Any, meta_key: Any, children: tuple[Structure, ...]
) -> Structure:
    """The one Structure with these parts.

    **Arguments:**

    - `meta_key`: what tells this meta from others, a static value.

    **Raises:** `TypeError` if `meta_key` is not hashable.
    """
    static = _NO_META if meta_key is None else StaticKey(meta_key)
    key = (sort, kind, static.key, children)
    found = _interned.get(key)
    if found is None:
        with _lock:
            found = _interned.get(key)
            if found is None:
                # The table holds `id`s; the Structure holds what they are the `id`s of, and
                # its entry goes when it does.
                found = _interned[key] = sort(kind, meta, static, children)
    return found


_NO_META = StaticKey(None)

ARRAY = ArrayLeaf(object, None, _NO_META, ())
ARRAY.num_arrays = 1


def static_leaf(value: Any) -> Structure:
    """The Structure of a static leaf. Raises `TypeError` if `value` is not hashable."""
    return intern(StaticLeaf, type(value), value, (value,), ())


def num_interned() -> int:
    """How many Structures are alive."""
    return len(_interned)
