"""The partition of trees into arrays and an interned Structure, cached on Modules.

In the order of reading; docs/design.md has the whole picture:

- `_structure`: what a Structure is, the table that makes it unique, and how it rebuilds a tree.
- `_node_types`: a class for each type of node, such as a tuple or a Module.
- `_flatten`: the walk from a tree to its arrays and its Structure.
- `_guard`: the generated check of a warm call, which replaces that walk.
- `_static_key`: when two static values are the same.
- `_split`: dynamic and static leaves, for transformations that cache nothing between calls.
"""

from ._flatten import flatten as flatten
from ._guard import GuardWriter as GuardWriter
from ._node_types import ARRAY as ARRAY
from ._node_types import ArrayLeaf as ArrayLeaf
from ._node_types import DictNode as DictNode
from ._node_types import ForeignNode as ForeignNode
from ._node_types import ListNode as ListNode
from ._node_types import ModuleNode as ModuleNode
from ._node_types import NamedTupleNode as NamedTupleNode
from ._node_types import Row as Row
from ._node_types import StaticLeaf as StaticLeaf
from ._node_types import TupleNode as TupleNode
from ._node_types import are_concrete_arrays as are_concrete_arrays
from ._node_types import concrete_array_types as concrete_array_types
from ._split import UNTRACED as UNTRACED
from ._split import Rest as Rest
from ._split import find_static_difference as find_static_difference
from ._split import is_same_static as is_same_static
from ._split import split as split
from ._split import split_leaves as split_leaves
from ._static_key import ATOMS as ATOMS
from ._static_key import PLAIN_TYPES as PLAIN_TYPES
from ._static_key import StaticKey as StaticKey
from ._structure import Structure as Structure
from ._structure import num_interned as num_interned
