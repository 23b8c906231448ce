"""Building blocks for custom rules of `graph.stabilise`, and functions that inspect operations."""

from ._stable._expressions import Part as Part
from ._stable._expressions import Parts as Parts
from ._stable._expressions import Step as Step
from ._stable._expressions import Value as Value
from ._stable._expressions import argument_of as argument_of
from ._stable._expressions import constant_of as constant_of
from ._stable._expressions import factors_of as factors_of
from ._stable._expressions import is_same as is_same
from ._stable._expressions import terms_of as terms_of
from ._stable._rewrite import Rewrite as Rewrite
from ._stable._rewrite import Rule as Rule
from ._stable._stabilise import RULES as RULES
