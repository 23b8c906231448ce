"""`python -m examples.demo`."""

import os
import sys

try:
    from .command import main
except ModuleNotFoundError as error:
    sys.exit(f"the demo needs {error.name}: pip install -e '.[demo]'")

if __name__ == "__main__":
    status = main()
    if status != 0:
        # If Ctrl-C interrupts a compilation, JAX 0.10.2 crashes Python as it exits. All output is
        # written by now, so skip the normal exit.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
