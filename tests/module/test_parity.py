"""The same short programs on Equinox and on eqxlike come to the same, but for what is listed."""

import equinox
import pytest

import eqxlike
from tests.module.programs import (  # noqa: F401  They fill the registry.
    abstract,
    check_init,
    construction,
    converters,
    custom_init,
    decorated,
    fields,
    inheritance,
    methods,
    mistakes,
    partial,
    replaced,
    sources,
    strict,
    trees,
    typed,
    wrapping,
)
from tests.module.programs.registry import DIFFERENCES, PROGRAMS, run


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in DIFFERENCES])
def test_program_comes_to_the_same_as_on_equinox(name):
    assert run(PROGRAMS[name], eqxlike) == run(PROGRAMS[name], equinox)


@pytest.mark.parametrize("name", DIFFERENCES)
def test_program_differs_from_equinox_as_is_intended(name):
    assert run(PROGRAMS[name], eqxlike) != run(PROGRAMS[name], equinox)
