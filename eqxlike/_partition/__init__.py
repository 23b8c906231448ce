"""The partition of trees into arrays and interned Structure, kept on Modules."""

from ._flatten import concrete_array_types as concrete_array_types
from ._flatten import flatten as flatten
from ._split import Rest as Rest
from ._split import split as split
from ._split import split_leaves as split_leaves
from ._static_key import StaticKey as StaticKey
from ._structure import ARRAY as ARRAY
from ._structure import ArrayLeaf as ArrayLeaf
from ._structure import DictNode as DictNode
from ._structure import ListNode as ListNode
from ._structure import ModuleNode as ModuleNode
from ._structure import NamedTupleNode as NamedTupleNode
from ._structure import StaticLeaf as StaticLeaf
from ._structure import Structure as Structure
from ._structure import TupleNode as TupleNode
from ._structure import num_interned as num_interned
