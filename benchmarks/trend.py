"""The history of key figures over the committed runs: `python -m benchmarks.trend`.

A committed run replaces the previous run, but each run has a line in
`benchmarks/results/history.jsonl`. The line contains the machine, the versions, the date and the
key figures of the run. Most figures are ratios within the run. Lines are added and never changed.

`--add` adds the runs in `benchmarks/results/` that have no line yet. Without it, the command lists
them and fails. `--from-git` first adds earlier runs from the history of the repository.
"""

import argparse
import json
import math
import pathlib
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
HISTORY = RESULTS / "history.jsonl"
RUN = re.compile(r"(?P<benchmark>.+?)-\w+-jax-[\d.]+")

Report = Mapping[str, Any]
Point = Mapping[str, Any]


class Figure(NamedTuple):
    """A number of a run. `read` raises `LookupError` if the run does not have it."""

    title: str
    read: Callable[[Report], float]
    more_is_better: bool = False


def _rows(report: Report, **of: str) -> list[Mapping[str, Any]]:
    return [row for row in report["rows"] if all(row.get(key) == of[key] for key in of)]


def _ratio(name: str, column: str, **of: str) -> Callable[[Report], float]:
    """The completion time of a column, relative to the baseline of its row."""

    def read(report: Report) -> float:
        return _rows(report, name=name, **of)[0]["columns"][column]["completion_ratio"]["median"]

    return read


def _middle(column: str, **of: str) -> Callable[[Report], float]:
    """The median of the completion ratios of a column over the rows of a table."""

    def read(report: Report) -> float:
        found = [
            row["columns"][column]["completion_ratio"]["median"] for row in _rows(report, **of)
        ]
        if not found:
            raise LookupError("no such row")
        return statistics.median(found)

    return read


def _mode(name: str, mode: str) -> Callable[[Report], float]:
    """The time of value and gradient with a mode, relative to the value."""

    def read(report: Report) -> float:
        (row,) = _rows(report, name=name, space="standard")
        return next(each["ratio"] for each in row["modes"] if each["mode"] == mode)

    return read


def _score(data: str, method: str) -> Callable[[Report], float]:
    """The mean negative log likelihood of held-out data over the splits."""

    def read(report: Report) -> float:
        (row,) = _rows(report, data=data, method=method)
        return statistics.fmean(split["nll"] for split in row["splits"])

    return read


def _rate(name: str) -> Callable[[Report], float]:
    """Effective samples a second relative to NumPyro. Both are means over the seeds."""

    def read(report: Report) -> float:
        runs = _rows(report, name=name, table="NUTS")[0]["runs"]
        ours, theirs = (
            statistics.fmean(run["ess"] / run["seconds"] for run in runs[column])
            for column in ("bayes.NUTS", "NumPyro")
        )
        return ours / theirs

    return read


def _distance(problem: str, method: str) -> Callable[[Report], float]:
    """The mean of `|log(ratio)|` near the data and far away; 0 is exact."""

    def read(report: Report) -> float:
        (row,) = _rows(report, problem=problem, method=method)
        ratios = [statistics.geometric_mean(row[place]) for place in ("near", "far")]
        return statistics.mean(abs(math.log(ratio)) for ratio in ratios)

    return read


