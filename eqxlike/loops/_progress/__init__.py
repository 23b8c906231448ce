"""How far a loop has come."""

from ._bar import ProgressBar as ProgressBar
from ._bar import progress as progress
