"""Builds the wheel and the sdist of a release, and checks them. Uploads nothing.

Checks the metadata and the long description. Installs each file in an empty environment outside of
the checkout, and trains and saves a small model there. `--whole` installs every extra alone, on
each Python of the classifiers, and tests the features of the extra (smoke.py). Prints sizes and
import times next to the figures of the last release (figures.json), and fails if a size grew by
more than `MARGIN`. `--record` writes the new figures to figures.json.
"""

import argparse
import contextlib
import json
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import textwrap
import time
import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).parents[2]
SMOKE = pathlib.Path(__file__).with_name("smoke.py")
FIGURES = pathlib.Path(__file__).with_name("figures.json")

MARGIN = 1.25
"""The largest allowed ratio of a size to the same size in the last release."""

OF_DEVELOPERS = {
    *(
        "checkers",
        "demo",
        "dev",
        "docs",
        "downstream",
        "peers",
        "pretrained-test",
        "pytorch",
        "test",
    )
}
"""The extras for developers, which `make` installs. The other extras are for users."""

# Files in the sdist for people who package or test the library.
IN_SDIST = (
    "README.md",
    "CHANGELOG.md",
    "LICENSE",
    "Makefile",
    "docs/migrating.md",
    "tests/conftest.py",
    ".ci/setup",
)

RELATIVE = re.compile(r'(?:\]\(|(?:href|src|srcset)=")(?!https:|#)[^)"]*')
"""A relative link, which is broken on a package index."""

_MODULE = sys.executable, "-m"

IMPORTS = 5
"""The number of processes that time the import."""

TIMED = """
import time
start_s = time.perf_counter()
import jax, numpy, optax, jaxtyping, wadler_lindig
between_s = time.perf_counter()
import eqxlike
print(between_s - start_s, time.perf_counter() - between_s)
"""


class Failed(Exception):
    """A command exited with a nonzero status."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="check-release", description=__doc__)
    parser.add_argument("--whole", action="store_true", help="test every extra on every Python")
    parser.add_argument("--record", action="store_true", help="write figures.json; needs --whole")
    options = parser.parse_args()
    if options.record and not options.whole:
        parser.error("--record needs --whole")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    last = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        scratch = pathlib.Path(folder)
        wheel, sdist = build(scratch / "dist")
        print(f"{wheel.name}, {sdist.name}: metadata and long description are valid", flush=True)
        figures = {"wheel": size_of(wheel), "sdist": size_of(sdist)}
        with environment(scratch, sys.executable) as python:
            install(python, str(sdist), is_whole=options.whole)
            smoke(python, "core", scratch)
            print(f"{sdist.name}: installs and runs", flush=True)
        pythons = found_pythons(project) if options.whole else {version_of(sys.executable): None}
        extras = sorted(set(project["optional-dependencies"]) - OF_DEVELOPERS)
        for version, path in pythons.items():
            for extra in ["core", *(extras if options.whole else ())]:
                try:
                    place = path or sys.executable, version
                    figures |= try_extra(scratch, *place, extra, wheel, is_whole=options.whole)
                except Failed as error:
                    print(f"Python {version}, {extra}: failed\n{error}", flush=True)
                    failed.append(f"Python {version}, {extra}")
    print(table(figures, last))
    if failed:
        print(f"failed: {'; '.join(failed)}", file=sys.stderr)
        return 1
    if options.record:
        FIGURES.write_text(json.dumps(figures, indent=1) + "\n")
        print(f"wrote {FIGURES.relative_to(ROOT)}")
        return 0
    grown = too_large(figures, last)
    for name in grown:
        print(f"{name}: larger than {MARGIN:.0%} of the last release", file=sys.stderr)
    return 1 if grown else 0


def build(folder: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """Builds the wheel and the sdist, and checks their metadata, links and files."""
    run([sys.executable, "-m", "build", "--outdir", folder, ROOT])
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    run([sys.executable, "-m", "twine", "check", "--strict", wheel, sdist])
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        if relative := RELATIVE.findall(archive.read(metadata).decode()):
            raise SystemExit(f"{wheel.name} has relative links: {', '.join(relative)}")
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    if missing := [name for name in IN_SDIST if name not in held]:
        raise SystemExit(f"{sdist.name} lacks {', '.join(missing)}")
    return wheel, sdist


def try_extra(
    scratch: pathlib.Path,
    interpreter: str,
    version: str,
    extra: str,
    wheel: pathlib.Path,
    *,
    is_whole: bool,
) -> dict[str, float]:
    """Installs one extra alone and tests its features.

    **Returns:** a dictionary of names and figures.
    """
    start_s = time.perf_counter()
    with environment(scratch, interpreter) as python:
        what = str(wheel) if extra == "core" else f"{wheel}[{extra}]"
        install(python, what, is_whole=is_whole)
        said = smoke(python, extra, scratch)
        packages = next(python.parents[1].glob("lib/python*/site-packages"))
        figures = {f"Python {version}, {extra}": size_of(packages)}
        if extra == "core":
            figures[f"Python {version}, eqxlike alone"] = size_of(packages / "eqxlike")
            of_jax_s, of_ours_s = import_times_s(python, scratch)
            figures[f"Python {version}, import of what it needs"] = of_jax_s
            figures[f"Python {version}, import of eqxlike"] = of_ours_s
    seconds = time.perf_counter() - start_s
    print(f"Python {version}, {extra}: installs and runs ({seconds:.0f} s)", flush=True)
    if said:
        print(textwrap.indent(said.strip(), "    "), flush=True)
    return figures


@contextlib.contextmanager
def environment(scratch: pathlib.Path, interpreter: str) -> Iterator[pathlib.Path]:
    """Creates an empty environment, yields the path of its Python, and deletes it on exit."""
    folder = scratch / "environment"
    run([interpreter, "-m", "venv", "--without-pip", folder])
    try:
        yield folder / "bin" / "python"
    finally:
        shutil.rmtree(folder)


def install(python: pathlib.Path, what: str, *, is_whole: bool) -> None:
    """Installs with pip, as users do, or with the faster uv if there are many environments."""
    if is_whole:
        # pip also uses the certificates of the system.
        certificates = {"UV_SYSTEM_CERTS": "true"}
        run([*_MODULE, "uv", "pip", "install", "--quiet", "--python", python, what], **certificates)
    else:
        options = ["--quiet", "--no-input", "--no-compile", "--disable-pip-version-check"]
        run([*_MODULE, "pip", "--python", python, "install", *options, what])


def smoke(python: pathlib.Path, extra: str, scratch: pathlib.Path) -> str:
    """Runs smoke.py for an extra in an empty folder, and returns the output."""
    folder = pathlib.Path(tempfile.mkdtemp(dir=scratch))
    shutil.copy(SMOKE, folder)
    return run([python, "smoke.py", extra], folder)


def import_times_s(python: pathlib.Path, scratch: pathlib.Path) -> tuple[float, float]:
    """The import times of eqxlike's dependencies and of eqxlike: medians over processes."""
    pairs = [run([python, "-c", TIMED], scratch).split() for _ in range(IMPORTS + 1)]
    # The first process compiles the sources to bytecode.
    of_needs, of_ours = zip(*pairs[1:], strict=True)
    return statistics.median(map(float, of_needs)), statistics.median(map(float, of_ours))


