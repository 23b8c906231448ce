"""Tests that take the library as `eqxi` run on Equinox too, whose behaviour is the measure."""

import equinox.internal
import pytest

import eqxlike.internal

LIBRARIES = {"equinox": equinox.internal, "eqxlike": eqxlike.internal}

both = pytest.mark.parametrize("eqxi", LIBRARIES.values(), ids=LIBRARIES)
