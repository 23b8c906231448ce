from ._callback import Callback as Callback
from ._checkpoint import Checkpoint as Checkpoint
from ._early_stopping import EarlyStopping as EarlyStopping
from ._json_lines import JsonLines as JsonLines
from ._kept import load_kept as load_kept
from ._progress import Progress as Progress
from ._tensorboard import TensorBoard as TensorBoard
