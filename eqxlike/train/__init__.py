"""Training: a state, a step made from a loss, and a loop over batches.

Modules that you can use in a training loop of your own, in reading order:

- `_state`: `TrainState`, the input and output of a step; the loss scale of float16; the signatures
  that a loss may have.
- `_step`: `make_step`, and `EMA`, averaged parameters. `_guards`: checks for NaN and infinity.
- `_batches`: minibatches, repetition, prefetching. `_batches_from`: batches from the data loaders
  of other libraries.
- `_metrics`: metrics, and `make_evaluate`, which computes metrics of a model over batches.
- `_sharding`: training on several devices.

Modules for the loop of eqxlike, `fit`:

- `_fit`: `fit`, its schedule, and the number of steps in one call.
- `_run`: `Run`, the state of a training run that callbacks see, and compiled calls of the step.
- `_batch_iterator`: batches for one call of the step.
- `_callbacks`: the base class, checkpoints and early stopping. `_logging`: callbacks that log.

Files:

- `_checkpoints`: saves and restores states. `_orbax`: the files of a checkpoint, which Orbax reads
  and writes, and their checksums, which show damage.
- `_safetensors`: import and export of weights. `_stored`: the arrays in safetensors files.

`_checks` checks arguments, and converts batches to arrays.
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
from ._checkpoints import CheckpointFolder as CheckpointFolder
from ._checkpoints import Restored as Restored
from ._checkpoints import restore as restore
from ._checkpoints import save as save
from ._fit import FitResult as FitResult
from ._fit import fit as fit
from ._guards import all_finite as all_finite
from ._guards import keep_if_finite as keep_if_finite
from ._guards import tree_where as tree_where
from ._logging import JsonLines as JsonLines
from ._logging import Progress as Progress
from ._logging import TensorBoard as TensorBoard
from ._logging import progress as progress
from ._metrics import make_evaluate as make_evaluate
from ._orbax import CheckpointError as CheckpointError
from ._orbax import Saving as Saving
from ._run import Run as Run
from ._safetensors import export_safetensors as export_safetensors
from ._safetensors import import_safetensors as import_safetensors
from ._sharding import Sharding as Sharding
from ._sharding import data_parallel as data_parallel
from ._sharding import fsdp as fsdp
from ._sharding import shard as shard
from ._state import DynamicLossScale as DynamicLossScale
from ._state import TrainState as TrainState
from ._step import EMA as EMA
from ._step import make_step as make_step
from ._stored import Stored as Stored

if not _typing.TYPE_CHECKING:
    __getattr__ = _former_names(__name__)
