"""`filter_jit`: for each call, finds or compiles a function that takes a flat list of arrays.

The modules in reading order (docs/design.md gives an overview of the fast and the slow path of a
call):

- `_filter_jit`: the public function, the callable that it returns, its errors and its dispatcher.
- `_dispatch`: the slow path of a call, from its arguments to `jax.jit` and back.
- `_fast_path`: the generated function that later calls try first.
- `_arguments`: a callable as a function and its bound arguments; the order of arguments.
- `_traces`, `_differences`: records of traces, and explanations of retraces.
- `_measured`: traces and times for reports.
"""

from ._dispatch import clear_caches as clear_caches
from ._filter_jit import CompilingDecorator as CompilingDecorator
from ._filter_jit import JitFunction as JitFunction
from ._filter_jit import Lowerable as Lowerable
from ._filter_jit import Lowered as Lowered
from ._filter_jit import Options as Options
from ._filter_jit import filter_jit as filter_jit
from ._measured import FreshTrace as FreshTrace
from ._measured import fresh_trace as fresh_trace
from ._traces import Trace as Trace
