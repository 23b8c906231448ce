"""The modes of differentiation."""

from ._checkpointed import Checkpointed as Checkpointed
from ._finite_difference import FiniteDifference as FiniteDifference
from ._forward_reverse import Auto as Auto
from ._forward_reverse import Enzyme as Enzyme
from ._forward_reverse import Forward as Forward
from ._forward_reverse import Reverse as Reverse
from ._mode import Mode as Mode
