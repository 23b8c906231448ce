"""The loop: what it takes, how fast, and what is due after which steps."""

from ._fit import FitResult as FitResult
from ._fit import fit as fit
