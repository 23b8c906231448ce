"""If a test of a library built on Equinox passes on Equinox, it passes on eqxlike."""

import sys

import pytest

from tests.downstream import suites


@pytest.mark.parametrize("suite", suites.SUITES, ids=lambda suite: suite.library)
def test_suite_passes_on_eqxlike_as_on_equinox(suite, record_property):
    if sys.version_info[:2] > suite.newest_python:
        pytest.skip(f"{suite.library} {suite.version} does not install on this Python")
    found = suites.compare(suite)
    counts = (found.num_run, len(found.both), len(found.equinox_alone), len(found.here_alone))
    record_property("suite", (suite.library, suite.version, *counts))
    assert found.num_run, f"no test of {suite.library} ran on Equinox"
    lines = [
        f"{test}: {outcome.last_error()}"
        for test, outcome in found.equinox_alone.items()
        if test not in suite.refused
    ]
    assert not lines, "\n".join(["passed only on Equinox:", *lines])
