"""Plots of predictions and of their calibration.

Each function draws into the given matplotlib axes, or into a new figure, and returns the axes.
pyplot does not manage a new figure: save the figure by `axes.figure.savefig("file.png")`, or show
`axes.figure` in a notebook.
"""

import typing as _typing

from ..._names import former_names as _former_names
from ._plot import bands as bands
from ._plot import coverage as coverage
from ._plot import reliability as reliability
from ._plot import sbc_ranks as sbc_ranks

if not _typing.TYPE_CHECKING:
    __getattr__ = _former_names(__name__)
