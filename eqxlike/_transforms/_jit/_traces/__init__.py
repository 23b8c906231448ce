"""Records of traces, and explanations of retraces.

`_statics` describes the static values in the arguments. `_differences` compares two traces by these
descriptions, by the types of their arrays, and by JAX's settings. `_history` keeps the traces of
one function, and reacts to retraces.
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
from ._history import compare as compare
from ._history import compared_with as compared_with
from ._history import listening as listening
from ._history import place_of as place_of
from ._history import react as react
from ._history import trace_of as trace_of
