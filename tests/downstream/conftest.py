"""Options: `--whole` runs all programs; `--suites` runs the libraries' own test suites instead."""

import json
import pathlib
import subprocess
import sys

import pytest

from tests.downstream import run


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole", action="store_true", help="run all programs instead of the sample")
    parser.addoption("--suites", action="store_true", help="run the libraries' own suites instead")


def pytest_ignore_collect(collection_path: pathlib.Path, config: pytest.Config) -> bool | None:
    is_of_suites = collection_path.name == "test_suites.py"
    return None if is_of_suites == config.getoption("suites") else True


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the results of the suites as a table."""
    reports = [
        report for word in ("passed", "failed") for report in terminalreporter.stats.get(word, [])
    ]
    rows = [dict(report.user_properties).get("suite") for report in reports]
    if any(rows):
        head = ("suite", "version", "tests run", "both", "Equinox alone", "here alone")
        terminalreporter.section("passed on Equinox and on eqxlike")
        for row in (head, *sorted(filter(None, rows))):
            name, release, *counts = map(str, row)
            cells = "".join(f"{count:>15}" for count in counts)
            terminalreporter.write_line(f"{name:15}{release:12}{cells}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Makes a test for each program. One worker runs all programs of a topic, in one process."""
    if {"topic", "name"} <= set(metafunc.fixturenames):
        command = [sys.executable, "-m", run.__name__, "list"]
        listed = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
        which = "whole" if metafunc.config.getoption("whole") else "sample"
        programs = [
            pytest.param(topic, name, id=f"{topic}: {name}", marks=pytest.mark.xdist_group(topic))
            for topic, names in json.loads(listed)[which].items()
            for name in names
        ]
        metafunc.parametrize(("topic", "name"), programs)
