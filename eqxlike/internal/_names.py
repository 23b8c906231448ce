"""Names that differ from those of the same things elsewhere."""

from ..debug import backward_nan

debug_backward_nan = backward_nan
