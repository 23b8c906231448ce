"""`filter_jit`: from a call to the function of flat arrays that is compiled for it.

In the order of reading; docs/design.md has the whole picture, with both ways that a call takes:

- `_filter_jit`: the public function, the callable that it returns, and its dispatcher.
- `_dispatch`: a call, from its arguments to `jax.jit` and back: the compiled function for them, and
  its trace.
- `_fast_path`: the generated function that later calls try before all of this.
- `_callables`: the function behind a callable, and the arguments bound to it.
- `_arguments`: one order for the arguments of all calls; placement, donation, notes on errors.
- `_traces`: why there was another trace.
- `_lowered`, `_fresh_trace`, `_timed`: functions lowered ahead of time, traced for a report, timed.
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
