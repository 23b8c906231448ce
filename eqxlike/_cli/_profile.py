"""`profile`: where the time of a function of the user's goes."""

import argparse
import contextlib
import pathlib
import traceback
from collections.abc import Iterator
from typing import Any

import jax

from .. import _profile
from .._numbers import whole_number_in
from ._errors import CommandError
from ._report import writable_folder
from ._target import METAVAR, load_function

CALLS = 100
TRACED_CALLS = 10
"""At most this many calls are in XLA's trace: each fills it with all that the device does."""


def add_parser(subparsers: Any) -> None:
    """Adds the subcommand to those of the command line."""
    parser = subparsers.add_parser(
        "profile",
        help="where the time of a function goes: ours, JAX's dispatch, the device",
        description="Calls a function of no arguments again and again. Prints what each function "
        "of filter_jit in it takes, split into ours, JAX's dispatch and the rest, and which "
        "functions samples of the Python stack fell into most; writes the tree of calls as text "
        "and as a page. The function returns what to wait for: the loss of a step, say.",
    )
    parser.set_defaults(run=run)
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
        default=pathlib.Path("profile-results"),
        metavar="DIR",
        help="where the files go (profile-results)",
    )
    parser.add_argument(
        "--trace", action="store_true", help="write XLA's own trace too, for ui.perfetto.dev"
    )


def run(options: argparse.Namespace) -> int:
    """Profiles and prints; returns the exit status.

    **Raises:** `CommandError` if what was asked for cannot be done.
    """
    function = load_function(options.target)
    folder = writable_folder(options.out)
    path = folder / options.target.replace(":", ".")
    try:
        _profile.new_profiler(1e-3)
    except ImportError as error:
        raise CommandError(str(error)) from None
    with _calling(options.target), _profile.profile() as found:
        for _ in range(options.calls):
            jax.block_until_ready(function())
    with _calling(options.target):
        session = _profile.sample(function, options.calls, warm_up=1)
    files = _profile.write(session, path)
    if options.trace:
        folder_of_trace = path.with_name(path.name + ".trace")
        traced = jax.profiler.trace(folder_of_trace, create_perfetto_trace=True)
        with _calling(options.target), traced:
            for _ in range(min(options.calls, TRACED_CALLS)):
                jax.block_until_ready(function())
        files += sorted(folder.glob(f"{path.name}.trace/**/perfetto_trace.json.gz"))[-1:]
    times = _profile.self_times(session)
    shares = _profile.shares(times)
    names = {_profile.OURS: "eqxlike", _profile.JAX: "JAX's Python", _profile.OTHER: "other"}
    print(f"{options.target}, {options.calls} calls:\n{found}")
    print("\nsampled: " + ", ".join(f"{names[who]} {share:.0%}" for who, share in shares.items()))
    print("\n".join(_profile.hot_frames(times)))
    print("\nwritten: " + ", ".join(map(str, files)), flush=True)
    return 0


@contextlib.contextmanager
def _calling(target: str) -> Iterator[None]:
    """A context in which the function is called.

    **Raises:** `CommandError` if it raises anything, the traceback of which is printed.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        traceback.print_exception(error)
        message = " ".join(str(error).split())
        raise CommandError(f"{target} raised {type(error).__name__}: {message}") from None
