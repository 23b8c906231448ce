"""Checks in compiled programs: a check that fails raises an exception from the call.

How a check reaches the user:

1. `error_if` (`_error_if`) decides what happens on failure: an exception, NaN, a debugger,
   nothing. It inserts a `Check` (`_check`) into the program. A `Check` is a callback that is called
   only on failure.
2. The trace records whether it contains a check (`_check.TracedProgram`). The compiled function
   returns a flag for this. A call waits for its result only if the flag is set.
3. On failure the callback stores its report (`_runtime_errors.FailureReport`) and makes the run
   fail (`_runtime_errors.raise_in_callback`).
4. The call finds the report of the failure in JAX's exception, and raises it as
   `EqxlikeRuntimeError`, without JAX's long text (`_runtime_errors.claim_failure`).
"""

from ._check import TracedProgram as TracedProgram
from ._check import has_any_check_been_traced as has_any_check_been_traced
from ._check import holds_check as holds_check
from ._check import mesh_of as mesh_of
from ._check import note_check as note_check
from ._check import run_and_look_for_checks as run_and_look_for_checks
from ._error_if import branched_error_if as branched_error_if
from ._error_if import error_if as error_if
from ._runtime_errors import ERRORS_OF_JAX as ERRORS_OF_JAX
from ._runtime_errors import EquinoxRuntimeError as EquinoxRuntimeError
from ._runtime_errors import EquinoxTracetimeError as EquinoxTracetimeError
from ._runtime_errors import EqxlikeRuntimeError as EqxlikeRuntimeError
from ._runtime_errors import EqxlikeTracetimeError as EqxlikeTracetimeError
from ._runtime_errors import claim_failure as claim_failure
