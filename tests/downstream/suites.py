"""Runs the test suites of libraries built on Equinox, on Equinox and on eqxlike.

A suite comes from the source distribution of its library. Each suite has an environment with the
library and the requirements of its tests. The environment also sees the packages of this
environment, so both have the same JAX and Equinox. `python suites.py OUTCOMES [ARGUMENT ...]` runs
pytest there and writes the outcome of each test to the file OUTCOMES.
"""

import itertools
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from importlib.metadata import version
from typing import Any, NamedTuple

import hypothesis
import pytest

BUILD = pathlib.Path(__file__).parents[2] / "build" / "suites"
OURS = "eqxlike"
LIBRARIES = ("equinox", OURS)
FIXED = ("jax", "jaxlib", "equinox", "lineax", "optimistix", "diffrax")
# Since pytest 9.0, `pytest.approx` refuses JAX arrays.
RUNNER = ("pytest==8.4.2", "pytest-timeout==2.4.0")
ERROR = "E  "
"""The prefix of pytest's error lines."""
TEST_LIMIT_S, SUITE_LIMIT_S = 300, 3600
WRONG_LIBRARY = 3


class Suite(NamedTuple):
    """The suite of a version of a library.

    - `needs`: requirements of its tests that the library does not require.
    - `paths`: paths of its tests.
    - `settings`: environment variables that the suite sets too late or by a plugin.
    - `sample_size`: number of tests to run, if all tests take more than 15 minutes.
    - `newest_python`: the newest Python that the library supports.
    - `refused`: tests that expect success where eqxlike raises an error on purpose.
    """

    library: str
    version: str
    needs: tuple[str, ...] = ()
    paths: tuple[str, ...] = ("tests",)
    settings: dict[str, str] = {}  # noqa: RUF012
    sample_size: int = sys.maxsize
    newest_python: tuple[int, int] = (3, 99)
    refused: tuple[str, ...] = ()


BEARTYPE = "beartype==0.22.9"
# Sybil runs the examples in docstrings and pages.
SYBIL = "sybil[pytest]>=9.2"
UNXT_NEEDS = (
    *(BEARTYPE, SYBIL, "hypothesis[numpy]", "optional-dependencies", "unxt-hypothesis==1.11.0"),
    *("pytest-arraydiff", "pytest-benchmark", "pytest-codspeed", "pytest-env", "pytest-mpl"),
)
ARRAYS_IN_STATIC_FIELDS = (
    "tests/test_debug.py::test_diagnose_common_issues_static",
    "tests/test_debug.py::test_diagnose_common_issues_static_nested",
)
SUITES = (
    Suite("quax", "0.4.6", (BEARTYPE,), settings={"JAX_CHECK_TRACER_LEAKS": "1"}),
    Suite("paramax", "0.0.5", (BEARTYPE,)),
    Suite("zodiax", "0.5.0"),
    Suite("ihoop", "0.1.4"),
    Suite("exponax", "0.2.0"),
    Suite("pdequinox", "0.1.2", sample_size=200),
    Suite("signax", "0.2.1"),
    Suite("traceax", "1.0.2"),
    Suite("haliax", "1.4.dev453", ("chex==0.1.91",), refused=ARRAYS_IN_STATIC_FIELDS),
    Suite("megalodon-jax", "0.2.2", newest_python=(3, 11)),
    Suite("gpjax", "1.0.0", ("networkx", "mktestdocs"), sample_size=200, newest_python=(3, 11)),
    # Leaves out the simulations, which take minutes each.
    Suite("fdtdx", "0.6.3", paths=("tests/unit", "tests/integration"), sample_size=200),
    Suite("fleqx", "0.0.5"),
    Suite("flowjax", "19.1.2", (BEARTYPE, "numpyro")),
    Suite("tinygp", "0.3.1"),
    Suite("interpax", "0.3.16"),
    Suite("unxt", "1.11.4", UNXT_NEEDS, ("README.md", "src", "tests")),
    # Newer versions use functions that JAX removed, or are built on Flax.
    Suite("evermore", "0.3.2"),
    Suite("diffraxtra", "1.6.0", (SYBIL, "attrs"), ("README.md", "src", "tests")),
)


class Outcome(NamedTuple):
    """The outcome of a test: `passed`, `failed` or `skipped`, with the text of its error."""

    word: str
    error: str = ""

    def last_error(self) -> str:
        """The first line of the last error. pytest prints the error's details below it."""
        errors = [
            line.removeprefix(ERROR).strip()
            for before, line in itertools.pairwise(["", *self.error.splitlines()])
            if line.startswith(ERROR) and not before.startswith(ERROR)
        ]
        return (errors or self.error.splitlines() or [""])[-1]


class Comparison(NamedTuple):
    """The number of tests that ran, and the tests that passed on both libraries or on one alone.

    `equinox_alone` maps each test that only passed on Equinox to its outcome on eqxlike.
    """

    num_run: int
    both: set[str]
    equinox_alone: dict[str, Outcome]
    here_alone: set[str]


def run_checked(command: list[Any]) -> None:
    """Runs a command. If it fails, raises RuntimeError with the end of its output."""
    process = subprocess.run(command, text=True, stdout=-1, stderr=subprocess.STDOUT)
    if process.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))} failed:\n{process.stdout[-2000:]}")


