"""eqxlike has every public name of Equinox, with the same parameters."""

import inspect
import types
from typing import Any

import equinox
import equinox.debug
import equinox.nn

import eqxlike
import eqxlike.debug
import eqxlike.nn

PLAIN = (bool, int, float, str, types.NoneType)
PLACES = {
    "equinox": (equinox, eqxlike),
    "equinox.debug": (equinox.debug, eqxlike.debug),
    "equinox.nn": (equinox.nn, eqxlike.nn),
}

# Arguments of layers that are required in Equinox and optional in eqxlike.
REQUIRED_THERE = {"BatchNorm": "axis_name"}

NAMES = [
    (place, name)
    for place, (theirs, _) in PLACES.items()
    for name in dir(theirs)
    if not name.startswith("_") and not isinstance(getattr(theirs, name), types.ModuleType)
]


def parameters_of(callable_: Any) -> list[tuple[Any, ...]] | None:
    """Name, kind and default of each parameter, or `None` if there is no signature."""
    try:
        signature = inspect.signature(callable_)
    except (TypeError, ValueError):
        return None
    return [(each.name, each.kind, _default(each)) for each in signature.parameters.values()]


def _default(parameter: inspect.Parameter) -> Any:
    if parameter.default is parameter.empty or type(parameter.default) in PLAIN:
        return parameter.default
    return "some object"


def _shared_parameters(place: str, name: str, ours: Any, theirs: Any) -> Any:
    """Our parameters without the parameters that Equinox lacks, which must be keywords with a
    default and belong to a layer, a gradient or `filter_jit`.
    """
    own, their = parameters_of(ours), parameters_of(theirs)
    have_more = ("filter_grad", "filter_value_and_grad", "filter_jit")
    has_more = place == "equinox.nn" or name in have_more
    if not has_more or own is None or their is None:
        return own
    known = {each.name for each in inspect.signature(theirs).parameters.values()}
    added = [each for each in inspect.signature(ours).parameters.values() if each.name not in known]
    assert all(each.kind is each.KEYWORD_ONLY for each in added)
    assert not any(each.default is each.empty for each in added)
    required = REQUIRED_THERE.get(name)
    return [
        (each, kind, inspect.Parameter.empty if each == required else default)
        for each, kind, default in own
        if each in known
    ]


def test_every_name_exists():
    assert len(NAMES) > 50
    assert [(place, name) for place, name in NAMES if not hasattr(PLACES[place][1], name)] == []


def test_names_have_the_same_parameters():
    differ = {}
    for place, name in NAMES:
        theirs, ours = (getattr(module, name) for module in PLACES[place])
        own, their = _shared_parameters(place, name, ours, theirs), parameters_of(theirs)
        if own != their:
            differ[place, name] = own, their
    assert differ == {}


LAYER_METHODS = [
    (name, method)
    for place, name in NAMES
    if place == "equinox.nn" and isinstance(getattr(equinox.nn, name), type)
    for method in ("__call__", "get", "set", "substate", "update", "is_stateful")
    if callable(getattr(getattr(equinox.nn, name), method, None))
]


def test_layers_are_called_with_the_same_parameters():
    differ = {}
    for name, method in LAYER_METHODS:
        theirs, ours = (getattr(getattr(module, name), method) for module in PLACES["equinox.nn"])
        own, their = _shared_parameters("equinox.nn", name, ours, theirs), parameters_of(theirs)
        if own != their:
            differ[name, method] = own, their
    assert differ == {}


def _bases(value: Any) -> list[type] | None:
    """The base classes in a fixed list that a class has, or `None` for other values."""
    bases = (object, BaseException, RuntimeError, ValueError, TypeError)
    return [base for base in bases if issubclass(value, base)] if isinstance(value, type) else None


def test_classes_and_exceptions_have_the_same_kind():
    theirs, ours = (
        {(place, name): _bases(getattr(PLACES[place][which], name)) for place, name in NAMES}
        for which in (0, 1)
    )
    assert ours == theirs
