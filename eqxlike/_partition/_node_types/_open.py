"""The type of node that a value is."""

from typing import Any

from ..._module import ModuleMeta
from .._structure import Opened
from ._array import is_array_of_jax
from ._dict import DictNode
from ._foreign import ForeignNode, flatten_one_level
from ._list import ListNode
from ._module import ModuleNode
from ._namedtuple import NamedTupleNode
from ._tuple import TupleNode

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
