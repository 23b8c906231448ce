"""Abstract attributes: declared, overridden in each way, inherited over several classes."""

import abc
import dataclasses
import functools
import inspect
import types
import typing
from typing import ClassVar

from tests.module.programs.functions import tried
from tests.module.programs.registry import PROGRAMS, program

T = typing.TypeVar("T")


def overriding(kind, override):
    def overridden(eqx):
        marker = getattr(eqx, kind)

        class AbstractModel(eqx.Module):
            x: marker[int]  # pyright: ignore

        body = override(eqx)
        Model = types.new_class("Model", (AbstractModel,), {}, lambda ns: ns.update(body))
        return tried(Model, (), (1,))

    return overridden


# Bodies of a class that might override `x`.
OVERRIDES = {
    "nothing": lambda eqx: {},
    "field": lambda eqx: {"__annotations__": {"x": int}},
    "field_with_a_default": lambda eqx: {"__annotations__": {"x": int}, "x": 5},
    "field_with_options": lambda eqx: {"__annotations__": {"x": int}, "x": eqx.field(default=5)},
    "static_field": lambda eqx: {"__annotations__": {"x": int}, "x": eqx.field(static=True)},
    "field_annotated_by_a_string": lambda eqx: {"__annotations__": {"x": "int"}},
    "class_variable": lambda eqx: {"__annotations__": {"x": ClassVar[int]}, "x": 5},
    "class_variable_by_a_string": lambda eqx: {
        "__annotations__": {"x": "typing.ClassVar[int]"},
        "__module__": __name__,
        "x": 5,
    },
    "class_variable_without_a_value": lambda eqx: {"__annotations__": {"x": ClassVar[int]}},
    "init_variable": lambda eqx: {"__annotations__": {"x": dataclasses.InitVar[int]}},
    "property": lambda eqx: {"x": property(lambda self: 5)},
    "cached_property": lambda eqx: {"x": functools.cached_property(lambda self: 5)},
    "value": lambda eqx: {"x": 5},
    "abstract_property": lambda eqx: {"x": property(abc.abstractmethod(lambda self: 5))},
    "abstract_variable": lambda eqx: {"__annotations__": {"x": eqx.AbstractVar[int]}},
    "abstract_class_variable": lambda eqx: {"__annotations__": {"x": eqx.AbstractClassVar[int]}},
}

for kind in ("AbstractVar", "AbstractClassVar"):
    for name, override in OVERRIDES.items():
        PROGRAMS[f"{kind}_overridden_by_{name}"] = overriding(kind, override)


@program
def abstract_attribute_is_no_field(eqx):
    class AbstractModel(eqx.Module):
        x: eqx.AbstractVar[int]
        y: int
        z: eqx.AbstractClassVar[str]

    return [f.name for f in dataclasses.fields(AbstractModel)], str(
        inspect.signature(AbstractModel)
    )


@program
def abstract_attribute_has_no_place_in_the_arguments(eqx):
    class AbstractModel(eqx.Module):
        x: eqx.AbstractVar[int]

    class Model(AbstractModel):
        y: str
        x: int

    return vars(Model("y", 1)), Model.__match_args__


@program
def abstract_attribute_is_no_attribute(eqx):
    class AbstractModel(eqx.Module):
        x: eqx.AbstractVar[int]

    return hasattr(AbstractModel, "x"), list(AbstractModel.__annotations__)


@program
def abstract_names_of_a_class(eqx):
    class AbstractModel(eqx.Module):
        x: eqx.AbstractVar[int]
        y: eqx.AbstractClassVar[int]

    class AbstractSub(AbstractModel):
        x: int

    return [
        (sorted(cls.__abstractvars__), sorted(cls.__abstractclassvars__))
        for cls in (AbstractModel, AbstractSub)
    ]


@program
def abstract_method_beside_an_abstract_attribute(eqx):
    class AbstractModel(eqx.Module):
        x: eqx.AbstractVar[int]

        @abc.abstractmethod
        def method(self): ...

    class AbstractSub(AbstractModel):
        x: int

    class Model(AbstractSub):
        def method(self):
            return self.x

    return tried(AbstractModel, ()), tried(AbstractSub, (1,)), Model(1).method()


@program
def abstract_attribute_without_a_subscript(eqx):
    class AbstractModel(eqx.Module):
        x: eqx.AbstractVar

    return AbstractModel


@program
def abstract_class_attribute_without_a_subscript(eqx):
    class AbstractModel(eqx.Module):
        x: eqx.AbstractClassVar

    return AbstractModel


@program
def abstract_attribute_with_a_value(eqx):
    class AbstractModel(eqx.Module):
        x: eqx.AbstractVar[int] = 3

    return AbstractModel


