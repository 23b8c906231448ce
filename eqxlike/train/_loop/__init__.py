"""`fit`: the training loop, its schedule, and its iterator over batches."""

from ._fit import FitResult as FitResult
from ._fit import fit as fit
