"""`demo`: Bayesian networks trained on real data, and the cost of a call by `filter_jit`."""

import argparse
import functools
import importlib.util
import os
import sys
import time
from typing import Any

import jax

from .._check_numbers import whole_number_in
from . import _pictures, _report
from ._compare import Output, compare, measure_dispatch
from ._evaluate import METHODS
from ._models import SETTINGS, load, prepare, settings_for
from ._report import CommandError

NEEDED = {
    "blackjax": "blackjax",
    "matplotlib": "matplotlib",
    "numpyro": "numpyro",
    "sklearn": "scikit-learn",
}
"""The import names of the packages that the demo extra brings."""

MOST_SEED = 2**31 - 1
"""Seeds end where NumPy's and JAX's do in 32 bits."""

STATUSES = {"finished": 0, "diverged": 1, "interrupted": 130}
"""The exit status for each way of stopping."""


def add_parser(subparsers: Any) -> None:
    """Adds the subcommand to the command line."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "demo", help="Bayesian networks on real data", description=__doc__
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "--data", choices=[*SETTINGS, "both"], default="both", help="which data set (both)"
    )
    parser.add_argument(
        "--method",
        choices=[*METHODS, "all"],
        action="append",
        default=[],
        help="infer the posterior by this method of eqxlike.bayes too; may come several times",
    )
    parser.add_argument(
        "--steps",
        type=whole_number_in,
        metavar="N",
        help="training steps instead of each data set's own",
    )
    seed = functools.partial(whole_number_in, least=0, most=MOST_SEED)
    parser.add_argument(
        "--seed", type=seed, default=0, metavar="N", help="of split, weights and noise (0)"
    )
    _report.add_folder(parser, "demo-results", "where pictures and results go")
    parser.add_argument("--quick", action="store_true", help="a look in seconds, not for quoting")
    parser.add_argument(
        "--device", choices=CHOICES, default="auto", help="auto: a GPU where JAX sees one (auto)"
    )


def run(options: argparse.Namespace) -> int:
    """Runs the demo; returns the exit status.

    **Raises:** `CommandError` if what was asked for cannot be done.
    """
    _require_extras()
    if options.quick:
        _compile_quickly()
    folder = _report.writable_folder(options.out)
    names = list(SETTINGS) if options.data == "both" else [options.data]
    datasets = [prepare(name, load(name), seed=options.seed) for name in names]
    device = choose_device(options.device)
    print(f"device: {device}", flush=True)
    methods = list(METHODS) if "all" in options.method else list(dict.fromkeys(options.method))
    outputs: dict[str, Output] = {}
    try:
        for data in datasets:
            start_s = time.perf_counter()
            settings = settings_for(data.name, steps=options.steps, is_quick=options.quick)
            # `outputs` has what is reached as it is reached, for Ctrl-C.
            output = compare(data, settings, seed=options.seed, outputs=outputs, methods=methods)
            if settings.rounds:
                output.dispatch = measure_dispatch(data, output.bayesian, settings)
            output.seconds = time.perf_counter() - start_s
        trainings = [each for output in outputs.values() for each in output.trainings.values()]
        is_diverged = any(training.result.stopped == "diverged" for training in trainings)
        stopped = "diverged" if is_diverged else "finished"
    except KeyboardInterrupt:
        stopped = "interrupted"
    contents = _report.report(
        outputs, stopped=stopped, seed=options.seed, is_quick=options.quick, device=device
    )
    _report.print_tables(contents)
    try:
        files = [*_report.write(contents, folder), *_pictures.draw(outputs, folder)]
    except OSError as error:
        raise CommandError(f"cannot write the results: {error}") from None
    print("\nwritten: " + ", ".join(map(str, files)), flush=True)
    if stopped == "interrupted":
        print("interrupted: the results are those of what was reached", file=sys.stderr)
    return STATUSES[stopped]


def _compile_quickly() -> None:
    """Leaves LLVM's optimisations out, a third of the time, unless the user has set a level.

    XLA reads its flags when JAX first looks for devices, which is later.
    """
    flags, level = os.environ.get("XLA_FLAGS", ""), "--xla_backend_optimization_level"
    if level not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {level}=0"


def _require_extras() -> None:
    missing = [name for module, name in NEEDED.items() if not importlib.util.find_spec(module)]
    if missing:
        raise CommandError(f"the demo needs {' and '.join(missing)}: pip install 'eqxlike[demo]'")


# --- The device that the demo runs on ---


CHOICES = ("auto", "cpu", "gpu")


def choose_device(choice: str) -> str:
    """Holds JAX to a type of device; returns in words the one it uses.

    A choice of "cpu" must come before JAX starts a backend. "auto" is JAX's own choice: a GPU where
    it sees one.

    **Raises:** `CommandError` if JAX has no such device.
    """
    if choice == "cpu":
        jax.config.update("jax_platforms", "cpu")
    try:
        device = jax.devices()[0]
    except RuntimeError as error:
        raise CommandError(f"JAX finds no device: {' '.join(str(error).split())}") from None
    if choice != "auto" and device.platform != choice:
        raise CommandError(
            f"argument --device: JAX runs on {device.platform} here, not on {choice}"
        )
    kind = device.device_kind
    return device.platform if kind == device.platform else f"{device.platform} ({kind})"
