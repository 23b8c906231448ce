"""Export of functions to files that run without the source of the model."""

from ._export import export as export
from ._exported import Exported as Exported
from ._exported import load_exported as load_exported
