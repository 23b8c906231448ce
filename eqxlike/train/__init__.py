"""Training: a state, a step made from a loss, a loop, loss scaling, minibatches and progress."""

from ._batches import minibatches as minibatches
from ._finite import all_finite as all_finite
from ._finite import tree_where as tree_where
from ._fit import FitResult as FitResult
from ._fit import fit as fit
from ._guard import keep_if_finite as keep_if_finite
from ._loss_scale import DynamicLossScale as DynamicLossScale
from ._progress import progress as progress
from ._state import TrainState as TrainState
from ._step import make_step as make_step
