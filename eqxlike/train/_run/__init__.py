"""A training under way, on the arrays of its state."""

from ._run import Batch as Batch
from ._run import Run as Run
from ._run import Step as Step
from ._stack import Stack as Stack
