"""`--whole`: every program, not the sample alone."""

import json
import subprocess
import sys

import pytest

from tests.downstream import run


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole", action="store_true", help="all programs, not the sample alone")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test a program. Those of a topic go to one worker, which runs them in one process."""
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
