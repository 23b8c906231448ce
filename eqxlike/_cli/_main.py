"""The command line, which is read here and handed over to a subcommand.

A subcommand is a file with `add_parser(subparsers)`, which gives its parser a default `run`: a
function of the parsed arguments that returns the exit status.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from .._version import __version__
from . import _demo, _profile
from ._data import CommandError

INTERRUPTED = 130
"""The exit status that a shell reports for a process that Ctrl-C ended: 128 + SIGINT."""

WRONG_USE = 2


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line: what is wrong, without the whole usage before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(WRONG_USE, f"{self.prog}: error: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    **Arguments:**

    - `arguments`: the words after `python -m eqxlike`; those of this process if None.

    **Returns:** the exit status: 0, or 1 where a training diverged, 2 for wrong use, 130 after
    Ctrl-C.
    """
    parser = _Parser(
        prog="python -m eqxlike",
        description="Equinox-style models in JAX; filtered calls cost about what jax.jit costs.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    subparsers = parser.add_subparsers(metavar="command", required=True)
    _demo.add_parser(subparsers)
    _profile.add_parser(subparsers)
    try:
        options = parser.parse_args(arguments)
    except SystemExit as exit:  # argparse's way out, after help as after an error
        return exit.code if isinstance(exit.code, int) else WRONG_USE
    try:
        return options.run(options)
    except CommandError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return WRONG_USE
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted", file=sys.stderr)
        return INTERRUPTED
