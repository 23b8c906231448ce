"""Numerically unstable formulas: found in a traced program, and rewritten."""

from ._expressions import Part as Part
from ._expressions import Parts as Parts
from ._expressions import Step as Step
from ._expressions import Value as Value
from ._expressions import argument_of as argument_of
from ._expressions import constant_of as constant_of
from ._expressions import factors_of as factors_of
from ._expressions import is_same as is_same
from ._expressions import terms_of as terms_of
from ._rewrite import Rewrite as Rewrite
from ._rewrite import Rule as Rule
from ._rules import RULES as RULES
from ._stabilise import Unstable as Unstable
from ._stabilise import stabilise as stabilise
from ._stabilise import unstable as unstable
from ._stabilise import unstable_in as unstable_in
