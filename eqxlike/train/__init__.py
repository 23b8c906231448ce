"""Training: a state, a step made from a loss, a loop, minibatches and a progress display."""

from ._batches import minibatches as minibatches
from ._fit import FitResult as FitResult
from ._fit import fit as fit
from ._progress import progress as progress
from ._state import TrainState as TrainState
from ._step import keep_if_finite as keep_if_finite
from ._step import make_step as make_step
