"""`python -m eqxlike`."""

import os
import sys

from ._cli import main

if __name__ == "__main__":
    status = main()
    if status != 0:
        # Where Ctrl-C breaks off a compilation, JAX 0.10.2 crashes Python when it ends, whatever
        # the program does. All is written by now, so Python is left without its ending.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
