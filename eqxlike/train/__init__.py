"""Training: a state, a step made from a loss, and a loop over batches.

Modules that you can use in a training loop of your own, in reading order:

- `_state`: `TrainState`, the input and output of a step; the signatures that a loss may have.
- `_step`: `make_step`.
- `_guards`: checks for NaN and infinity. `_loss_scale`: float16 gradients. `_ema`: averaged
  parameters.
- `_as_arrays`: conversion of batches to arrays. `_batches`: minibatches, repetition, prefetching.
  `_batches_from`: batches from the data loaders of other libraries.
- `_make_evaluate`, `metrics`: metrics of a model over batches.

Modules for the loop of eqxlike, `fit`:

- `_loop`: `fit`, its schedule, and the number of steps in one call.
- `_run`: `Run`, the state of a training run that callbacks see, and calls of the step.
- `_callbacks`: logging, checkpoints and early stopping.
- `_checkpoints`, `_safetensors`: reading and writing of files.
- `_sharding`: training on several devices.

`_checks` validates arguments that several functions share.
"""

import typing as _typing

from .._names import former_names as _former_names
from . import metrics as metrics
from ._batches import Prefetch as Prefetch
from ._batches import minibatches as minibatches
from ._batches import prefetch as prefetch
from ._batches import repeat as repeat
from ._batches_from import batches_from as batches_from
from ._callbacks import Callback as Callback
from ._callbacks import Checkpoint as Checkpoint
from ._callbacks import EarlyStopping as EarlyStopping
from ._callbacks import JsonLines as JsonLines
from ._callbacks import Progress as Progress
from ._callbacks import TensorBoard as TensorBoard
from ._callbacks import progress as progress
from ._checkpoints import CheckpointError as CheckpointError
from ._checkpoints import CheckpointFolder as CheckpointFolder
from ._checkpoints import Restored as Restored
from ._checkpoints import Saving as Saving
from ._checkpoints import restore as restore
from ._checkpoints import save as save
from ._ema import EMA as EMA
from ._guards import all_finite as all_finite
from ._guards import keep_if_finite as keep_if_finite
from ._guards import tree_where as tree_where
from ._loop import FitResult as FitResult
from ._loop import fit as fit
from ._loss_scale import DynamicLossScale as DynamicLossScale
from ._make_evaluate import make_evaluate as make_evaluate
from ._run import Run as Run
from ._safetensors import Stored as Stored
from ._safetensors import export_safetensors as export_safetensors
from ._safetensors import import_safetensors as import_safetensors
from ._sharding import Sharding as Sharding
from ._sharding import data_parallel as data_parallel
from ._sharding import fsdp as fsdp
from ._sharding import shard as shard
from ._state import TrainState as TrainState
from ._step import make_step as make_step

if not _typing.TYPE_CHECKING:
    __getattr__ = _former_names(__name__)