@program
def abstract_class_attribute_with_a_value(eqx):
    class AbstractModel(eqx.Module):
        x: eqx.AbstractClassVar[int] = 3

    return AbstractModel


@program
def abstract_attribute_with_options(eqx):
    class AbstractModel(eqx.Module):
        x: eqx.AbstractVar[int] = eqx.field(static=True)

    return AbstractModel


@program
def abstract_attribute_over_a_field(eqx):
    class Base(eqx.Module):
        x: int

    class AbstractModel(Base):
        x: eqx.AbstractVar[int]

    return tried(AbstractModel, (), (1,))


@program
def abstract_attribute_over_a_property(eqx):
    class Base(eqx.Module):
        @property
        def x(self):
            return 1

    class AbstractModel(Base):
        x: eqx.AbstractVar[int]

    return tried(AbstractModel, ())


@program
def abstract_base_before_one_with_the_field(eqx):
    class AbstractModel(eqx.Module):
        x: eqx.AbstractVar[int]

    class HasField(eqx.Module):
        x: int

    class First(AbstractModel, HasField):
        pass

    class Second(HasField, AbstractModel):
        pass

    return tried(First, (), (1,)), tried(Second, (), (1,))


@program
def abstract_base_before_one_with_the_property(eqx):
    class AbstractModel(eqx.Module):
        x: eqx.AbstractVar[int]

    class HasProperty:
        @property
        def x(self):
            return 5

    class First(AbstractModel, HasProperty):
        pass

    class Second(HasProperty, AbstractModel):
        pass

    return tried(First, ()), tried(Second, ())


@program
def abstract_attribute_of_a_mixin_that_is_no_module(eqx):
    class Mixin:
        x: eqx.AbstractVar[int]

    class AbstractModel(Mixin, eqx.Module):
        pass

    class Model(AbstractModel):
        x: int

    return tried(Mixin, ()), tried(AbstractModel, ()), tried(Model, (1,))


@program
def abstract_attribute_overridden_two_classes_below(eqx):
    class AbstractTop(eqx.Module):
        x: eqx.AbstractVar[int]

    class AbstractMiddle(AbstractTop):
        y: eqx.AbstractVar[str]

    class Model(AbstractMiddle):
        y: str
        x: int

    return tried(AbstractMiddle, ()), tried(Model, ("y", 1))


@program
def abstract_attribute_assigned_by_the_init_of_the_base(eqx):
    class AbstractModel(eqx.Module):
        x: eqx.AbstractVar[int]

        def __init__(self):
            self.x = 3

    class Model(AbstractModel):
        x: int

    return tried(Model, ())


@program
def abstract_attribute_of_a_generic(eqx):
    class AbstractModel(eqx.Module, typing.Generic[T]):
        x: eqx.AbstractVar[T]

    class Model(AbstractModel[int]):
        x: int

    return tried(AbstractModel, ()), tried(Model, (1,))


@program
def abstract_attribute_set_on_the_class_afterwards(eqx):
    class AbstractModel(eqx.Module):
        x: eqx.AbstractVar[int]

    AbstractModel.x = 3
    return tried(AbstractModel, ())


@program
def abstract_attribute_inside_another_annotation(eqx):
    class Model(eqx.Module):
        x: typing.Optional[eqx.AbstractVar[int]]  # noqa: UP045

    return tried(Model, (1,))


@program
def abstract_markers_compare_and_know_their_argument(eqx):
    marker = eqx.AbstractVar[int]
    return (
        marker == eqx.AbstractVar[int],
        typing.get_args(marker),
        typing.get_origin(marker) is (eqx.AbstractVar),
    )


@program
def abstract_marker_of_two_types(eqx):
    return eqx.AbstractVar[int, str]


@program(
    differs="annotations that are strings are read, as under `from __future__ import annotations`"
)
def abstract_attribute_annotated_by_a_string(eqx):
    class AbstractModel(eqx.Module):
        x: "AbstractVar[int]"

    return AbstractModel.__name__


@program(differs="a dotted name in a string is read too; otherwise it would be a field")
def abstract_attribute_annotated_by_a_dotted_string(eqx):
    class AbstractModel(eqx.Module):
        x: "eqx.AbstractVar[int]"

    return dataclasses.fields(AbstractModel) == ()


@program(differs="what `inspect.isabstract` says of abstract methods holds of attributes")
def abstract_attribute_makes_a_class_abstract_to_inspect(eqx):
    class AbstractModel(eqx.Module):
        x: eqx.AbstractVar[int]

    return inspect.isabstract(AbstractModel)
