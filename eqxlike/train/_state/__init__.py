"""The state of a training, its arithmetic in half precision, and what keeps it finite."""

from ._finite import all_finite as all_finite
from ._finite import tree_where as tree_where
from ._guard import SMALL as SMALL
from ._guard import halt_if_not_finite as halt_if_not_finite
from ._guard import is_kept_finite as is_kept_finite
from ._guard import keep_if_finite as keep_if_finite
from ._guard import register_unguarded as register_unguarded
from ._guard import skip_overflow as skip_overflow
from ._guard import unguarded as unguarded
from ._loss_scale import DynamicLossScale as DynamicLossScale
from ._state import Model as Model
from ._state import TrainState as TrainState
from ._state import copy_arrays as copy_arrays
