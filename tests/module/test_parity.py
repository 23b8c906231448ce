"""The same short programs on Equinox and on eqxlike come to the same, but for what is listed."""

import equinox
import pytest

import eqxlike
from tests.beside_equinox import output
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
from tests.module.programs.registry import PROGRAMS


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in PROGRAMS.differences])
def test_program_comes_to_the_same_as_on_equinox(name):
    assert output(PROGRAMS[name], eqxlike) == output(PROGRAMS[name], equinox)


@pytest.mark.parametrize("name", PROGRAMS.differences)
def test_program_differs_from_equinox_as_is_intended(name):
    assert output(PROGRAMS[name], eqxlike) != output(PROGRAMS[name], equinox)
