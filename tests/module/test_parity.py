"""Short programs give the same output on Equinox and on eqxlike, except for listed differences.

Each file of the folder is one test. A failure names its programs.
"""

import equinox
import pytest

import eqxlike
from tests.beside_equinox import output
from tests.module.programs import (  # noqa: F401  They fill the registry.
    abstract,
    construction,
    decorators,
    fields,
    inheritance,
    methods,
    mistakes,
    replaced,
    wrapping,
)
from tests.module.programs.registry import PROGRAMS

CHAPTERS = sorted({program.__module__ for program in PROGRAMS.values()})


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda name: name.rpartition(".")[2])
def test_programs_agree_with_equinox(chapter):
    differing = {}
    for name, program in PROGRAMS.items():
        if program.__module__ == chapter and name not in PROGRAMS.differences:
            ours, theirs = output(program, eqxlike), output(program, equinox)
            if ours != theirs:
                differing[name] = ours, theirs
    assert not differing


def test_listed_programs_differ_from_equinox():
    same = [
        name
        for name in PROGRAMS.differences
        if output(PROGRAMS[name], eqxlike) == output(PROGRAMS[name], equinox)
    ]
    assert not same
