"""`python -m eqxlike`, and the command `eqxlike`."""

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
"""The exit status that a shell reports for a process that Ctrl-C ended: 128 + SIGINT."""

WRONG_USE = 2

MOVED = "the demo is in examples/demo of the repository: run `make demo` in a clone"


class CommandError(Exception):
    """The command cannot run as asked. The message is one line for the user."""


def run() -> None:
    """Runs the command that this process was started with, and ends the process if it fails."""
    status = main()
    if status != 0:
        # If Ctrl-C breaks off a compilation, JAX 0.10.2 crashes Python as it exits, whatever the
        # program does. All output is written by now, so Python is left without its usual exit.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line: what is wrong, without the whole usage before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(WRONG_USE, f"{self.prog}: error: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    **Arguments:**

    - `arguments`: the words after `python -m eqxlike`; those of this process if None.

    **Returns:** the exit status: 0, or 2 for wrong use, 130 after Ctrl-C.
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
    except SystemExit as exit:  # argparse's way out, after help as after an error
        return exit.code if isinstance(exit.code, int) else WRONG_USE
    try:
        return _run_profile(options)
    except CommandError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return WRONG_USE
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted", file=sys.stderr)
        return INTERRUPTED


# --- `profile`: where the time of a function of the user's goes ---


CALLS = 100
TRACED_CALLS = 10
"""At most this many calls are in XLA's trace: each fills it with all that the device does."""


def _add_profile(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "profile",
        help="where the time of a function goes: ours, JAX's dispatch, the device",
        description="Calls a function of no arguments again and again. Prints what each function "
        "of filter_jit in it takes, split into ours, JAX's dispatch and the rest, and which "
        "functions samples of the Python stack fell into most; writes the tree of calls as text "
        "and as a page. The function returns what to wait for: the loss of a step, say.",
    )
    parser.add_argument("target", metavar=METAVAR, help="such as train:step")
    parser.add_argument(
        "--calls",
        type=whole_number_in,
        default=CALLS,
        metavar="N",
        help=f"how often to call it, for the table and for the samples ({CALLS})",
    )
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        default="profile-results",
        metavar="DIR",
        help="where the files go (profile-results)",
    )
    parser.add_argument(
        "--trace", action="store_true", help="write XLA's own trace too, for ui.perfetto.dev"
    )


def _run_profile(options: argparse.Namespace) -> int:
    """Profiles and prints; returns the exit status.

    **Raises:** `CommandError` if what was asked for cannot be done.
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
    """Makes a folder where there is none, and makes sure that files can be written there.

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
    """A context in which the function is called.

    **Raises:** `CommandError` if the function raises an exception. The traceback is printed.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        traceback.print_exception(error)
        raise CommandError(f"{target} raised {_one_line(error)}") from None


# --- A function of the user's, by the name that a command is given ---


METAVAR = "module:function"


def _load_function(target: str) -> Callable[[], Any]:
    """The function `module:function`, which takes no arguments.

    **Raises:** `CommandError` if there is none, saying what to give.
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
    except ValueError:  # A function of C may have no signature.
        pass
    except TypeError as error:
        raise CommandError(
            f"{target} cannot be called without arguments, {error}: give a function of none, such "
            "as `def profiled(): return step(...)`"
        ) from None
    return function


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


if __name__ == "__main__":
    run()
