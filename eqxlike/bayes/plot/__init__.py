"""Pictures of predictions, of how far to believe them, and of how well chains have mixed.

Each function draws in the matplotlib axes that are passed, or in those of a new figure, and returns
them. pyplot does not manage a new figure: `axes.figure.savefig("file.png")` writes it, and a
notebook shows `axes.figure`.
"""

import typing as _typing

from ..._moved import former_names as _former_names
from ._bands import bands as bands
from ._calibration import coverage as coverage
from ._calibration import reliability as reliability
from ._chains import ranks as ranks
from ._chains import sbc_ranks as sbc_ranks

if not _typing.TYPE_CHECKING:
    __getattr__ = _former_names(__name__)
