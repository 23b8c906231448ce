"""Inheritance: overriding, mixins, class arguments; and equality of instances."""

import copy
import inspect
import typing
from typing import Any

import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from tests.beside_equinox import error_of
from tests.module.programs.registry import program


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
def getattr_is_called_for_missing_attributes_only(eqx):
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
def mixin_in_between_overrides_the_method(eqx):
    class Mixin:
        def size(self):
            return 1

    class First(eqx.Module, Mixin):
        pass

    others = [property(lambda self: 5), 7, staticmethod(lambda: 8), lambda self: 9]
    mixins = [type("Other", (Mixin,), {"size": other}) for other in others]
    models = [type(eqx.Module)("Model", (First, mixin), {})() for mixin in mixins]
    return First().size(), models[0].size, models[1].size, models[2].size(), models[3].size()


# --- equality and text ---------------------------------------------------------------------------


def make_pair(eqx):
    class Pair(eqx.Module):
        x: Any
        name: str = eqx.field(static=True, default="pair")

    return Pair


@program
def equality(eqx):
    Pair = make_pair(eqx)

    class Sub(Pair):
        pass

    class Model(eqx.Module):
        x: int

        def __eq__(self, other):
            return True

    class Hashed(Model):
        def __hash__(self):
            return 3

        def __repr__(self):
            return "R"

    class Below(Hashed):
        pass

    others = Pair(1), Pair(1.0), Pair(2), Pair(1, "other"), Pair((1,)), 1, None, Sub(1)
    one = Pair(jnp.ones(2))
    return (
        [Pair(1) == other for other in others],
        (Pair([1]) == Pair((1,)), Below(1) == 2, hash(Below(1)), repr(Below(1))),
        (hash(Pair((1, "a"))) == hash(Pair((1, "a"))), {Pair(1): "found"}[Pair(1)]),
        len({Pair(1), Pair(1), Pair(2)}),
        (error_of(hash, one), error_of(hash, Model(1))),
    )


@program
def shown(eqx):
    class Model(eqx.Module):
        call: Any

        def __init__(self):
            self.call = self.__call__

        def __call__(self):
            return 1

    one = make_pair(eqx)([1, jnp.ones((2, 3)), np.ones(2)])
    return repr(one).split("(", 1)[1], str(one) == repr(one), "recursive" in repr(Model())
