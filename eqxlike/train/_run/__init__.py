"""A training run: its state, its losses, and the calls of its step.

- `_run`: `Run`, the object that callbacks get.
- `_stepper`: calls the step, and checks that the state is good.
- `_flat_steps`: compiles the calls.
- `_stack`: stacks batches.
"""

from ._run import Run as Run
from ._stack import Stack as Stack
from ._stepper import Batch as Batch
from ._stepper import Step as Step
