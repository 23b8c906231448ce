"""Abstract classes: attributes and methods, ways to override them, and multiple inheritance."""

import abc
import dataclasses
import functools
import inspect
import types
import typing
from typing import Any, ClassVar

import jax.tree_util as jtu

from tests.beside_equinox import error_of
from tests.module.programs.registry import PROGRAMS, program, tried

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


def annotated(annotation, **body):
    return {"__annotations__": {"x": annotation}, **body}


# Bodies of a class that might override `x`.
OVERRIDES = {
    "nothing": lambda eqx: {},
    "field": lambda eqx: annotated(int),
    "field_with_a_default": lambda eqx: annotated(int, x=5),
    "field_with_options": lambda eqx: annotated(int, x=eqx.field(default=5)),
    "static_field": lambda eqx: annotated(int, x=eqx.field(static=True)),
    "field_annotated_by_a_string": lambda eqx: annotated("int"),
    "class_variable": lambda eqx: annotated(ClassVar[int], x=5),
    "class_variable_by_a_string": lambda eqx: annotated(
        "typing.ClassVar[int]", x=5, __module__=__name__
    ),
    "class_variable_without_a_value": lambda eqx: annotated(ClassVar[int]),
    "init_variable": lambda eqx: annotated(dataclasses.InitVar[int]),
    "property": lambda eqx: {"x": property(lambda self: 5)},
    "cached_property": lambda eqx: {"x": functools.cached_property(lambda self: 5)},
    "value": lambda eqx: {"x": 5},
    "abstract_property": lambda eqx: {"x": property(abc.abstractmethod(lambda self: 5))},
    "abstract_variable": lambda eqx: annotated(eqx.AbstractVar[int]),
    "abstract_class_variable": lambda eqx: annotated(eqx.AbstractClassVar[int]),
}

for kind in ("AbstractVar", "AbstractClassVar"):
    for name, override in OVERRIDES.items():
        PROGRAMS[f"{kind}_overridden_by_{name}"] = overriding(kind, override)


@program
def abstract_attributes_are_no_fields(eqx):
    class AbstractModel(eqx.Module):
        x: eqx.AbstractVar[int]
        y: str
        z: eqx.AbstractClassVar[str]

    class AbstractSub(AbstractModel):
        x: int

    class Model(AbstractSub):
        z: ClassVar[str] = "z"

    return (
        [each.name for each in dataclasses.fields(AbstractModel)],
        str(inspect.signature(AbstractModel)),
        hasattr(AbstractModel, "x"),
        list(AbstractModel.__annotations__),
        [
            (sorted(cls.__abstractvars__), sorted(cls.__abstractclassvars__))
            for cls in (AbstractModel, AbstractSub)
        ],
        (vars(Model("y", 1)), Model.__match_args__, jtu.tree_leaves(Model("y", 1))),
    )


@program
def abstract_base_before_and_after_one_that_overrides(eqx):
    class AbstractModel(eqx.Module):
        x: eqx.AbstractVar[int]

    class HasField(eqx.Module):
        x: int

    class HasProperty:
        @property
        def x(self):
            return 5

    found = []
    for other in (HasField, HasProperty):
        for bases in ((AbstractModel, other), (other, AbstractModel)):
            found.append(tried(types.new_class("Model", bases), (), (1,)))
    return found


@program
def abstract_marker_inside_another_type(eqx):
    class Model(eqx.Module):
        x: typing.Optional[eqx.AbstractVar[int]]  # noqa: UP045

    return tried(Model, (1,))


@program(
    differs="annotations that are strings are read, as under `from __future__ import annotations`"
)
def abstract_attribute_annotated_by_a_string(eqx):
    class AbstractModel(eqx.Module):
        x: "AbstractVar[int]"

    return AbstractModel.__name__


# --- abstract methods ---------------------------------------------------------------------------

MEMBERS = {
    "method": abc.abstractmethod(lambda self: None),
    "property": property(abc.abstractmethod(lambda self: None)),
    "class method": classmethod(abc.abstractmethod(lambda cls: None)),
    "static method": staticmethod(abc.abstractmethod(lambda: None)),
}


@program
def abstract_members(eqx):
    found = []
    for name in ("member", "__call__"):
        for member in MEMBERS.values():
            Model = type(eqx.Module)("Model", (eqx.Module,), {name: member})
            Sub = type(eqx.Module)("Sub", (Model,), {"__annotations__": {"x": int}, "x": 1})
            Final = type(eqx.Module)("Final", (Sub,), {name: lambda self: 2})
            found.append((tried(Model, ()), tried(Sub, ()), tried(Final, ())))
            found.append([inspect.isabstract(cls) for cls in (Model, Sub, Final)])
            found.append((Model.__abstractmethods__, Final.__abstractmethods__))
    return found


@program
def abstract_members_overridden_by_fields(eqx):
    class Base(eqx.Module):
        @abc.abstractmethod
        def method(self): ...

        @property
        @abc.abstractmethod
        def size(self): ...

    class ByAnnotation(Base):
        method: Any
        size: int

    class ByDefault(Base):
        method: Any = None
        size: int = 3

    return error_of(ByAnnotation, None, 3), ByDefault().size


@program
def abstract_method_of_a_plain_mixin(eqx):
    class Mixin(abc.ABC):
        @abc.abstractmethod
        def size(self): ...

        def twice(self):
            return 2 * self.size()

    class Model(eqx.Module, Mixin):
        pass

    class Final(Model):
        def size(self):
            return 4

    return error_of(Model), Final().twice()
