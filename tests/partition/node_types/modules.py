"""Modules of every kind."""

import jax
import jax.numpy as jnp

import eqxlike
from eqxlike import Module, field
from tests.partition.node_types.kind import Kind, array, twice


class Box(Module):
    content: object
    mode: object = field(static=True, default="a")


class WithList(Module):
    items: list
    scale: jax.Array

    def __init__(self, number):
        self.items = [array(number)]
        self.scale = array(10 * number)

    def read(self):
        return self.scale, self.items[0], str(len(self.items))

    def append(self):
        self.items[0] = self.items[0] + 1
        self.items.append("more")


class OwnGetattribute(WithList):
    def __getattribute__(self, name):
        value = super().__getattribute__(name)
        return 10 * value if name == "scale" else value


class OwnGetattr(WithList):
    def __getattr__(self, name):
        if name == "double":
            return 2 * self.scale
        raise AttributeError(name)

    def read(self):
        return self.double, self.items[0], str(len(self.items))


class OverProperty(WithList):
    @property
    def scale(self):
        return 10 * vars(self)["scale"]

    @scale.setter
    def scale(self, value):
        vars(self)["scale"] = value


class Times10:
    """A descriptor that stores under its own name."""

    def __set_name__(self, owner, name):
        self.name = name

    def __get__(self, instance, owner=None):
        return self if instance is None else 10 * vars(instance)[self.name]

    def __set__(self, instance, value):
        vars(instance)[self.name] = value


class OverDescriptor(WithList):
    scale = Times10()  # pyright: ignore


class Default:
    """Stands in the class where an instance stores nothing."""

    def __get__(self, instance, owner=None):
        return 3


class OverDefault(WithList):
    scale = Default()  # pyright: ignore


class Wraps(Module):
    items: list

    @property
    def __wrapped__(self):
        return None

    def read(self):
        return self.items[0], self.__name__, self.__doc__  # pyright: ignore


def wrapping(number):
    def function():
        pass

    function.__name__ = f"name{number}"
    function.__doc__ = f"doc{number}"
    return eqxlike.module_update_wrapper(Wraps([array(number)]), function)


class Empty(Module):
    pass


class Filled(Module):
    """Stores one of its fields; the class has the other."""

    first: object = "none"
    second: object = "none"

    def __init__(self, number):
        if number == 1:
            self.first = array(number)
        else:
            self.second = array(number)

    def read(self):
        return self.first, self.second


MODULES = {
    "module": Kind(twice(lambda n: Box(array(n), mode=f"mode{n}"))),
    "module-of-statics": Kind(lambda: [Box(each, mode=each) for each in (1, 1.0, True)]),
    "module-without-fields": Kind(lambda: [Empty(), Empty()]),
    "module-with-list": Kind(twice(WithList), WithList.read, WithList.append),
    "module-own-getattribute": Kind(twice(OwnGetattribute), WithList.read, WithList.append),
    "module-own-getattr": Kind(twice(OwnGetattr), OwnGetattr.read, WithList.append),
    "module-property-over-field": Kind(twice(OverProperty), WithList.read, WithList.append),
    "module-descriptor-over-field": Kind(twice(OverDescriptor), WithList.read, WithList.append),
    "module-default-over-field": Kind(twice(OverDefault), WithList.read, WithList.append),
    "module-with-metadata": Kind(twice(wrapping), Wraps.read),
    "module-with-missing-fields": Kind(twice(Filled), Filled.read),
    "bound-method": Kind(twice(lambda n: WithList(n).read), lambda method: method()),
    "our-partial": Kind(
        twice(lambda n: eqxlike.Partial(jnp.add, array(n))), lambda partial: partial(1.0)
    ),
}
