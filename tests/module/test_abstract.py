"""Abstract attributes: messages of errors, and annotations that are strings.

`programs/abstract.py` compares the ways to override them with Equinox.
"""

from __future__ import annotations

import abc
import dataclasses
import sys
import types
import typing

import pytest

import eqxlike
from eqxlike import AbstractClassVar, AbstractVar, Module

# The import above makes all annotations in this file strings.


class AbstractShape(Module):
    sides: AbstractVar[int]
    name: AbstractClassVar[str]

    @abc.abstractmethod
    def area(self): ...


class AbstractSub(AbstractShape):
    sides: int

    def area(self):
        return 0


class AbstractMethodAlone(Module):
    @abc.abstractmethod
    def method(self): ...


class RaisesInNew(Module):
    def __new__(cls):
        raise TypeError("of the user")


def declare(annotation, **body):
    body["__annotations__"] = {"x": annotation}
    return type(Module)("AbstractModel", (Module,), body)


SUB_LACKS = "abstract class attributes name"
ERRORS = [
    (AbstractShape, rf"attributes sides and {SUB_LACKS} and abstract methods area\. In a subclass"),
    (AbstractSub, rf"abstract class AbstractSub with {SUB_LACKS}\. "),
    (AbstractMethodAlone, "abstract class AbstractMethodAlone .*abstract method '?method'?$"),
    (RaisesInNew, "^of the user$"),
    (lambda: declare("AbstractVar"), r"AbstractModel\.x .*`x: AbstractVar\[int\]`"),
    (lambda: declare("AbstractClassVar"), r"AbstractModel\.x .*`x: AbstractClassVar\[int\]`"),
    (lambda: declare(AbstractVar[int], x=3), r"AbstractModel\.x is an abstract attribute and"),
    (lambda: declare(AbstractClassVar[int], x=3), r"Model\.x is an abstract class attribute and"),
]


@pytest.mark.parametrize(("make", "message"), ERRORS)
def test_error_names_the_abstract_attributes_and_methods(make, message):
    with pytest.raises(TypeError, match=message):
        make()


def test_annotations_and_abstract_names_of_a_class_are_kept():
    assert AbstractShape.__annotations__["sides"] == "AbstractVar[int]"
    hints = typing.get_type_hints(AbstractShape)
    assert hints == {"sides": AbstractVar[int], "name": AbstractClassVar[str]}
    updated = abc.update_abstractmethods(AbstractShape)
    assert updated.__abstractmethods__ == {"sides", "name", "area"}


Aliased = AbstractVar


class AbstractRead(Module):
    dotted: eqxlike.AbstractVar[int]
    aliased: Aliased[int]


def test_markers_are_recognised_by_value_or_by_name():
    from eqxlike import AbstractVar as AbstractVar

    class AbstractModel(Module):
        x: AbstractVar[int]
        y: Unknown[int]

    assert AbstractRead.__abstractvars__ == {"dotted", "aliased"}
    assert AbstractModel.__abstractvars__ == {"x"}
    assert [field.name for field in dataclasses.fields(AbstractModel)] == ["y"]


def test_annotations_are_looked_up_without_the_getattr_of_the_module(monkeypatch):
    def import_lazily(name):
        raise ImportError(name)

    lazy = types.ModuleType("lazy")
    lazy.__getattr__ = import_lazily
    monkeypatch.setitem(sys.modules, "lazy", lazy)
    body = {"__module__": "lazy", "__annotations__": {"size": "AbstractVar[int]"}}
    assert type(Module)("AbstractModel", (Module,), body).__abstractvars__ == {"size"}


def test_assigned_set_of_abstract_names_is_not_changed():
    class AbstractModel(Module):
        size: AbstractVar[int]

    names = set()
    AbstractModel.__abstractmethods__ = names
    assert (names, AbstractModel.__abstractmethods__) == (set(), {"size"})
