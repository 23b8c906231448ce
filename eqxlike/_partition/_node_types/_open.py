"""The type of node that a value is."""

import itertools
from collections.abc import Sequence
from typing import Any

import jax.tree_util as jtu

from ..._module import ModuleMeta
from .._guard import GuardWriter
from .._rebuild import RebuildWriter, tuple_of
from .._structure import Opened, Structure
from ._containers import DictNode, ListNode, NamedTupleNode, TupleNode
from ._leaves import is_array_of_jax
from ._module import ModuleNode

_OF_PYTHON = {tuple: TupleNode, list: ListNode, dict: DictNode}


def open_node(value: Any) -> Opened | None:
    """The node that `value` is, or `None` if it is a leaf. `None` itself counts as a leaf here."""
    node_type = type(value)
    structure_type = _OF_PYTHON.get(node_type)
    if structure_type is not None:
        return structure_type.open(value)
    if is_array_of_jax(value):
        return None
    if isinstance(node_type, ModuleMeta):
        return ModuleNode.open(value)
    flattened = flatten_one_level(value)
    if flattened is None:
        return None
    children, data = flattened
    # For a namedtuple that nobody has registered, JAX gives its class as the data.
    if data is node_type and isinstance(value, tuple):
        return NamedTupleNode.open(value)
    return ForeignNode.open(value, children, data)


# A node of any other type that is registered with JAX. Its `meta` is the treedef of this level.


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
