"""Every public name of Equinox stands here too, and is called in the same way."""

import inspect
import types
from typing import Any

import equinox
import equinox.debug
import pytest

import eqxlike
import eqxlike.debug

PLAIN = (bool, int, float, str, types.NoneType)
PLACES = {"equinox": (equinox, eqxlike), "equinox.debug": (equinox.debug, eqxlike.debug)}

NAMES = [
    (place, name)
    for place, (theirs, _) in PLACES.items()
    for name in dir(theirs)
    if not name.startswith("_") and not isinstance(getattr(theirs, name), types.ModuleType)
]


def _parameters(callable_: Any) -> list[tuple[Any, ...]] | None:
    """What a caller needs to know of each parameter; `None` if Python cannot tell."""
    try:
        signature = inspect.signature(callable_)
    except ValueError:
        return None
    return [(each.name, each.kind, _default(each)) for each in signature.parameters.values()]


def _default(parameter: inspect.Parameter) -> Any:
    if parameter.default is parameter.empty or type(parameter.default) in PLAIN:
        return parameter.default
    return "some object"


def test_names_are_found():
    assert len(NAMES) > 50


@pytest.mark.parametrize(("place", "name"), NAMES)
def test_name_is_here_with_the_same_parameters(place, name):
    theirs, ours = (getattr(module, name) for module in PLACES[place])
    assert _parameters(ours) == _parameters(theirs)


@pytest.mark.parametrize(("place", "name"), NAMES)
def test_class_is_a_class_and_exception_an_exception(place, name):
    theirs, ours = (getattr(module, name) for module in PLACES[place])
    assert isinstance(ours, type) == isinstance(theirs, type)
    if isinstance(theirs, type):
        bases = (BaseException, RuntimeError, ValueError, TypeError)
        assert [issubclass(ours, b) for b in bases] == [issubclass(theirs, b) for b in bases]
