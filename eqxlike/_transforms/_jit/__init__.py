"""`filter_jit`: from a call to the function of flat arrays that is compiled for it.

`_filter_jit` finds the function behind a wrapped callable, `_arguments` brings the arguments of a
call into one order, and `_dispatch` has the rest of the call: the compiled function for them, kept
in a `_cache`, and the generated function that is tried before all of this. `_traces` says why there
was another trace.
"""

from ._filter_jit import JitFunction as JitFunction
from ._filter_jit import Options as Options
from ._filter_jit import clear_caches as clear_caches
from ._filter_jit import filter_jit as filter_jit
from ._fresh_trace import FreshTrace as FreshTrace
from ._fresh_trace import fresh_trace as fresh_trace
from ._lowered import AnyArguments as AnyArguments
from ._lowered import CompilingDecorator as CompilingDecorator
from ._lowered import Function as Function
from ._lowered import Lowerable as Lowerable
from ._lowered import Lowered as Lowered
from ._lowered import Method as Method
from ._timed import CallTimes as CallTimes
from ._timed import timing_calls as timing_calls
from ._traces import History as History
from ._traces import RetraceError as RetraceError
from ._traces import RetraceWarning as RetraceWarning
from ._traces import Trace as Trace
from ._traces import TraceDifference as TraceDifference
from ._traces import check_on_retrace as check_on_retrace
from ._traces import compared_with as compared_with
from ._traces import listening as listening
from ._traces import react as react
