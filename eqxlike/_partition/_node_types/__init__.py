"""The types of node, a file each: how one is opened, how its children are named in a path, how it
is built again, and how the guard of a warm call asks for it.
"""

from ._containers import DictNode as DictNode
from ._containers import ListNode as ListNode
from ._containers import NamedTupleNode as NamedTupleNode
from ._containers import TupleNode as TupleNode
from ._leaves import ARRAY as ARRAY
from ._leaves import ArrayLeaf as ArrayLeaf
from ._leaves import StaticLeaf as StaticLeaf
from ._leaves import are_concrete_arrays as are_concrete_arrays
from ._leaves import concrete_array_types as concrete_array_types
from ._leaves import identity_leaf as identity_leaf
from ._leaves import opaque_leaf as opaque_leaf
from ._leaves import static_leaf as static_leaf
from ._module import ModuleNode as ModuleNode
from ._open import ForeignNode as ForeignNode
from ._open import open_node as open_node
from ._row import MIN_ROW as MIN_ROW
from ._row import Row as Row
from ._row import make_row as make_row
