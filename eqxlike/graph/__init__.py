"""Reports on what JAX and XLA made of a function: operations by layer, costs, memory, gradients."""

from ._parts import Compiled as Compiled
from ._parts import Constant as Constant
from ._parts import Effect as Effect
from ._parts import Memory as Memory
from ._parts import Row as Row
from ._parts import Side as Side
from ._parts import Stored as Stored
from ._report import Report as Report
from ._report import report as report
