"""`python -m eqxlike`, and the command `eqxlike`."""

import os
import sys

from ._cli import main


def run() -> None:
    """Runs the command that this process was started with, and ends the process if it fails."""
    status = main()
    if status != 0:
        # If Ctrl-C breaks off a compilation, JAX 0.10.2 crashes Python as it exits, whatever the
        # program does. All output is written by now, so Python is left without its usual exit.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    run()
