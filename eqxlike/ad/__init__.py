"""Differentiation: the modes, and what is taken by them."""

from ._modes import Auto as Auto
from ._modes import Checkpointed as Checkpointed
from ._modes import Enzyme as Enzyme
from ._modes import FiniteDifference as FiniteDifference
from ._modes import Forward as Forward
from ._modes import Mode as Mode
from ._modes import Reverse as Reverse
