"""`install_as_equinox`, in a new process that prints its findings."""

import importlib
import importlib.metadata
import json
import operator
import subprocess
import sys
import types
from typing import Any

import equinox
import pytest

import eqxlike
from eqxlike import _standing_in

INSTALLED = """
import json
import sys

import eqxlike

found = {"returned": eqxlike.install_as_equinox(), "before": sorted(sys.modules)}
found["again"] = eqxlike.install_as_equinox()
found["finders"] = [type(finder).__module__ for finder in sys.meta_path]


def error(statement):
    try:
        exec(statement, globals())
    except Exception as raised:
        return [type(raised).__name__, str(raised)]


found["errors"] = {statement: error(statement) for statement in %s}

import importlib
import importlib.metadata
import importlib.util
from operator import attrgetter

from eqxlike._standing_in import _NAMES

import equinox as eqx
import jax
from equinox import nn
from equinox.debug import breakpoint_if
from equinox.internal import while_loop, ω


class Model(eqx.Module):
    layer: nn.Linear


model = Model(nn.Linear(2, 2, key=jax.random.key(0)))
found["classes"] = [isinstance(model, eqxlike.Module), isinstance(model.layer, eqxlike.nn.Linear)]
found["same"] = {
    "Module": eqx.Module is eqxlike.Module,
    "nn": eqx.nn is nn and nn is sys.modules["equinox.nn"],
    "nn.Linear": nn.Linear is eqxlike.nn.Linear,
    "internal": ω is eqxlike.internal.ω and while_loop is eqxlike.loops.while_loop,
    "debug": breakpoint_if is eqxlike.debug.breakpoint_if,
    "tree_inference": eqx.tree_inference is eqxlike.tree_inference,
}
found["private"] = [path for path in _NAMES if attrgetter(path[8:])(eqx) is None]
found["public in private"] = [
    eqx.nn._linear.Linear is nn.Linear,
    eqx.internal._loop.loop.while_loop is while_loop,
    eqx._module.Static is eqx.internal.Static,
]


class Meta(eqx._module._module._ModuleMeta):
    pass


# The rules of strict classes would refuse its name.
class OfMeta(eqx.Module, metaclass=Meta, strict=True):
    number: int
    missing: eqx.AbstractVar[int]


class Built(OfMeta):
    missing: int


private = eqx._module._module
built = Built.__new__(Built)
private._currently_initialising.add(built)
built.number, built.missing = 1, 2
private._currently_initialising.remove(built)
found["built"] = [
    repr(built),
    *map(private.is_abstract_module, (OfMeta, Built)),
    *(private._has_dataclass_init[each] for each in (Built, nn.Linear)),
    eqx._misc.default_floating_dtype().__name__,
    error("built.number = 3")[0],
]
found["versions"] = [eqx.__version__, importlib.metadata.version("equinox"), eqxlike.__version__]
found["names"] = {name: dir(sys.modules[name]) for name in ("equinox", "equinox.nn")}
found["reloaded"] = importlib.reload(eqx) is eqx and eqx.Module is eqxlike.Module
found["found"] = [
    importlib.util.find_spec(f"equinox.{name}") is not None
    for name in ("nn", "_jit", "nothing", "nn._nothing")
]
found["others"] = importlib.metadata.version("jax")
namespace = {}
exec("from equinox import *", namespace)
found["starred"] = sorted(namespace)
eqx.filter_jit = "mine"
found["set"] = [eqx.filter_jit, eqxlike.filter_jit == "mine"]
found["files"] = sorted(
    module.__file__ for module in sys.modules.values() if getattr(module, "__file__", None)
)
print(json.dumps(found))
"""

