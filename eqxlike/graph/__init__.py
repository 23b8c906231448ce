"""Reports on the operations, costs and memory of programs; stable forms of unstable formulas."""

import typing as _typing

from .._names import former_names as _former_names
from . import rules as rules
from ._report import Report as Report
from ._report import report as report
from ._stable._stabilise import stabilise as stabilise
from ._stable._stabilise import unstable as unstable

if not _typing.TYPE_CHECKING:
    __getattr__ = _former_names(__name__)
