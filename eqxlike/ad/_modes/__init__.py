"""The modes of differentiation, one a file."""

from ._auto import Auto as Auto
from ._checkpointed import Checkpointed as Checkpointed
from ._enzyme import Enzyme as Enzyme
from ._finite_difference import FiniteDifference as FiniteDifference
from ._forward import Forward as Forward
from ._mode import Mode as Mode
from ._reverse import Reverse as Reverse
