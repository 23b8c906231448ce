"""Finding the operation that made a NaN or an infinity."""

from ._find import find_nonfinite as find_nonfinite
from ._walk import NonFinite as NonFinite
from ._walk import Values as Values