def found_pythons(project: dict[str, Any]) -> dict[str, str]:
    """The paths of the Pythons in the classifiers, by version.

    Exits if one of them is not installed.
    """
    named = [each.rpartition(" :: ")[2] for each in project["classifiers"]]
    versions = [each for each in named if each.startswith("3.")]
    found = {}
    for version in versions:
        minor = version.removeprefix("3.")
        done = subprocess.run(
            [ROOT / ".ci" / "find-python", minor, minor], capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(f"no Python {version} on the PATH or among pyenv's versions")
        found[version] = done.stdout.strip()
    return found


def version_of(python: str) -> str:
    return run([python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]).strip()


def run(command: Sequence[Any], folder: pathlib.Path = ROOT, **variables: str) -> str:
    """Runs a command and returns its output.

    **Arguments:**

    - `variables`: additional environment variables.

    **Raises:** `Failed`, with the end of the output, if the status is not 0.
    """
    # Without PYTHONPATH, the command cannot import the checkout.
    surrounding = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env=surrounding | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        said = "\n".join((done.stdout + done.stderr).splitlines()[-30:])
        raise Failed(f"{' '.join(map(str, command))}: status {done.returncode}\n{said}")
    return done.stdout


def size_of(path: pathlib.Path) -> int:
    """The size in bytes of a file, or of a folder without its `.pyc` files."""
    if path.is_file():
        return path.stat().st_size
    files = (each for each in path.rglob("*") if each.is_file() and each.suffix != ".pyc")
    return sum(each.stat().st_size for each in files)


def is_time(name: str) -> bool:
    return ", import of " in name


def too_large(figures: dict[str, float], last: dict[str, float]) -> list[str]:
    """The names of the sizes that grew by more than `MARGIN`."""
    return [
        name
        for name, value in figures.items()
        if name in last and not is_time(name) and value > MARGIN * last[name]
    ]


def table(figures: dict[str, float], last: dict[str, float]) -> str:
    """A table of the figures and the figures of the last release."""
    width = max(map(len, figures))
    lines = [f"{'':{width}}  {'now':>10}  {'last':>10}  ratio"]
    for name, value in figures.items():
        before = last.get(name)
        ratio = f"{value / before:5.2f}" if before else ""
        lines.append(
            f"{name:{width}}  {shown(name, value):>10}  {shown(name, before):>10}  {ratio}"
        )
    return "\n".join(lines)


def shown(name: str, value: float | None) -> str:
    if value is None:
        return ""
    if is_time(name):
        return f"{value:.2f} s"
    return f"{value / 2**20:.1f} MiB" if value >= 2**20 else f"{value / 2**10:.0f} KiB"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failed as error:
        sys.exit(str(error))
