"""Finding the operation that made a NaN or an infinity."""

from ._find import find_nonfinite as find_nonfinite
from ._report import NonFinite as NonFinite
from ._report import Values as Values
