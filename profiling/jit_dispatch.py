"""Profiles warm calls of `filter_jit`, and splits their time into eqxlike, JAX and the rest.

For each case the script measures `filter_jit` and flat `jax.jit` interleaved, without a profiler.
It then samples thousands of calls of `filter_jit` with pyinstrument, and writes a text tree, an
HTML page and the session file. profiling/README.md explains how to read them.
"""

import argparse
import dataclasses
import pathlib
import statistics
import sys
from collections.abc import Mapping, Sequence

from benchmarks import cases, jit_overhead
from benchmarks.table import text_table
from benchmarks.timing import Column, measure, ratios
from eqxlike import _profile
from eqxlike._check_numbers import whole_number_in
from eqxlike._profile import JAX, OTHER, OURS, Frame, Split

DEFAULT = r"Identity|forward, depth (2|64), width 8$|Adam step, depth (2|64)|ELBO"
"""The default cases: one of each type, the smallest case (where overhead matters most) and the
deepest.
"""

OUT = pathlib.Path("profiling-results")
CALLS = 5000
ROUNDS = 200


@dataclasses.dataclass(frozen=True)
class Profile:
    """The results for a case.

    - `case`: the name of the case.
    - `split`: the split of the time of a call, measured without a profiler.
    - `times`: the seconds of the samples in each function.
    - `files`: the files that were written.
    """

    case: str
    split: Split
    times: Mapping[Frame, float]
    files: Sequence[pathlib.Path]


def profile(case: cases.Case, out: pathlib.Path, calls: int, rounds: int = ROUNDS) -> Profile:
    """Measures and samples a case, and writes its files to the folder `out`."""
    pair = {name: case.builders[name]() for name in (cases.FLAT, cases.OURS)}
    measured = measure(pair, baseline=cases.FLAT, rounds=rounds)
    sampled = _profile.sample(pair[cases.OURS], calls)
    files = sampled.write(out / case.slug)
    times = _profile.self_times(sampled.session)
    return Profile(case.name, split(measured.columns[cases.OURS]), times, files)


def split(ours: Column) -> Split:
    """Splits the time of a call.

    **Arguments:**

    - `ours`: the column of `filter_jit`, measured with flat `jax.jit` as its baseline.
    """
    jax_us = ours.dispatch_us / ours.dispatch_ratio.median
    waiting = statistics.median(ratios(ours.samples.completion_us, ours.samples.dispatch_us)) - 1
    return Split(ours.dispatch_us - jax_us, jax_us, ours.dispatch_us * waiting)


def split_table(profiles: Sequence[Profile]) -> str:
    """A table of the split of each case, and of the owners of the sampled functions."""
    heading = ["microseconds a call", "total", "ours", "jax.jit", "rest", "ours/jax.jit"]
    rows = [[*heading, "sampled: eqxlike", "jax Python", "other"]]
    for one in profiles:
        parts = one.split
        times_us = (parts.total_us, parts.ours_us, parts.jax_us, parts.rest_us)
        shares = _profile.shares(one.times)
        rows.append(
            [
                one.case,
                *(f"{time_us:.1f}" for time_us in times_us),
                f"{parts.ours_us / parts.jax_us:.2f}",
                *(f"{shares[who]:.0%}" for who in (OURS, JAX, OTHER)),
            ]
        )
    return text_table(rows)


def hot_frames(profile: Profile) -> str:
    """The functions of eqxlike and of JAX's Python code with the most samples."""
    return "\n".join([profile.case, *_profile.hot_frames(profile.times)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Profiles and prints. Returns 2 for a wrong argument and 130 after Ctrl-C."""
    options = _parser().parse_args(arguments)
    try:
        selected = cases.find(options.case, jit_overhead.CASES)
        options.out.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        print(f"profiling.jit_dispatch: {error}", file=sys.stderr)
        return 2
    profiles: list[Profile] = []
    status = 0
    try:
        for case in selected:
            profiles.append(profile(case, options.out, options.calls))
            print(f"{case.name}: {', '.join(map(str, profiles[-1].files))}", file=sys.stderr)
    except KeyboardInterrupt:
        print("interrupted; these cases are finished:", file=sys.stderr)
        status = 130
    print(split_table(profiles))
    for one in profiles:
        print(f"\n{hot_frames(one)}")
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m profiling.jit_dispatch",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--case",
        default=DEFAULT,
        metavar="NAME",
        help="only cases whose name matches this regular expression (default: a selection)",
    )
    parser.add_argument(
        "--out", type=pathlib.Path, default=OUT, metavar="DIR", help="default: %(default)s"
    )
    parser.add_argument(
        "--calls", type=whole_number_in, default=CALLS, metavar="N", help="default: %(default)s"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
