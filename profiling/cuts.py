"""What each cut bought: `filter_jit` with one of them taken back, beside `filter_jit` as it is.

`python -m profiling.cuts [--rounds N]` prints, for the cases that a cut was made for, the ratio to
`jax.jit` on the module before and after it, measured in one run by the method of
`eqxlike._timing`. `profiling/README.md` keeps the table.
"""

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import eqxlike
from benchmarks import cases, columns, edge_models
from benchmarks.cases import Case
from benchmarks.table import markdown_table
from eqxlike._partition import _structure
from eqxlike._timing import Call, measure
from eqxlike._transforms import _fast_path, filter_jit

ROUNDS = 200
BEFORE = "before"


@dataclasses.dataclass(frozen=True)
class Cut:
    """One cut.

    Attributes:
        name: what was cut.
        target: the object whose attribute is replaced to take the cut back.
        attribute: its name.
        replacement: what stands there before the cut.
        cases: those that it was made for.
    """

    name: str
    target: Any
    attribute: str
    replacement: Any
    cases: tuple[Case, ...]

    @contextlib.contextmanager
    def taken_back(self) -> Iterator[None]:
        """Take the cut back for whatever is generated meanwhile."""
        with mock.patch.object(self.target, self.attribute, self.replacement):
            forget_generated()
            yield
        forget_generated()


def forget_generated() -> None:
    """Drop the functions that were generated for Structures alive now; calls keep theirs."""
    for structure in list(_structure._interned.values()):
        structure.generated.clear()


def no(*arguments: Any) -> bool:
    """Say no."""
    return False


CUTS = (
    Cut(
        "the fast path reads the fields of Modules that keep nothing",
        _fast_path._Generator,
        "_can_read_fields",
        no,
        tuple(
            row.case
            for row in edge_models.rows()
            if "list of 2" in row.case.name or "dict" in row.case.name
        ),
    ),
    Cut(
        "Modules that are returned stay unread",
        _structure,
        "can_stay_unread",
        no,
        (cases.adam_step(2, 8), cases.adam_step(8, 32), cases.adam_step(64, 8)),
    ),
)


def anew(build: Callable[[], Call]) -> Call:
    """Build a call of a function of its own: wrappers of one share what is compiled."""

    def of_new_function(function: Callable[..., Any]) -> Any:
        return filter_jit(lambda *arguments: function(*arguments))

    with mock.patch.object(eqxlike, "filter_jit", of_new_function):
        return build()


def before(cut: Cut, build: Callable[[], Call]) -> Call:
    """Return the call of a case as it was before the cut, compiled and warm."""
    with cut.taken_back():
        call = anew(build)
        for _ in range(3):
            call()
    return call


def measured(cut: Cut, case: Case, rounds: int) -> list[str]:
    """Return a row: the cut, the case, and the ratios before and after."""
    ours = case.builders[columns.OURS]
    calls = {
        columns.MODULE: case.builders[columns.MODULE](),
        BEFORE: before(cut, ours),
        columns.OURS: anew(ours),
    }
    result = measure(calls, baseline=columns.MODULE, rounds=rounds).columns
    cells = [
        f"{getattr(result[column], kind).median:.2f}"
        for kind in ("dispatch_ratio", "completion_ratio")
        for column in (BEFORE, columns.OURS)
    ]
    return [cut.name, case.name, *cells]


HEADINGS = (
    "cut",
    "case",
    "dispatch before",
    "dispatch after",
    "completion before",
    "completion after",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m profiling.cuts", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help=f"default {ROUNDS}")
    options = parser.parse_args(arguments)
    rows: list[Sequence[str]] = [HEADINGS]
    for cut in CUTS:
        for case in cut.cases:
            rows.append(measured(cut, case, options.rounds))
            print(f"{cut.name}: {case.name}", file=sys.stderr)
    print(markdown_table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
