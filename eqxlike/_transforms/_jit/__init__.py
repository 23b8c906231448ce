"""`filter_jit`: for each call, finds or compiles a function that takes a flat list of arrays.

The modules in reading order (docs/design.md gives an overview of the fast and the slow path of a
call):

- `_filter_jit`: the public function, the callable that it returns, and its dispatcher.
- `_dispatch`: the slow path of a call, from its arguments to `jax.jit` and back.
- `_fast_path`: the generated function that later calls try first.
- `_donation_warnings`: hides JAX's warnings about unusable donated buffers.
- `_callables`: splits a callable into a function and its bound arguments.
- `_arguments`: canonical order of arguments; shardings, donation, notes on errors.
- `_traces`: records of traces, and explanations of retraces.
- `_lowered`, `_fresh_trace`, `_timed`: ahead-of-time lowering, traces for reports, timing.
"""

from ._callables import Options as Options
from ._dispatch import clear_caches as clear_caches
from ._filter_jit import JitFunction as JitFunction
from ._filter_jit import filter_jit as filter_jit
from ._fresh_trace import FreshTrace as FreshTrace
from ._fresh_trace import fresh_trace as fresh_trace
from ._lowered import CompilingDecorator as CompilingDecorator
from ._lowered import Lowerable as Lowerable
from ._lowered import Lowered as Lowered
from ._traces import Trace as Trace
