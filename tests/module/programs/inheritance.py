"""Classes above and below: overriding, mixins, generics, class arguments."""

import copy
import functools
import inspect
import typing
from typing import Any

import jax.tree_util as jtu

from tests.beside_equinox import error_of
from tests.module.models import HasWeight
from tests.module.programs.registry import program

T = typing.TypeVar("T")
S = typing.TypeVar("S")


@program
def generic_with_two_parameters(eqx):
    class Model(eqx.Module, typing.Generic[T, S]):
        x: T
        y: S

    class Sub(Model[int, T]):
        z: T

    class First(typing.Generic[T], eqx.Module):
        x: T

    parts = jtu.tree_leaves(Model[int, str](1, "a")), jtu.tree_leaves(Sub[str](1, "b", "c"))
    types = type(Model[int, str](1, "a")) is type(Model(1, "a")) is Model
    return parts, types, len(Model.__parameters__), First[int](1).x


@program(differs="a Module is frozen to `typing` too")
def class_that_an_instance_of_a_generic_was_made_by(eqx):
    class Model(eqx.Module, typing.Generic[T]):
        x: T

    return hasattr(Model[int](1), "__orig_class__")


@program
def protocols(eqx):
    class Model(eqx.Module):
        weight: int

    # What is found statically need not be the value: protocols ask whether there is anything.
    is_found = inspect.getattr_static(Model(1), "weight", None) is not None
    return isinstance(Model(1), HasWeight), is_found


@program
def arguments_of_the_class_statement(eqx):
    seen = []

    class Base(eqx.Module):
        def __init_subclass__(cls, tag, **kwargs):
            super().__init_subclass__(**kwargs)
            seen.append((cls.__name__, tag, list(inspect.get_annotations(cls))))

    class Model(Base, tag="a"):
        x: int

    return seen, vars(Model(1)), error_of(lambda: type(eqx.Module)("M", (eqx.Module,), {}, tag=1))


@program
def members_of_the_base_overridden_by_a_field(eqx):
    class Base(eqx.Module):
        variable: typing.ClassVar[int] = 1

        def method(self):
            return 1

        @property
        def size(self):
            return 1

    class Model(Base):
        method: Any = 3
        size: int = 2
        variable: int = 4

    class Required(Base):
        method: Any

    class WithoutDefault(Base):
        size: int

    models = Model(), Model(5, 6, 7)
    found = [(jtu.tree_leaves(each), each.size, each.variable) for each in models]
    return found, Model().method, Required(lambda: 3).method(), error_of(WithoutDefault, 5)


@program
def field_of_the_base_overridden_by_something_else(eqx):
    class Base(eqx.Module):
        size: Any

    class ByMethod(Base):
        def size(self):
            return 3

    class ByProperty(Base):
        @property
        def size(self):
            return 3

        def __init__(self):
            pass

    class ByClassVariable(Base):
        size: typing.ClassVar[int] = 2

    models = ByProperty(), ByClassVariable()
    return ByMethod(1).size, [(each.size, jtu.tree_leaves(each)) for each in models]


@program
def field_under_a_property_that_stores_it(eqx):
    class Base(eqx.Module):
        size: Any

    class StoresIt(Base):
        @property
        def size(self):
            return 10 * vars(self)["size"]

        @size.setter
        def size(self, value):
            vars(self)["size"] = value

        def __init__(self, size):
            self.size = size

    class StoresAnother(Base):
        stored: Any

        @property
        def size(self):
            return 10 * self.stored

        @size.setter
        def size(self, value):
            self.stored = value

        def __init__(self, size):
            self.size = size

    models = StoresIt(1.0), StoresAnother(1.0)
    mapped = [jtu.tree_map(lambda x: x + 1, each) for each in models]
    return [(each.size, jtu.tree_leaves(each)) for each in (*models, *mapped)]


@program
def properties(eqx):
    class Base(eqx.Module):
        x: int

        @property
        def y(self):
            return self.x

        @y.setter
        def y(self, value):
            raise AssertionError("never reached: a Module is frozen")

        @property
        def wrong(self):
            return self.absent

        @functools.cached_property
        def double(self):
            return 2 * self.x

    class Model(Base):
        @property
        def y(self):
            return super().y + 1

    model = Model(1)
    found = model.y, model.double, model.double, jtu.tree_leaves(model)
    mapped = jtu.tree_map(lambda leaf: leaf + 1, model)
    return found, mapped.double, [error_of(setattr, Base(1), "y", 2), error_of(lambda: model.wrong)]


@program
def getattr_is_asked_only_for_what_is_not_there(eqx):
    class Mixin:
        def __getattr__(self, name):
            if name.startswith("_"):
                raise AttributeError(name)
            return name

    class Behind(eqx.Module, Mixin):
        x: int

    class Own(eqx.Module):
        x: int
        __getattr__ = Mixin.__getattr__

    found = []
    for model in (Behind(1), Own(1)):
        mapped = jtu.tree_map(lambda leaf: leaf + 1, copy.copy(model))
        found.append((model.x, model.other, mapped.x, jtu.tree_leaves(mapped)))
    return found


@program
def mixin_between_that_has_something_else_than_the_method(eqx):
    class Mixin:
        def size(self):
            return 1

    class First(eqx.Module, Mixin):
        pass

    others = [property(lambda self: 5), 7, staticmethod(lambda: 8), lambda self: 9]
    mixins = [type("Other", (Mixin,), {"size": other}) for other in others]
    models = [type(eqx.Module)("Model", (First, mixin), {})() for mixin in mixins]
    return First().size(), models[0].size, models[1].size, models[2].size(), models[3].size()
