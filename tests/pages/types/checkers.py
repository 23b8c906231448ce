"""The errors and types that pyright and mypy report for each line."""

import collections
import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys

REPOSITORY = pathlib.Path(__file__).parents[3]
CACHE = REPOSITORY / ".pytest_cache" / "mypy"

_REVEALED = re.compile(r'(?:Type of ".*" is|Revealed type is) "(.*)"', re.DOTALL)


@dataclasses.dataclass
class Report:
    """The errors and types of a program, by line number."""

    errors: dict[int, list[str]] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(list)
    )
    types: dict[int, str] = dataclasses.field(default_factory=dict)

    def add(self, line: int, is_error: bool, message: str) -> None:
        if is_error:
            self.errors[line].append(message)
        elif revealed := _REVEALED.fullmatch(message):
            self.types[line] = revealed[1]


Reports = dict[str, Report]


def start_pyright(folder: pathlib.Path, *names: str) -> subprocess.Popen[str]:
    """Starts pyright with its default settings on programs in `folder`."""
    include = [f"{name}.py" for name in names]
    settings = {"include": include, "extraPaths": [str(REPOSITORY)]}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    return _start(folder, "pyright", "--outputjson", "--pythonpath", sys.executable)


def read_pyright(process: subprocess.Popen[str]) -> Reports:
    reports: Reports = collections.defaultdict(Report)
    for found in json.loads(_output(process))["generalDiagnostics"]:
        line = found["range"]["start"]["line"] + 1
        is_error = found["severity"] == "error"
        reports[pathlib.Path(found["file"]).stem].add(line, is_error, found["message"])
    return reports


def start_mypy(folder: pathlib.Path) -> subprocess.Popen[str]:
    """Starts mypy with its default settings on the programs in `folder`."""
    # Optax has no types, so its imports are not checked. mypy skips the compiler modules of JAX,
    # which took a quarter of its time and do not affect the types of a program.
    compiler = "jaxlib.mlir.*,jaxlib.mosaic.*,jax._src.export.*,jax._src.pallas.*"
    settings = (
        "[mypy]\n[mypy-optax.*]\nignore_missing_imports = True\n"
        f"[mypy-{compiler},jax._src.interpreters.mlir]\nfollow_imports = skip\n"
    )
    (folder / "mypy.ini").write_text(settings)
    programs = [path.name for path in folder.glob("*.py")]
    # Caches only libraries: mypy reports nothing about cached programs.
    for program in programs:
        for path in CACHE.glob(f"*/{program.removesuffix('py')}*"):
            path.unlink(missing_ok=True)
    options = ["--output", "json", "--follow-imports", "silent"]
    options += ["--cache-dir", str(CACHE), "--no-sqlite-cache"]
    return _start(folder, "mypy", *options, *programs)


def read_mypy(process: subprocess.Popen[str]) -> Reports:
    reports: Reports = collections.defaultdict(Report)
    for found in map(json.loads, _output(process).splitlines()):
        is_error = found["severity"] == "error"
        reports[pathlib.Path(found["file"]).stem].add(found["line"], is_error, found["message"])
    return reports


def _start(folder: pathlib.Path, checker: str, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", checker, *options],
        cwd=folder,
        env={**os.environ, "MYPYPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _output(process: subprocess.Popen[str]) -> str:
    output, errors = process.communicate()
    # Status 1 means that there are errors.
    assert process.returncode == 1, output + errors
    return output