FIGURES: dict[str, tuple[Figure, ...]] = {
    "jit_overhead": tuple(
        Figure(f"{name}: filter_jit / jax.jit", _ratio(name, "filter_jit"))
        for name in (
            "Identity, (1, 1)",
            "MLP forward, depth 2, width 64",
            "Adam step, depth 2, width 8, batch 32",
            "Adam step, depth 64, width 8, batch 32",
        )
    ),
    "jit_edges": (
        Figure("1000 arrays: filter_jit / jax.jit", _ratio("1000 arrays", "filter_jit")),
        Figure(
            "list of 64 layers: filter_jit / jax.jit", _ratio("list of 64 layers", "filter_jit")
        ),
        Figure(
            "other kinds of arguments, median: filter_jit / jax.jit",
            _middle("filter_jit", table="Arguments of other kinds"),
        ),
        Figure(
            "first Adam step, depth 64: filter_jit / jax.jit",
            _ratio("Adam step, depth 64", "filter_jit"),
        ),
    ),
    "layers": (
        Figure(
            "built, median: eqxlike / Equinox",
            _middle(
                "eqxlike", table="Construct a model from a key, its initialisers compiled before"
            ),
        ),
        Figure(
            "MLP of depth 100, built: eqxlike / arrays alone",
            _ratio("MLP of depth 100, width 64", "eqxlike"),
        ),
        Figure(
            "forward pass, median: eqxlike / Equinox",
            _middle("eqxlike", table="Forward pass of a batch"),
        ),
        Figure(
            "gradient, median: eqxlike / Equinox",
            _middle("eqxlike", table="Value and gradient of the mean of squares over a batch"),
        ),
        Figure(
            "64 layers compiled: ScanStack / Sequential",
            _ratio("64 MLPs of width 64", "ScanStack"),
        ),
    ),
    "loops": (
        Figure(
            "gradient of 1000 steps: checkpointed while_loop / lax.scan",
            _ratio("gradient, 64-wide tanh, 1000 steps", "while_loop, checkpointed"),
        ),
        Figure(
            "gradient of 100 of 10000 steps: checkpointed while_loop / lax.scan of 100",
            _ratio("gradient, 64-wide tanh, 100 of 10000 steps", "while_loop, checkpointed"),
        ),
    ),
    "downstream": tuple(
        Figure(f"{calls}s, median: on eqxlike / on Equinox", _middle("eqxlike", table=table))
        for calls, table in (("first call", "First call"), ("later call", "Later calls"))
    ),
    "export": tuple(
        Figure(
            f"64 layers, {compiled}: eqxlike.export / traced anew",
            _ratio(f"MLP of digits, 64 hidden layers, {compiled}", "eqxlike.export"),
        )
        for compiled in ("compiled anew", "compiled before")
    ),
    "ad-modes": tuple(
        Figure(f"{name}: reverse gradient / value", _mode(name, "Reverse"))
        for name in ("Bayesian network, 601 unknowns", "LSTM", "neural ODE")
    ),
    "bayes-cost": (
        Figure(
            "value and gradient, 601 unknowns: Posterior / by hand",
            _ratio("601 unknowns, linked", "Posterior", table="Value and gradient"),
        ),
        Figure(
            "a step, 784-32-10: MeanField / MAP",
            _ratio(
                "784-32-10, batch 128", "MeanField, local", table="A step of Adam in bayes.infer"
            ),
        ),
        Figure(
            "effective samples a second, Bayesian network: bayes.NUTS / NumPyro",
            _rate("Bayesian network, 21 unknowns, vectorized"),
            more_is_better=True,
        ),
    ),
    "bayes-quality": tuple(
        Figure(f"{data}: NLL of {method}, nats", _score(data, method))
        for data, method in (
            ("diabetes", "NUTS"),
            ("diabetes", "mean field"),
            ("breast cancer", "deep ensemble"),
            ("digits", "deep ensemble"),
        )
    ),
    "exactness": tuple(
        Figure(f"network: distance of {method} from exact", _distance("network", method))
        for method in ("NUTS", "Laplace, full, width 1", "mean field", "early-stopped ensemble")
    ),
    "training": tuple(
        Figure(f"{name}: {column} / by hand", _ratio(name, column))
        for name, column in (("2x8", "fit"), ("64x8", "fit"), ("2x8", "fit, 16 steps a call"))
    ),
    "scaling": tuple(
        Figure(
            f"{sharding}, width 1024: 2 devices / 1",
            _ratio(f"{sharding}, depth 2, width 1024, batch 256", "2 devices"),
        )
        for sharding in ("FSDP", "data parallel")
    ),
    "models": tuple(
        Figure(f"{title}: a step / NNX", _ratio(name, column))
        for title, name, column in (
            ("language model", "language model, 6 layers of 256, 128 tokens, batch 8", "eqxlike"),
            (
                "language model, ScanStack",
                "language model, 6 layers of 256, 128 tokens, batch 8",
                "eqxlike, ScanStack",
            ),
            ("CNN", "CNN with BatchNorm, 3-32-64-64 on 32 x 32, batch 32", "eqxlike"),
            ("LSTM", "LSTM 32-64, 128 steps, batch 16", "eqxlike"),
        )
    ),
    "all": (
        Figure("tests that fail", lambda report: _rows(report, name="tests")[0]["failed"]),
        Figure(
            "commands that finish",
            lambda report: len(_rows(report, status="finished")),
            more_is_better=True,
        ),
    ),
}
"""Maps a benchmark to its key figures. Less is better unless stated otherwise."""


