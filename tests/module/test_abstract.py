"""Abstract attributes: what the errors say, and annotations that are strings.

How each may be overridden is compared with Equinox in `programs/abstract.py`.
"""

from __future__ import annotations

import abc
import dataclasses
import pickle
import typing
from typing import ClassVar

import jax.tree_util as jtu
import pytest

import eqxlike
from eqxlike import AbstractClassVar, AbstractVar, Module

# Under the import above, all the annotations in this file are strings.


class AbstractShape(Module):
    sides: AbstractVar[int]
    name: AbstractClassVar[str]

    @abc.abstractmethod
    def area(self): ...


class Square(AbstractShape):
    length: float
    name: ClassVar[str] = "square"

    @property
    def sides(self):
        return 4

    def area(self):
        return self.length**2


def test_an_error_names_all_that_is_abstract():
    with pytest.raises(
        TypeError,
        match=r"abstract class AbstractShape with abstract attributes sides and abstract class "
        r"attributes name and abstract methods area\. A subclass overrides",
    ):
        AbstractShape()


def test_an_error_names_what_is_left():
    class AbstractSub(AbstractShape):
        sides: int

        def area(self):
            return 0

    with pytest.raises(TypeError, match=r"AbstractSub with abstract class attributes name\. "):
        AbstractSub(1)


def test_a_class_with_abstract_methods_alone_is_refused_by_python():
    class AbstractModel(Module):
        @abc.abstractmethod
        def method(self): ...

    with pytest.raises(TypeError, match=r"abstract class AbstractModel .*method '?method'?$"):
        AbstractModel()


def test_what_new_raises_in_a_concrete_class_passes():
    class Model(Module):
        def __new__(cls):
            raise TypeError("of the user")

    with pytest.raises(TypeError, match=r"^of the user$"):
        Model()


def test_a_class_that_overrides_all_has_instances():
    square = Square(2.0)
    assert (square.sides, square.name, square.area()) == (4, "square", 4.0)


def test_abstract_attributes_are_no_leaves():
    assert jtu.tree_leaves(Square(2.0)) == [2.0]


def test_annotations_are_left_as_they_are_written():
    assert AbstractShape.__annotations__["sides"] == "AbstractVar[int]"


def test_a_dotted_name_is_read():
    class AbstractModel(Module):
        x: eqxlike.AbstractVar[int]

    assert AbstractModel.__abstractvars__ == {"x"}


def test_a_name_imported_under_another_is_read_by_what_it_stands_for():
    assert AbstractAliased.__abstractvars__ == {"x"}


Aliased = AbstractVar


class AbstractAliased(Module):
    x: Aliased[int]


def test_a_name_of_a_function_is_read_by_its_spelling():
    from eqxlike import AbstractVar as AbstractVar

    class AbstractModel(Module):
        x: AbstractVar[int]
        y: Unknown[int]

    assert AbstractModel.__abstractvars__ == {"x"}
    assert [field.name for field in dataclasses.fields(AbstractModel)] == ["y"]


@pytest.mark.parametrize("marker", ["AbstractVar", "AbstractClassVar"])
def test_a_bare_marker_is_an_error_that_says_what_to_write(marker):
    with pytest.raises(TypeError, match=rf"AbstractModel\.x .*`x: {marker}\[int\]`"):
        type(Module)("AbstractModel", (Module,), {"__annotations__": {"x": marker}})


@pytest.mark.parametrize(
    ("marker", "called"), [(AbstractVar, "attribute"), (AbstractClassVar, "class attribute")]
)
def test_a_value_is_an_error_that_names_the_attribute(marker, called):
    body = {"__annotations__": {"x": marker[int]}, "x": 3}
    with pytest.raises(TypeError, match=rf"AbstractModel\.x is an abstract {called} and cannot"):
        type(Module)("AbstractModel", (Module,), body)


def test_a_class_stays_abstract_under_a_decorator_that_asks_anew():
    assert abc.update_abstractmethods(AbstractShape).__abstractmethods__ == {
        "sides",
        "name",
        "area",
    }


def test_a_property_that_is_abstract_does_not_override():
    class AbstractModel(AbstractShape):
        name: ClassVar[str] = "model"

        @property
        @abc.abstractmethod
        def sides(self): ...

        def area(self):
            return 0

    with pytest.raises(TypeError, match="abstract class AbstractModel"):
        AbstractModel()


def test_an_instance_of_a_class_below_an_abstract_one_pickles():
    assert pickle.loads(pickle.dumps(Square(2.0))) == Square(2.0)


def test_a_type_checker_sees_ordinary_annotations():
    hints = typing.get_type_hints(AbstractShape)
    assert hints == {"sides": AbstractVar[int], "name": AbstractClassVar[str]}
