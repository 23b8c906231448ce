"""The partition of trees into arrays and an interned Structure, cached on Modules.

The files, in the order in which to read them. docs/design.md gives an overview.

- `_flatten`: the walk from a tree to its arrays and its Structure, and the checking mode. Also
  `split`, for transformations that cache nothing between calls.
- `_structure`: `Structure`, its subclass for each type of node, such as a tuple or a Module, and
  the table that makes Structures unique.
- `_writers`: generated code that rebuilds a tree, and generated code that checks a tree in a warm
  call.
- `_static_key`: keys that decide if two static values may share a trace, and generated code that
  compares them.
- `_described`: descriptions of trees as text, made from Structures, for messages and files.
"""

from ._described import ArrayForm as ArrayForm
from ._described import Node as Node
from ._described import Tree as Tree
from ._described import describe as describe
from ._described import describe_by_text as describe_by_text
from ._described import described as described
from ._described import differing as differing
from ._described import from_plain as from_plain
from ._described import identity_of as identity_of
from ._described import key_of as key_of
from ._described import root_node as root_node
from ._described import to_plain as to_plain
from ._flatten import UNTRACED as UNTRACED
from ._flatten import PartitionError as PartitionError
from ._flatten import Rest as Rest
from ._flatten import are_concrete_arrays as are_concrete_arrays
from ._flatten import checking_partitions as checking_partitions
from ._flatten import find_static_difference as find_static_difference
from ._flatten import flatten as flatten
from ._flatten import is_checking as is_checking
from ._flatten import is_same_static as is_same_static
from ._flatten import split as split
from ._flatten import split_leaves as split_leaves
from ._flatten import when_switched_on as when_switched_on
from ._static_key import ATOMS as ATOMS
from ._static_key import PLAIN_TYPES as PLAIN_TYPES
from ._static_key import StaticKey as StaticKey
from ._static_key import is_hashable as is_hashable
from ._structure import ARRAY as ARRAY
from ._structure import Row as Row
from ._structure import StaticLeaf as StaticLeaf
from ._structure import Structure as Structure
from ._structure import num_interned as num_interned
from ._writers import GuardWriter as GuardWriter
from ._writers import concrete_array_types as concrete_array_types