def figures(benchmark: str, report: Report) -> dict[str, float]:
    """The key figures of a run, to four decimal places.

    **Arguments:**

    - `benchmark`: a key of `FIGURES`.
    - `report`: a report that the benchmark wrote with `--json`.
    """
    found = {}
    for figure in FIGURES.get(benchmark, ()):
        try:
            found[figure.title] = round(figure.read(report), 4)
        except (LookupError, StopIteration, ValueError):
            continue  # the run is older than the row
    return found


def point(benchmark: str, report: Report, said: str = "") -> dict[str, Any]:
    """The point of a run, a line of the history.

    **Arguments:**

    - `benchmark`: the name of the benchmark.
    - `report`: its report.
    - `said`: a description of the changes before the run, or the message of its commit.
    """
    return {
        "benchmark": benchmark,
        "machine": dict(report["machine"]),
        "method": dict(report["method"]),
        "is_complete": report["is_complete"],
        "said": said,
        "figures": figures(benchmark, report),
    }


def history() -> list[Point]:
    """All points, in the order in which they were added.

    **Raises:** `ValueError` that names a line that is not a point.
    """
    if not HISTORY.exists():
        return []
    return [_point(*each) for each in enumerate(HISTORY.read_text().splitlines(), start=1)]


def _point(number: int, line: str) -> Point:
    try:
        found = json.loads(line)
        if lacking := {"benchmark", "machine", "figures"}.difference(found):
            raise ValueError(f"it lacks {', '.join(sorted(lacking))}")
        if "date" not in found["machine"]:
            raise ValueError("its machine lacks date")
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{HISTORY.name}, line {number} is not a point of a run: {error}. Lines are added and "
            "never changed: take the file as it was committed."
        ) from error
    return found


def key(each: Point) -> tuple[str, str]:
    """The identity of a run: its benchmark and its start time in seconds."""
    return each["benchmark"], each["machine"]["date"]


def committed(said: str = "") -> Iterator[dict[str, Any]]:
    """The points of the runs in `benchmarks/results/`."""
    for path in sorted(RESULTS.glob("*.json")):
        if match := RUN.fullmatch(path.stem):
            yield point(match["benchmark"], json.loads(path.read_text()), said)


def earlier() -> Iterator[dict[str, Any]]:
    """The points of all runs in the history of the repository, oldest commit first."""
    for path in sorted(RESULTS.glob("*.json")):
        name = path.relative_to(ROOT).as_posix()
        if match := RUN.fullmatch(path.stem):
            for line in _git("log", "--reverse", "--format=%H %s", "--", name).splitlines():
                commit, _, said = line.partition(" ")
                yield point(match["benchmark"], json.loads(_git("show", f"{commit}:{name}")), said)


def missing(points: Sequence[Point], known: Sequence[Point]) -> list[Point]:
    """The points that are not in `known`, the oldest first, without duplicates."""
    seen = {key(each) for each in known}
    found = {key(each): each for each in reversed(points) if key(each) not in seen}
    return sorted(found.values(), key=lambda each: each["machine"]["date"])


def add(points: Sequence[Point]) -> None:
    known = HISTORY.read_text() if HISTORY.exists() else ""
    with HISTORY.open("a") as file:
        if points and known and not known.endswith("\n"):
            file.write("\n")  # an editor may have removed the final newline
        file.writelines(json.dumps(each) + "\n" for each in points)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns 1 if a committed run has no point."""
    parser = argparse.ArgumentParser("python -m benchmarks.trend", description=__doc__)
    parser.add_argument("--add", action="store_true", help="add the runs that have no point yet")
    parser.add_argument(
        "--said", default="", metavar="TEXT", help="a description of the changes before the runs"
    )
    parser.add_argument(
        "--from-git", action="store_true", help="also add the figures of earlier commits"
    )
    options = parser.parse_args(arguments)
    try:
        history()
    except ValueError as error:
        parser.error(str(error))
    if options.from_git:
        add(missing(list(earlier()), history()))
    left = missing(list(committed(options.said)), history())
    if options.add:
        add(left)
    for each in left:
        print(*key(each), "is added." if options.add else "has no point: --add adds it.")
    return 1 if left and not options.add else 0


def _git(*command: str) -> str:
    process = subprocess.run(
        ["git", *command], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    return process.stdout


if __name__ == "__main__":
    sys.exit(main())
