"""Classes whose attributes are replaced: by `__init_subclass__`, a patch or a deletion."""

import functools
import inspect
from typing import Any
from unittest import mock

import jax.numpy as jnp
import jax.tree_util as jtu

from tests.beside_equinox import error_of
from tests.module.programs.registry import program


def doubled(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return 2 * function(*args, **kwargs)

    return wrapper


def make_base(eqx, replace):
    """A class that calls `replace` with each new subclass."""

    class Base(eqx.Module):
        def __init_subclass__(cls, **kwargs):
            super().__init_subclass__(**kwargs)
            replace(cls)

    return Base


@program
def init_subclass_puts_something_else_in_the_place_of_a_method(eqx):
    def replace(cls):
        cls.read = property(vars(cls)["read"])
        cls.count = staticmethod(lambda: 5)
        cls.made = classmethod(lambda cls: cls.__name__)
        cls.scale = eqx.filter_vmap(in_axes=(None, 0))(vars(cls)["scale"])
        cls.__call__ = eqx.filter_jit(vars(cls)["__call__"])
        del cls.gone

    class Model(make_base(eqx, replace)):
        x: Any

        def read(self):
            return self.x

        def count(self):
            return 1

        def made(self):
            return ""

        def gone(self):
            return 1

        def scale(self, y):
            return self.x * y

        def __call__(self, y):
            return self.x + y

    model = Model(jnp.array(2.0))
    outputs = float(model.read), model.count(), model.made(), hasattr(model, "gone")
    return outputs, model.scale(jnp.arange(3.0)).tolist(), float(model(1.0))


@program
def init_subclass_adds_a_field_or_makes_one_static(eqx):
    def add(cls):
        cls.__annotations__ = {**inspect.get_annotations(cls), "y": int}
        cls.y = 7

    def make_static(cls):
        for name in inspect.get_annotations(cls):
            setattr(cls, name, eqx.field(static=True))

    class Model(make_base(eqx, add)):
        x: int

    class Static(make_base(eqx, make_static)):
        x: int

    class Below(Static):
        x: int

    models = Model(1), Model(1, 2), Static(1), Below(1)
    return [jtu.tree_leaves(each) for each in models], Model.y, Below(1).x


@program
def attributes_of_a_class_are_patched_for_a_while(eqx):
    class Model(eqx.Module):
        x: int = 2

        def method(self):
            return 1

    def method(self):
        return 5

    with mock.patch.object(Model, "method", method), mock.patch.object(Model, "x", 7):
        patched = Model().method(), Model.x
    return patched, Model().method(), Model.x


@program
def default_is_deleted_from_the_class(eqx):
    class Model(eqx.Module):
        x: Any = 3

    make = eqx.filter_jit(lambda x: Model(x))
    before = make(jnp.array(1.0))
    del Model.x
    after = make(jnp.array(2.0))
    is_gone = not hasattr(Model, "x")
    return float(before.x), float(after.x), is_gone, Model().x, error_of(delattr, Model, "x")
