"""The types of node, a file each: how one is opened, how its children are named in a path, how it
is built again, and how the guard of a warm call asks for it.
"""

from ._array import ARRAY as ARRAY
from ._array import ArrayLeaf as ArrayLeaf
from ._array import are_concrete_arrays as are_concrete_arrays
from ._array import concrete_array_types as concrete_array_types
from ._dict import DictNode as DictNode
from ._foreign import ForeignNode as ForeignNode
from ._list import ListNode as ListNode
from ._module import ModuleNode as ModuleNode
from ._namedtuple import NamedTupleNode as NamedTupleNode
from ._open import open_node as open_node
from ._row import MIN_ROW as MIN_ROW
from ._row import Row as Row
from ._row import make_row as make_row
from ._static_leaf import StaticLeaf as StaticLeaf
from ._static_leaf import identity_leaf as identity_leaf
from ._static_leaf import opaque_leaf as opaque_leaf
from ._static_leaf import static_leaf as static_leaf
from ._tuple import TupleNode as TupleNode
