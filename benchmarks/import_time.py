"""The cost of `import eqxlike`, compared with Equinox, NNX, and JAX, which all of them import.

Each import runs in a fresh process, which times the import, so that no column includes the start
and the end of Python. The sources are compiled to bytecode beforehand, as after `pip install`, even
if the environment disables bytecode. The processes of a round run one after the other, in a
changing order, and ratios are computed in each round. Ctrl-C prints the finished rows.
"""

import contextlib
import functools
import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

from benchmarks import command, report
from benchmarks.cases import Case, build, find
from benchmarks.timing import Call, Measurement, in_process, interleaved, of_seconds

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
    return in_process("-c", TIMED.format(before, statement))


@contextlib.contextmanager
def own_bytecode() -> Iterator[None]:
    """Lets processes write bytecode into a folder of their own, whatever the environment says."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ):
        os.environ["PYTHONPYCACHEPREFIX"] = folder
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        yield


PEERS = {EQUINOX: "import equinox", NNX: "from flax import nnx"}
ROWS: tuple[Case, ...] = (
    row("the package", {JAX: "import jax", OURS: "import eqxlike", **PEERS}),
    row(
        "the package and its layers",
        {
            JAX: "import jax",
            OURS: "import eqxlike.nn",
            EQUINOX: "import equinox.nn",
            NNX: "from flax import nnx",
        },
    ),
    row("the package, after JAX", {OURS: "import eqxlike", **PEERS}, before="import jax"),
)


def main(arguments: Sequence[str] | None = None, rows: Sequence[Case] = ROWS) -> int:
    """Measures and prints. Returns 2 for a wrong argument and 130 after Ctrl-C."""
    options = command.parse(arguments, NAME, __doc__, ROUNDS)

    def measured(case: Case) -> dict[str, Any]:
        calls, notes = build(case)
        return report.row(case.name, measure(calls, options.rounds), notes, TITLE)

    with own_bytecode():
        return command.execute(
            NAME, options, lambda: find(options.rows, rows), measured, tables=[report.Table(TITLE)]
        )


def measure(calls: Mapping[str, Call], rounds: int) -> Measurement:
    """Measures imports interleaved. An untimed first round writes the bytecode.

    **Arguments:**

    - `calls`: functions that return the seconds of one import, by column.
    - `rounds`: the number of imports in each column.
    """
    for call in calls.values():
        call()
    return of_seconds(interleaved(calls, rounds), EQUINOX if EQUINOX in calls else OURS)


if __name__ == "__main__":
    sys.exit(main())
