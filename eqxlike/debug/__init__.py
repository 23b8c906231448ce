"""Debugging tools: breakpoints, NaN search, dead code, retraces."""

from ._interpreter import NonFinite as NonFinite
from ._interpreter import Values as Values
from ._nonfinite import find_nonfinite as find_nonfinite
from ._traces import RetraceError as RetraceError
from ._traces import RetraceWarning as RetraceWarning
from ._traces import Trace as Trace
from ._traces import TraceDifference as TraceDifference
from ._traces import assert_max_traces as assert_max_traces
from ._traces import explain_retraces as explain_retraces
from ._traces import get_num_traces as get_num_traces
from ._watch import announce_transform as announce_transform
from ._watch import backward_nan as backward_nan
from ._watch import breakpoint_if as breakpoint_if
from ._watch import inspect_dce as inspect_dce
from ._watch import store_dce as store_dce
