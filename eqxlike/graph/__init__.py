"""Reports on what JAX and XLA made of a function: operations by layer, costs, memory, gradients."""

from ._report import Compiled as Compiled
from ._report import Constant as Constant
from ._report import Effect as Effect
from ._report import Memory as Memory
from ._report import Report as Report
from ._report import report as report
from ._rows import Row as Row
from ._rows import Side as Side
from ._rows import Stored as Stored
from ._stable import RULES as RULES
from ._stable import Rewrite as Rewrite
from ._stable import Rule as Rule
from ._stable import Unstable as Unstable
from ._stable import stabilise as stabilise
from ._stable import unstable as unstable