def installed(suite: Suite) -> pathlib.Path:
    """The folder with the suite's `source` and `environment`. Creates them if they are missing."""
    python_and_jax = f"python{sys.version_info[0]}.{sys.version_info[1]}-jax{version('jax')}"
    folder = BUILD / f"{suite.library}-{suite.version}-{python_and_jax}"
    if (folder / "installed").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    pip = [sys.executable, "-m", "pip"]
    library = f"{suite.library}=={suite.version}"
    source = ["--no-deps", "--no-binary", suite.library, "--dest", folder]
    run_checked([*pip, "download", *source, library])
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    next(folder.glob("*/PKG-INFO")).parent.rename(folder / "source")
    # Without a configuration file here, pytest would use eqxlike's configuration.
    (folder / "pytest.ini").touch()
    venv.create(folder / "environment")
    site_packages = next((folder / "environment").glob("lib/python*/site-packages"))
    (site_packages / "eqxlike_suites.pth").write_text(
        f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
        f"import os; os.environ.get('SUITE_LIBRARY') == {OURS!r} "
        f"and __import__({OURS!r}).install_as_equinox()\n"
    )
    fixed = folder / "constraints.txt"
    fixed.write_text("".join(f"{name}=={version(name)}\n" for name in FIXED))
    python = folder / "environment" / "bin" / "python"
    needs = ["--constraint", fixed, library, *RUNNER, *suite.needs]
    run_checked([*pip, "--python", python, "install", *needs])
    (folder / "installed").touch()
    return folder


def outcomes(suite: Suite, library: str) -> dict[str, Outcome]:
    """The outcomes of the tests of a suite on a library, without tests that did not finish."""
    folder = installed(suite)
    file = folder / f"{library}.jsonl"
    file.unlink(missing_ok=True)
    command = [folder / "environment/bin/python", "-P", __file__, file]
    command += [*suite.paths, "--rootdir", "."]
    command += ["--timeout", str(TEST_LIMIT_S), "-p", "no:randomly", "-p", "no:cacheprovider"]
    command += ["--continue-on-collection-errors", "--hypothesis-seed", "0"]
    # eqxlike is imported before pytest starts, and imports jaxtyping.
    command += ["-W", "ignore:Module already imported so cannot be rewritten"]
    settings = {"SUITE_LIBRARY": library, "SUITE_SAMPLE_SIZE": str(suite.sample_size)}
    with open(folder / f"{library}.log", "w") as log:
        process = subprocess.Popen(
            command,
            cwd=folder / "source",
            env=os.environ | settings | suite.settings,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            process.wait(SUITE_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
    assert process.returncode != WRONG_LIBRARY, f"the suite imported the wrong library: {log.name}"
    lines = file.read_text().splitlines() if file.exists() else []
    return {test: Outcome(*rest) for test, *rest in map(json.loads, lines)}


def compare(suite: Suite) -> Comparison:
    """Runs a suite on both libraries."""
    theirs, ours = (outcomes(suite, library) for library in LIBRARIES)
    there, here = (
        {test for test, outcome in each.items() if outcome.word == "passed"}
        for each in (theirs, ours)
    )
    absent = Outcome("absent", "did not run or did not finish")
    alone = {
        test: ours.get(test) or ours.get(test.partition("::")[0], absent)
        for test in sorted(there - here)
    }
    num_run = sum(outcome.word != "skipped" for outcome in theirs.values())
    return Comparison(num_run, there & here, alone, here - there)


MAX_MAPS = 30_000


class Recorder:
    """A pytest plugin that writes the outcome of each test as a line of a file."""

    def __init__(self, file: str):
        self.lines = open(file, "w", buffering=1)  # noqa: SIM115
        self.failed = set[str]()

    def write(self, report: pytest.CollectReport | pytest.TestReport) -> None:
        print(json.dumps([report.nodeid, report.outcome, report.longreprtext]), file=self.lines)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        size = int(os.environ.get("SUITE_SAMPLE_SIZE", sys.maxsize))
        if len(items) > size:
            names = sorted(item.nodeid for item in items)
            drawn = set(random.Random(0).sample(names, size))
            items[:] = [item for item in items if item.nodeid in drawn]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.write(report)

    def pytest_runtest_logfinish(self) -> None:
        # Each compiled program needs 20 to 40 memory mappings. jaxlib crashes, with either
        # library, when the process exceeds the kernel's limit (65,530 by default).
        maps = pathlib.Path("/proc/self/maps")
        if maps.exists() and maps.read_text().count("\n") > MAX_MAPS and "jax" in sys.modules:
            sys.modules["jax"].clear_caches()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        is_first_failure = report.failed and report.nodeid not in self.failed
        if is_first_failure:
            self.failed.add(report.nodeid)
        is_the_end = report.when == "call" and report.nodeid not in self.failed
        if is_first_failure or report.skipped or is_the_end:
            self.write(report)


def main(file: str, *arguments: str) -> None:
    """Runs pytest in the current folder. Exits with WRONG_LIBRARY if it imported the other one."""
    sys.path.insert(0, os.getcwd())
    # Without a deadline: an example that is slow on a busy machine is no failure of a library.
    hypothesis.settings.register_profile("suites", deadline=None)
    hypothesis.settings.load_profile("suites")
    pytest.main(list(arguments), plugins=[Recorder(file)])
    imported = {name for name in LIBRARIES if getattr(sys.modules.get(name), "__file__", None)}
    if imported != {os.environ["SUITE_LIBRARY"]}:
        print(f"imported libraries: {imported}")
        sys.exit(WRONG_LIBRARY)


if __name__ == "__main__":
    main(*sys.argv[1:])
