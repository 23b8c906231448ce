"""Building blocks for custom rules of `graph.stabilise`, and functions that inspect operations."""

from ._stable import RULES as RULES
from ._stable import Part as Part
from ._stable import Parts as Parts
from ._stable import Rewrite as Rewrite
from ._stable import Rule as Rule
from ._stable import Step as Step
from ._stable import Value as Value
from ._stable import argument_of as argument_of
from ._stable import constant_of as constant_of
from ._stable import factors_of as factors_of
from ._stable import is_same as is_same
from ._stable import terms_of as terms_of
