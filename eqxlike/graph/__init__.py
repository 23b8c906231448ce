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
from ._stable import Part as Part
from ._stable import Parts as Parts
from ._stable import Rewrite as Rewrite
from ._stable import Rule as Rule
from ._stable import Step as Step
from ._stable import Unstable as Unstable
from ._stable import Value as Value
from ._stable import argument_of as argument_of
from ._stable import constant_of as constant_of
from ._stable import factors_of as factors_of
from ._stable import is_same as is_same
from ._stable import stabilise as stabilise
from ._stable import terms_of as terms_of
from ._stable import unstable as unstable
