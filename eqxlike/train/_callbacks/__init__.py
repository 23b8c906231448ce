from ._callback import Callback as Callback
from ._callback import load_kept as load_kept
from ._checkpoint import Checkpoint as Checkpoint
from ._early_stopping import EarlyStopping as EarlyStopping
from ._logging import JsonLines as JsonLines
from ._logging import Progress as Progress
from ._logging import TensorBoard as TensorBoard
from ._logging import progress as progress
