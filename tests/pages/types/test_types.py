"""Errors and types that type checkers report for programs with eqxlike and with Equinox."""

import pathlib
import re

import pytest

from .checkers import Report, read_mypy, read_pyright, start_mypy, start_pyright

HERE = pathlib.Path(__file__).parent
SHARED, OWN, EQUINOX = "with_eqxlike", "with_eqxlike_only", "with_equinox"
SOURCES = {
    SHARED: (HERE / "program.py").read_text(),
    OWN: (HERE / "own_program.py").read_text(),
}
SOURCES[EQUINOX] = re.sub("^(import|from) eqxlike ", r"\1 equinox ", SOURCES[SHARED], flags=re.M)

VAGUE = re.compile(r"\b(Any|Unknown|Never)\b|\.\.\.")
"""Types that are unknown."""


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict[str, dict[str, Report]]:
    folder = tmp_path_factory.mktemp("programs")
    for name, source in SOURCES.items():
        (folder / f"{name}.py").write_text(source)
    # The expected types are pyright's types with eqxlike, so only mypy checks Equinox.
    pyright, mypy = start_pyright(folder, SHARED, OWN), start_mypy(folder)
    return {"pyright": read_pyright(pyright), "mypy": read_mypy(mypy)}


def marked(name: str) -> set[int]:
    """The numbers of the lines that end in `# mistake`."""
    lines = SOURCES[name].splitlines()
    return {number for number, line in enumerate(lines, 1) if line.endswith("  # mistake")}


def expected_types(name: str) -> dict[int, str]:
    """The comment after each `reveal_type`, by line."""
    lines = SOURCES[name].splitlines()
    return {
        number: line.split("  # ", 1)[1]
        for number, line in enumerate(lines, 1)
        if line.lstrip().startswith("reveal_type(")
    }


def shown(name: str, lines: set[int]) -> list[str]:
    """The given lines of a program, for an assertion message."""
    return [f"{line}: {SOURCES[name].splitlines()[line - 1].strip()}" for line in sorted(lines)]


CHECKERS = pytest.mark.parametrize("checker", ["pyright", "mypy"])
PROGRAMS = pytest.mark.parametrize("name", [SHARED, OWN])


@CHECKERS
@PROGRAMS
def test_each_mistake_is_found(reports, checker, name):
    assert shown(name, marked(name) - set(reports[checker][name].errors)) == []


@CHECKERS
@PROGRAMS
def test_lines_without_a_mistake_have_no_error(reports, checker, name):
    errors = reports[checker][name].errors
    assert {line: errors[line] for line in set(errors) - marked(name)} == {}


@PROGRAMS
def test_pyright_knows_each_type(reports, name):
    assert reports["pyright"][name].types == expected_types(name)


def test_types_of_mypy_are_as_precise_as_with_equinox(reports):
    ours, theirs = reports["mypy"][SHARED].types, reports["mypy"][EQUINOX].types
    assert set(ours) == set(expected_types(SHARED))
    vaguer = {
        line: (ours[line], theirs[line])
        for line in ours
        if line in theirs and len(VAGUE.findall(ours[line])) > len(VAGUE.findall(theirs[line]))
    }
    assert vaguer == {}
