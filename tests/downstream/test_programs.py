"""Libraries built on Equinox give the same results on eqxlike as on Equinox."""

import functools
import pathlib
import pickle
import subprocess
import sys
import tempfile
from typing import Any

import numpy as np
import pytest

from tests.downstream import run

TOLERANCE = 1e-9
"""The tolerance relative to the largest number of an array, in float64."""


@functools.cache
def outcomes(library: str, topic: str, names: tuple[str, ...]) -> dict[str, Any]:
    """The outcomes of programs of a topic on a library. All programs run in one process."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "outcomes")
        command = [sys.executable, "-m", run.__name__, library, str(file), topic, *names]
        process = subprocess.run(command, capture_output=True, text=True)
        assert process.returncode == 0, process.stderr
        return pickle.loads(file.read_bytes())


@pytest.fixture
def names_of_topic(request, topic) -> tuple[str, ...]:
    """The names of the selected programs of a topic."""
    parameters = [getattr(item, "callspec", None) for item in request.session.items]
    return tuple(
        each.params["name"] for each in parameters if each and each.params.get("topic") == topic
    )


def test_eqxlike_gives_the_numbers_of_equinox(topic, name, names_of_topic):
    theirs = outcomes(run.EQUINOX, topic, names_of_topic)[name]
    assert isinstance(theirs, dict), f"the program failed on Equinox:\n{theirs}"
    ours = outcomes(run.OURS, topic, names_of_topic)[name]
    assert isinstance(ours, dict), ours
    assert {path: (each.dtype, each.shape) for path, each in ours.items()} == {
        path: (each.dtype, each.shape) for path, each in theirs.items()
    }
    for path, expected in theirs.items():
        finite = np.abs(expected[np.isfinite(expected)])
        is_inexact = np.issubdtype(expected.dtype, np.inexact)
        tolerance = TOLERANCE * finite.max(initial=0) if is_inexact else 0
        np.testing.assert_allclose(ours[path], expected, rtol=0, atol=tolerance, err_msg=path)
