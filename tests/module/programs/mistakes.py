"""What goes wrong, and of which class the error or warning is."""

import dataclasses
import functools
import typing
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from tests.beside_equinox import error_of
from tests.module.programs.registry import program


def make(eqx):
    class Model(eqx.Module):
        x: Any

        def __call__(self, y):
            return self.x * y

        def method(self, y):
            return self.x * y

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


@program(differs="deleting a field is refused like assigning it")
def field_deleted(eqx):
    model = make(eqx)(1)
    del model.x
    return vars(model)


@program
def methods_and_closures_of_self_in_a_field(eqx):
    class Model(eqx.Module):
        function: Any
        static: Any = eqx.field(static=True)

        def __init__(self, make, make_static=lambda self: None):
            self.function = make(self)
            self.static = make_static(self)

        def method(self, x):
            return x

        @staticmethod
        def of_no_instance(x):
            return x

    other = Model(lambda self: lambda x: x)
    makers = [
        lambda self: functools.partial(self.method, 1),
        lambda self: lambda: self.method(2),
        lambda self: functools.partial(self.of_no_instance, 3),
        lambda self: functools.partial(other.method, 4),
    ]
    return (
        [Model(make).function() for make in makers],
        Model(lambda self: self.of_no_instance).function(5),
        Model(lambda self: other.method).function(6),
        error_of(Model, lambda self: self.method),
        error_of(Model, lambda self: None, lambda self: self.method),
    )


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
    "grad": lambda cls, model: cls(jax.grad(model)),
    "custom_jvp": lambda cls, model: cls(jax.custom_jvp(model)),
    "custom_vjp": lambda cls, model: cls(jax.custom_vjp(model)),
    "jit_of_a_closure": lambda cls, model: cls(jax.jit(lambda y: model.x * y)),
    "jit_of_a_method": lambda cls, model: cls(jax.jit(model.method)),
    "jit_in_a_list": lambda cls, model: cls([1, jax.jit(model)]),
    "jit_in_a_dict": lambda cls, model: cls({"a": jax.vmap(model)}),
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


REFUSED = {
    "a_jax_array": (lambda eqx: jnp.ones(2), "raises where Equinox warns"),
    "a_numpy_array": (lambda eqx: np.ones(2), "raises where Equinox warns"),
    "a_tuple_with_an_array": (lambda eqx: (jnp.ones(2),), "raises where Equinox warns"),
    "a_module_with_an_array": (lambda eqx: make(eqx)(jnp.ones(2)), "raises where Equinox warns"),
    "a_key": (lambda eqx: jax.random.key(0), "raises where Equinox warns"),
    "a_numpy_scalar": (lambda eqx: np.float32(1), "a NumPy scalar is as good as a number"),
}


def put_in_a_static_field(make_value):
    def put(eqx):
        class Model(eqx.Module):
            option: Any = eqx.field(static=True)

        return jtu.tree_leaves(Model(make_value(eqx)))

    return put


for name, (make_value, differs) in REFUSED.items():
    put = put_in_a_static_field(make_value)
    put.__name__ = f"{name}_in_a_static_field"
    program(put, differs=differs)


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


@program
def mistakes_with_an_instance(eqx):
    class Model(eqx.Module):
        option: Any = eqx.field(static=True)

    model = make(eqx)("a")
    return [
        error_of(jax.jit(lambda model: model), model),
        error_of(lambda: eqx.tree_at(lambda model: model.option, Model("a"), "b")),
        error_of(eqx.Module.register, int),
        error_of(lambda: model.absent),
        error_of(lambda: model < model),
    ]


@program
def setattr_of_a_users_own(eqx):
    class Model(eqx.Module):
        x: int

        def __setattr__(self, name, value):
            object.__setattr__(self, name, value)

    model = Model(1)
    model.x = 2
    return model.x
