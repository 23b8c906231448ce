"""The command line: `python -m eqxlike`, or `eqxlike`."""

import argparse
import contextlib
import importlib
import inspect
import operator
import os
import pathlib
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import jax

from . import _profile
from ._check_numbers import whole_number_in
from ._version import __version__

INTERRUPTED = 130
"""The exit status of a process that Ctrl-C has ended: 128 + SIGINT."""

WRONG_USE = 2

MOVED = "the demo is in examples/demo of the repository: run `make demo` in a clone"


class CommandError(Exception):
    """A wrong argument or a failed command. The message is one line for the user."""


def run() -> None:
    """Runs the command in `sys.argv`. If it fails, the process exits with the command's status."""
    status = main()
    if status != 0:
        # If Ctrl-C interrupts a compilation, JAX 0.10.2 crashes Python during its normal exit. So
        # the normal exit is skipped; all output has been written.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(WRONG_USE, f"{self.prog}: error: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    **Arguments:**

    - `arguments`: the command-line arguments; by default `sys.argv[1:]`.

    **Returns:** the exit status: 0 for success, 2 for wrong use, 130 after Ctrl-C.
    """
    parser = _Parser(
        prog="python -m eqxlike",
        description="Equinox-style models in JAX; filtered calls cost about what jax.jit costs.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    subparsers = parser.add_subparsers(metavar="command", required=True)
    _add_profile(subparsers)
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] == ["demo"]:
        print(MOVED, file=sys.stderr)
        return WRONG_USE
    try:
        options = parser.parse_args(arguments)
    except SystemExit as exit:  # argparse exits after help and after errors
        return exit.code if isinstance(exit.code, int) else WRONG_USE
    try:
        return _run_profile(options)
    except CommandError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return WRONG_USE
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted", file=sys.stderr)
        return INTERRUPTED


# --- `profile` ---


CALLS = 100
TRACED_CALLS = 10
"""Maximum number of calls in XLA's trace, because the trace grows quickly."""


def _add_profile(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "profile",
        help="measure the time of a function: in eqxlike, in JAX's dispatch, on the device",
        description="Calls a function without arguments many times. Prints the time of each "
        "filter_jit function in it, split into eqxlike, JAX's dispatch and the rest, and the "
        "Python functions with the most samples. Writes the call tree as text and as an HTML page. "
        "The function must return the arrays to wait for, such as the loss of a step.",
    )
    parser.add_argument("target", metavar=METAVAR, help="the function, such as train:step")
    parser.add_argument(
        "--calls",
        type=whole_number_in,
        default=CALLS,
        metavar="N",
        help=f"number of timed calls; as many calls are sampled (default {CALLS})",
    )
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        default="profile-results",
        metavar="DIR",
        help="folder for the files (default profile-results)",
    )
    parser.add_argument(
        "--trace", action="store_true", help="also write XLA's trace, for ui.perfetto.dev"
    )


def _run_profile(options: argparse.Namespace) -> int:
    """Profiles the target and prints the results; returns the exit status.

    **Raises:** `CommandError` if the target cannot be profiled.
    """
    stages = _profile.Stages()
    with stages.listening():
        function = _load_function(options.target)
    folder = _writable_folder(options.out)
    path = folder / options.target.replace(":", ".")
    try:
        _profile.new_profiler(1e-3)
    except ImportError as error:
        raise CommandError(str(error)) from None
    with _calling(options.target), stages.listening(), _profile.profile() as found:
        for _ in range(options.calls):
            jax.block_until_ready(function())
    with _calling(options.target):
        sampled = _profile.sample(function, options.calls, warm_up=1)
    files = sampled.write(path)
    if options.trace:
        folder_of_trace = path.with_name(path.name + ".trace")
        traced = jax.profiler.trace(folder_of_trace, create_perfetto_trace=True)
        with _calling(options.target), traced:
            for _ in range(min(options.calls, TRACED_CALLS)):
                jax.block_until_ready(function())
        files += sorted(folder.glob(f"{path.name}.trace/**/perfetto_trace.json.gz"))[-1:]
    times = _profile.self_times(sampled.session)
    shares = _profile.shares(times)
    names = {_profile.OURS: "eqxlike", _profile.JAX: "JAX's Python", _profile.OTHER: "other"}
    print(f"{options.target}, {options.calls} calls:\n{found}")
    print(f"JAX, for these calls and the import: {stages}")
    print("\nsampled: " + ", ".join(f"{names[who]} {share:.0%}" for who, share in shares.items()))
    print("\n".join(_profile.hot_frames(times)))
    print("\nwritten: " + ", ".join(map(str, files)), flush=True)
    return 0


def _writable_folder(path: pathlib.Path) -> pathlib.Path:
    """Creates a folder if necessary, and checks that files can be written there.

    **Raises:** `CommandError` if files cannot be written there.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError as error:
        reason = error.strerror or error
        raise CommandError(f"argument --out: cannot write to {str(path)!r}: {reason}") from None


@contextlib.contextmanager
def _calling(target: str) -> Iterator[None]:
    """Context manager that prints an exception's traceback, and raises `CommandError` instead."""
    try:
        yield
    except (Exception, SystemExit) as error:
        traceback.print_exception(error)
        raise CommandError(f"{target} raised {_one_line(error)}") from None


# --- The function to profile ---


METAVAR = "module:function"


def _load_function(target: str) -> Callable[[], Any]:
    """Imports the function `module:function`, which takes no arguments.

    **Raises:** `CommandError` if there is no such function, or if it needs arguments.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    module, _, name = target.partition(":")
    module = module.removesuffix(".py").replace("/", ".")
    try:
        function = operator.attrgetter(name or "function")(importlib.import_module(module))
    except (Exception, SystemExit) as error:
        raise CommandError(
            f"give {METAVAR}, such as train:step; importing {target!r} raised {_one_line(error)}"
        ) from None
    try:
        inspect.signature(function).bind()
    except ValueError:  # Functions written in C may have no signature.
        pass
    except TypeError as error:
        raise CommandError(
            f"{target} cannot be called without arguments, {error}: give a function without "
            "arguments, such as `def profiled(): return step(...)`"
        ) from None
    return function


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


if __name__ == "__main__":
    run()
