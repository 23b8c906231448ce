"""Names for authors of libraries. They are not in the main namespace.

The parts of eqxlike that build on its core are `train`, `bayes`, `graph`, `debug`, export and the
profiler. They use only public names and the names in this module, except that `bayes` also uses
the Bayesian layers and two private files of `nn`. As in `jax.extend`, a name may change in a minor
release; the changelog lists the change. Each name has a docstring.

- Partitions: `flatten` splits a tree into its arrays and an interned, hashable `Structure`.
  `split` splits a tree for a transformation that caches nothing between calls.
- Trees as plain data: `described` lists the paths, shapes, dtypes and static values of a tree.
  `find_difference` says where two trees differ.
- Paths: `path_matches` and `paths_without_numbers` select leaves by patterns.
- Traces: `trace_of` describes a function and its arguments, and `compare_traces` lists the
  differences between two such descriptions. `fresh_trace` returns the program of a call.
"""

from ._module import BoundMethod as BoundMethod
from ._module import Wrapper as Wrapper
from ._module import observe_calls as observe_calls
from ._partition import ArrayForm as ArrayForm
from ._partition import Node as Node
from ._partition import Rest as Rest
from ._partition import Structure as Structure
from ._partition import Tree as Tree
from ._partition import are_concrete_arrays as are_concrete_arrays
from ._partition import describe as describe
from ._partition import describe_by_text as describe_by_text
from ._partition import described as described
from ._partition import find_static_difference as find_static_difference
from ._partition import flatten as flatten
from ._partition import from_plain as from_plain
from ._partition import is_hashable as is_hashable
from ._partition import is_same_static as is_same_static
from ._partition import key_of as key_of
from ._partition import root_node as root_node
from ._partition import split as split
from ._partition import to_plain as to_plain
from ._pytree import MISSING as MISSING
from ._pytree import Which as Which
from ._pytree import committed_sharding as committed_sharding
from ._pytree import deleted_paths as deleted_paths
from ._pytree import describe_node as describe_node
from ._pytree import find_difference as find_difference
from ._pytree import fingerprint as fingerprint
from ._pytree import flag_frozen as flag_frozen
from ._pytree import is_array_or_struct as is_array_or_struct
from ._pytree import is_on_cpu as is_on_cpu
from ._pytree import is_reference as is_reference
from ._pytree import listed as listed
from ._pytree import open_to_replace as open_to_replace
from ._pytree import path_matches as path_matches
from ._pytree import paths_without_numbers as paths_without_numbers
from ._pytree import same_shape_and_dtype as same_shape_and_dtype
from ._transforms._checks import note_check as note_check
from ._transforms._derivatives._linear_call import has_tangent as has_tangent
from ._transforms._jit._differences import TraceDifference as TraceDifference
from ._transforms._jit._filter_jit import JitFunction as JitFunction
from ._transforms._jit._measured import CallTimes as CallTimes
from ._transforms._jit._measured import FreshTrace as FreshTrace
from ._transforms._jit._measured import fresh_trace as fresh_trace
from ._transforms._jit._measured import timing_calls as timing_calls
from ._transforms._jit._traces import History as History
from ._transforms._jit._traces import RetraceError as RetraceError
from ._transforms._jit._traces import RetraceWarning as RetraceWarning
from ._transforms._jit._traces import Trace as Trace
from ._transforms._jit._traces import check_on_retrace as check_on_retrace
from ._transforms._jit._traces import compare_traces as compare_traces
from ._transforms._jit._traces import listen_to_traces as listen_to_traces
from ._transforms._jit._traces import react_to_trace as react_to_trace
from ._transforms._jit._traces import trace_of as trace_of
from ._transforms._jit._traces import traces_compared_with as traces_compared_with
from ._transforms._signatures import check_callable as check_callable
from ._transforms._stacked import Gathering as Gathering
from ._transforms._stacked import NamedLeaf as NamedLeaf
from ._transforms._stacked import Stacked as Stacked
from ._transforms._stacked import named_leaves as named_leaves
