"""Records of traces, and explanations of retraces.

`_statics` describes the static values in the arguments. `_differences` compares the static values,
the types of the arrays and JAX's settings of two traces. `_history` keeps the traces of one
function, and reacts to retraces.
"""

from ._differences import TraceDifference as TraceDifference
from ._history import History as History
from ._history import Observer as Observer
from ._history import OnRetrace as OnRetrace
from ._history import Policy as Policy
from ._history import RetraceError as RetraceError
from ._history import RetraceWarning as RetraceWarning
from ._history import Trace as Trace
from ._history import check_on_retrace as check_on_retrace
from ._history import compare_traces as compare_traces
from ._history import listen_to_traces as listen_to_traces
from ._history import place_of as place_of
from ._history import react_to_trace as react_to_trace
from ._history import trace_of as trace_of
from ._history import traces_compared_with as traces_compared_with
