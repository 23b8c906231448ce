"""What is known of a trace, for those who are told of it."""

from .._transforms import RetraceError as RetraceError
from .._transforms import RetraceWarning as RetraceWarning
from .._transforms import Trace as Trace
from .._transforms import TraceDifference as TraceDifference
