"""The cost of `import eqxlike`, compared with Equinox, NNX, and JAX, which all of them import.

Each import runs in a fresh process, which times the import, so that no column includes the start
and the end of Python. The sources are compiled to bytecode beforehand, as after `pip install`, even
if the environment disables bytecode. The processes of a round run one after the other, in a
changing order, and ratios are computed in each round. Ctrl-C prints the finished rows.
"""

import functools
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

from benchmarks import cases, command, report
from benchmarks.cases import Case
from benchmarks.timing import Call, Measurement, Samples, round_orders, summarise

NAME = "benchmarks.import_time"
ROUNDS = command.Rounds(default=30, quick=5)

JAX = "jax alone"
OURS = "eqxlike"
EQUINOX = "Equinox"
NNX = "NNX"

TITLE = "Import in a fresh process"

TIMED = """
import time
{}
start_s = time.perf_counter()
{}
print(time.perf_counter() - start_s)
"""


def row(name: str, statements: Mapping[str, str], before: str = "") -> Case:
    """The row that times a statement in each column. Its second word is the name of a module.

    `before` is a statement that runs before the clock starts.
    """

    def build(statement: str) -> Call:
        module = statement.split()[1]
        if importlib.util.find_spec(module) is None:
            raise ImportError(f"No module named {module!r}")
        return functools.partial(import_s, statement, before)

    builders = {
        column: functools.partial(build, statement) for column, statement in statements.items()
    }
    return Case(name, builders, baseline=EQUINOX)


def import_s(statement: str, before: str = "") -> float:
    """The seconds that a statement takes in a fresh process, after the statement `before`."""
    process = subprocess.run(
        [sys.executable, "-c", TIMED.format(before, statement)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return float(process.stdout)


ROWS: tuple[Case, ...] = (
    row(
        "the package",
        {
            JAX: "import jax",
            OURS: "import eqxlike",
            EQUINOX: "import equinox",
            NNX: "from flax import nnx",
        },
    ),
    row(
        "the package and its layers",
        {
            JAX: "import jax",
            OURS: "import eqxlike.nn",
            EQUINOX: "import equinox.nn",
            NNX: "from flax import nnx",
        },
    ),
    row(
        "the package, after JAX",
        {
            OURS: "import eqxlike",
            EQUINOX: "import equinox",
            NNX: "from flax import nnx",
        },
        before="import jax",
    ),
)


def main(arguments: Sequence[str] | None = None, rows: Sequence[Case] = ROWS) -> int:
    """Measures and prints. Returns 2 for a wrong argument and 130 after Ctrl-C."""
    options = command.parse(arguments, NAME, __doc__, ROUNDS)

    def begin() -> tuple[Sequence[Case], dict[str, Any]]:
        result = report.new_report({"rounds": options.rounds})
        result["tables"] = [{"title": TITLE, "clocks": ["completion"], "unit": "milliseconds"}]
        return cases.find(options.rows, rows), result

    def measured(case: Case) -> dict[str, Any]:
        calls, notes = cases.build(case)
        return report.row(case.name, measure(calls, options.rounds), notes) | {"table": TITLE}

    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ):
        os.environ["PYTHONPYCACHEPREFIX"] = folder
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        return command.execute(NAME, options, begin, measured)


def measure(calls: Mapping[str, Call], rounds: int, seed: int = 0) -> Measurement:
    """Measures imports interleaved. An untimed first round writes the bytecode.

    **Arguments:**

    - `calls`: functions that return the seconds of one import, by column.
    - `rounds`: the number of imports in each column.
    - `seed`: the seed of the order of the columns.
    """
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {column: [] for column in calls}
    for order in round_orders(tuple(calls), rounds, seed):
        for column in order:
            times[column].append(1e6 * calls[column]())
    samples = {column: Samples(tuple(us), tuple(us), calls=1) for column, us in times.items()}
    return summarise(samples, EQUINOX if EQUINOX in calls else OURS)


if __name__ == "__main__":
    sys.exit(main())