# Names that eqxlike does not have.
ABSENT = {
    "import equinox; equinox.nothing": "equinox.nothing",
    "from equinox.nn import Nothing": "equinox.nn.Nothing",
    "import equinox.nothing.below": "equinox.nothing",
    "from equinox.nn._linear import Nothing": "equinox.nn._linear.Nothing",
    "import equinox._ad; equinox._ad.nn": "equinox._ad.nn",
    "from equinox._better_abstract import AbstractVar": "equinox._better_abstract`: in Equinox "
    "0.13.8 it is `equinox._module._better_abstract",
    "from equinox._module import _ModuleMeta": "equinox._module._ModuleMeta`: in Equinox 0.13.8 it "
    "is `equinox._module._module._ModuleMeta",
    "from equinox._errors import _nan_like": "equinox._errors._nan_like`: use "
    "`jax.numpy.full_like(x, jax.numpy.nan)",
}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """The findings of a process that uses eqxlike instead of Equinox."""
    command = [sys.executable, "-c", INSTALLED % json.dumps(list(ABSENT))]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_replaced_modules_are_returned_and_a_second_call_changes_nothing(found):
    assert found["returned"] == {
        "equinox": "eqxlike",
        "equinox.debug": "eqxlike.debug",
        "equinox.internal": "eqxlike.internal",
        "equinox.nn": "eqxlike.nn",
    }
    assert found["again"] == found["returned"]
    assert found["finders"].count("eqxlike._standing_in") == 1


def test_modules_are_imported_on_first_use_and_equinox_never(found):
    assert not {"equinox", "eqxlike.nn", "eqxlike.debug"} & set(found["before"])
    assert found["files"] != []
    assert [file for file in found["files"] if "/equinox/" in file.replace("\\", "/")] == []


def test_names_of_equinox_are_objects_of_eqxlike_and_may_be_replaced(found):
    assert set(found["same"].values()) == {True}
    assert found["classes"] == [True, True]
    assert {"Module", "nn", "filter_jit", "__version__"} <= set(found["names"]["equinox"])
    assert {"Linear", "MLP", "State"} <= set(found["names"]["equinox.nn"])
    assert {"Module", "nn", "tree_inference"} <= set(found["starred"])
    assert found["reloaded"]
    assert found["set"] == ["mine", False]


def test_private_names_have_their_place_in_equinox_and_work(found):
    for module in _standing_in._PRIVATE:
        importlib.import_module(module)
    for path in _standing_in._NAMES:
        assert operator.attrgetter(path.removeprefix("equinox."))(equinox) is not None
    assert found["private"] == []
    assert found["public in private"] == [True] * 3
    assert found["built"] == [
        *("Built(number=1, missing=2)", True, False, True, False, "float32"),
        "FrozenInstanceError",
    ]


def test_metadata_and_find_spec_describe_the_compatible_equinox(found):
    ours = found["versions"].pop()
    assert found["versions"] == [_standing_in.EQUINOX_VERSION] * 2
    assert ours != _standing_in.EQUINOX_VERSION
    assert importlib.metadata.version("equinox") == _standing_in.EQUINOX_VERSION
    assert found["others"] == importlib.metadata.version("jax")
    # `find_spec` finds two existing modules and not the two others.
    assert found["found"] == [True, True, False, False]


@pytest.mark.parametrize(("statement", "name"), ABSENT.items())
def test_error_of_a_missing_name_mentions_eqxlike_and_equinox(found, statement, name):
    kind, message = found["errors"][statement]
    is_attribute = not statement.startswith("from") and ";" in statement
    assert kind == ("AttributeError" if is_attribute else "ModuleNotFoundError")
    assert message == (f"eqxlike stands in for Equinox 0.13.8 in this process, and has no `{name}`")


def test_call_after_an_import_of_equinox_is_refused(monkeypatch):
    equinox = types.ModuleType("equinox")
    equinox.__file__ = "/there/equinox/__init__.py"
    monkeypatch.setitem(sys.modules, "equinox", equinox)
    monkeypatch.setattr(sys, "meta_path", finders := [*sys.meta_path])
    with pytest.raises(RuntimeError) as caught:
        eqxlike.install_as_equinox()
    assert str(caught.value) == (
        "install_as_equinox() must be called before Equinox is imported, but Equinox has been "
        "imported in this process, from /there/equinox/__init__.py. Call install_as_equinox() at "
        "the start of the program, before it imports Equinox or a library that is built on Equinox."
    )
    assert not any(type(each).__module__ == "eqxlike._standing_in" for each in finders)
