"""Abstract attributes: what the errors say, and annotations that are strings.

How each may be overridden is compared with Equinox in `programs/abstract.py`.
"""

from __future__ import annotations

import abc
import dataclasses
import typing

import pytest

import eqxlike
from eqxlike import AbstractClassVar, AbstractVar, Module

# Under the import above, all the annotations in this file are strings.


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


@pytest.mark.parametrize(
    ("cls", "expected"),
    [
        (
            AbstractShape,
            r"AbstractShape with abstract attributes sides and abstract class attributes name and "
            r"abstract methods area\. In a subclass",
        ),
        (AbstractSub, r"AbstractSub with abstract class attributes name\. "),
        (AbstractMethodAlone, r"AbstractMethodAlone .*abstract method '?method'?$"),
    ],
)
def test_an_error_names_what_is_abstract(cls, expected):
    with pytest.raises(TypeError, match=f"abstract class {expected}"):
        cls()


def test_what_new_raises_in_a_concrete_class_passes():
    class Model(Module):
        def __new__(cls):
            raise TypeError("of the user")

    with pytest.raises(TypeError, match=r"^of the user$"):
        Model()


def test_annotations_are_left_as_they_are_written():
    assert AbstractShape.__annotations__["sides"] == "AbstractVar[int]"
    hints = typing.get_type_hints(AbstractShape)
    assert hints == {"sides": AbstractVar[int], "name": AbstractClassVar[str]}


Aliased = AbstractVar


class AbstractRead(Module):
    dotted: eqxlike.AbstractVar[int]
    aliased: Aliased[int]


def test_names_are_read_by_what_they_refer_to_or_else_by_their_spelling():
    from eqxlike import AbstractVar as AbstractVar

    class AbstractModel(Module):
        x: AbstractVar[int]
        y: Unknown[int]

    assert AbstractRead.__abstractvars__ == {"dotted", "aliased"}
    assert AbstractModel.__abstractvars__ == {"x"}
    assert [field.name for field in dataclasses.fields(AbstractModel)] == ["y"]


@pytest.mark.parametrize(
    ("annotation", "body", "expected"),
    [
        ("AbstractVar", {}, r" .*`x: AbstractVar\[int\]`"),
        ("AbstractClassVar", {}, r" .*`x: AbstractClassVar\[int\]`"),
        (AbstractVar[int], {"x": 3}, " is an abstract attribute and cannot"),
        (AbstractClassVar[int], {"x": 3}, " is an abstract class attribute and cannot"),
    ],
)
def test_a_bare_marker_and_a_value_are_errors_that_name_the_attribute(annotation, body, expected):
    body = {"__annotations__": {"x": annotation}, **body}
    with pytest.raises(TypeError, match=rf"AbstractModel\.x{expected}"):
        type(Module)("AbstractModel", (Module,), body)


def test_a_class_stays_abstract_under_a_decorator_that_asks_anew():
    assert abc.update_abstractmethods(AbstractShape).__abstractmethods__ == {
        "sides",
        "name",
        "area",
    }
