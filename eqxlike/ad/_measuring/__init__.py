"""Functions compiled, predicted and timed."""

from ._jaxprs import largest_epsilon as largest_epsilon
from ._pace import Pace as Pace
from ._pace import pace_of as pace_of
from ._program import compiled_anew as compiled_anew
from ._timed import Call as Call
from ._timed import Times as Times
from ._timed import time_beside as time_beside
