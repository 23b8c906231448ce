"""Formulas that lose digits: found, and rewritten."""

from ._expressions import Rewrite as Rewrite
from ._rewrite import Rule as Rule
from ._rules import RULES as RULES
from ._stabilise import Unstable as Unstable
from ._stabilise import stabilise as stabilise
from ._stabilise import unstable as unstable
from ._stabilise import unstable_in as unstable_in
