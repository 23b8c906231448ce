"""What a compiled function was traced for, and what differs from one trace to the next.

`_outline` says in text what is static in the arguments and `_array_form` what JAX knows of an
array when it traces; `_differences` compares two traces by these and by JAX's settings
(`_settings`). `_history` keeps the traces of one function, `_observer` adds those of one compiled
function to it, and `_policy` decides what a further trace leads to.
"""

from ._differences import TraceDifference as TraceDifference
from ._history import History as History
from ._history import compared_with as compared_with
from ._history import place_of as place_of
from ._observer import Observer as Observer
from ._observer import listening as listening
from ._observer import react as react
from ._trace import OnRetrace as OnRetrace
from ._trace import Policy as Policy
from ._trace import RetraceError as RetraceError
from ._trace import RetraceWarning as RetraceWarning
from ._trace import Trace as Trace
from ._trace import check_on_retrace as check_on_retrace
