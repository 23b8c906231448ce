"""A training under way, on the arrays of its state.

`_run` reads the losses, `_stepper` calls the step and judges, `_flat_steps` compiles the calls.
"""

from ._run import Run as Run
from ._stack import Stack as Stack
from ._stepper import Batch as Batch
from ._stepper import Step as Step
