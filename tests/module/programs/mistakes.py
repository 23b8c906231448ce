"""Mistakes, and the classes of their errors and warnings."""

import dataclasses
import typing
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from tests.beside_equinox import error_of
from tests.module.programs.registry import program


def make(eqx):
    class Model(eqx.Module):
        x: Any

        def __call__(self, y):
            return self.x * y

        def method(self):
            return self.x

    return Model


@program
def assigned_after_init(eqx):
    class Model(make(eqx)):
        def change(self):
            self.x += 1

    model = Model(1)
    assigned = [error_of(setattr, model, name, 2) for name in ("x", "y", "method", "__call__")]
    mapped = jtu.tree_map(lambda leaf: leaf, model)
    changes = [Model(1).change, mapped.change, jax.jit(lambda: Model(jnp.ones(2)).change())]
    again = [lambda: model.__init__(2), lambda: eqx.Partial(int).__init__(str)]
    return assigned, [error_of(change) for change in (*changes, *again)], model.x


@program
def assigned_in_init(eqx):
    class Model(eqx.Module):
        x: int
        variable: typing.ClassVar[int] = 3
        init: dataclasses.InitVar[int] = 3

        def __init__(self, name, other=None):
            self.x = 1
            setattr(other or self, name, 2)

        def method(self):
            pass

    names = "x", "absent", "variable", "init", "method"
    return [error_of(Model, name) for name in names[1:]], error_of(Model, "x", Model("x"))


def storing(make_value):
    def stored(eqx):
        class Holder(eqx.Module):
            value: Any
            static: Any = eqx.field(static=True, default=None)

        return type(make_value(Holder, make(eqx)(jnp.ones(2)))).__name__

    return stored


STORED = {
    "jit": lambda cls, model: cls(jax.jit(model)),
    "vmap": lambda cls, model: cls(jax.vmap(model)),
    "custom_jvp": lambda cls, model: cls(jax.custom_jvp(model)),
    "custom_vjp": lambda cls, model: cls(jax.custom_vjp(model)),
    "jit_of_a_closure": lambda cls, model: cls(jax.jit(lambda y: model.x * y)),
    "jit_in_a_static_field": lambda cls, model: cls(1, jax.jit(model)),
    "jit_of_a_module_without_arrays": lambda cls, model: cls(jax.jit(type(model)(None))),
}
for name, make_value in STORED.items():
    stored = storing(make_value)
    stored.__name__ = f"{name}_in_a_field"
    program(stored)


@program
def values_that_are_compared_in_a_static_field(eqx):
    class Model(eqx.Module):
        option: Any = eqx.field(static=True)

    shape = jax.ShapeDtypeStruct((2,), jnp.float32)
    values = [1], {"a": 1}, {1}, frozenset({1}), len, (1, "a"), shape
    return [Model(value).option is value for value in values]


class Slotted:
    __slots__ = ("y",)


def with_another_base(base):
    def derive(eqx):
        class Model(eqx.Module, base):
            x: int

        return Model(1).x

    return derive


for base in (Exception, dict, Slotted):
    derive = with_another_base(base)
    derive.__name__ = f"module_that_is_a_{base.__name__}"
    program(derive, differs="a Module needs a slot of its own")
