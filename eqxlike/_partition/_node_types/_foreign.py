"""A node of any other type that is registered with JAX. Its `meta` is the treedef of this level."""

import itertools
from collections.abc import Sequence
from typing import Any

import jax.tree_util as jtu

from .._guard import GuardWriter
from .._rebuild import RebuildWriter, tuple_of
from .._structure import Opened, Structure

flatten_one_level = jtu.default_registry.flatten_one_level


class ForeignNode(Structure):
    __slots__ = ()

    is_fixed = False
    takes_sequence = True

    @staticmethod
    def open(value: Any, children: Sequence[Any], data: Any) -> Opened:
        """The node `value`, which its own function has flattened to `children` and `data`."""
        return Opened(ForeignNode, lambda: _Meta(value, data), data, (*children,), "[{}]".format)

    def write_build(self, writer: RebuildWriter, parts: list[str]) -> str:
        children = parts[0] if self.has_sequence else tuple_of(parts)
        return writer.assign(f"{writer.constant(self.meta.treedef.unflatten)}({children})")

    def write_guard(self, writer: GuardWriter, name: str) -> Sequence[str]:
        writer.miss_if(f"type({name}) is not {writer.constant(self.node_type)}")
        children, data = writer.unpack(f"{writer.constant(flatten_one_level)}({name})", 2)
        writer.miss_if_static_differs(data, self.meta.data)
        if self.has_sequence:
            return [writer.assign(f"(*{children},)")]
        return writer.unpack(children, len(self.children))


class _Meta:
    """The treedef that builds a node again, and the `data` that its own function gave."""

    __slots__ = ("data", "treedef")

    def __init__(self, value: Any, data: Any):
        self.data = data
        # JAX asks about the node itself first. Identity cannot tell it: it may contain itself.
        is_child = itertools.chain((False,), itertools.repeat(True))
        self.treedef = jtu.tree_structure(value, is_leaf=lambda _: next(is_child))
