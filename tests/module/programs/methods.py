"""Bound methods as pytrees, class and static methods, properties, callables in a class body."""

import collections
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from tests.module.programs.registry import program


def make(eqx):
    class Model(eqx.Module):
        weight: Any

        def scale(self, x, *, shift=0):
            """Scales."""
            return self.weight * x + shift

        def other(self):
            return self.weight

    return Model


@program
def a_method_is_a_module(eqx):
    method = make(eqx)(2).scale
    return isinstance(method, eqx.Module), callable(method), method(3, shift=1)


@program
def methods_of_equal_instances_are_equal(eqx):
    Model = make(eqx)
    one, same, other = Model(2).scale, Model(2).scale, Model(3).scale
    return one == same, one == other, one == Model(2).other, hash(one) == hash(same)


@program
def methods_of_instances_with_arrays_compare(eqx):
    Model = make(eqx)
    one, same, other = (Model(jnp.array(value)).scale for value in (1.0, 1.0, 2.0))
    return bool(one == same), bool(one == other)


@program
def a_method_of_an_instance_with_arrays_has_no_hash(eqx):
    return hash(make(eqx)(jnp.ones(2)).scale)


@program
def a_method_is_a_dictionary_key(eqx):
    Model = make(eqx)
    return {Model(1).scale: "found"}[Model(1).scale]


@program
def arrays_among_the_leaves_of_a_method(eqx):
    leaves = jtu.tree_leaves(make(eqx)(jnp.ones(2)).scale)
    return [leaf.shape for leaf in leaves if eqx.is_array(leaf)]


@program
def all_the_leaves_of_a_method(eqx):
    return len(jtu.tree_leaves(make(eqx)(1).scale))


@program
def metadata_of_a_method(eqx):
    method = make(eqx)(1).scale
    return method.__name__, method.__doc__, method.__module__, str(inspect.signature(method))


@program
def instance_and_function_of_a_method(eqx):
    Model = make(eqx)
    model = Model(1)
    return model.scale.__self__ is model, model.scale.__func__ is Model.scale


@program
def partial_of_a_method(eqx):
    return functools.partial(make(eqx)(2).scale, shift=3)(4)


@program
def method_as_a_vmapped_function(eqx):
    return jax.vmap(make(eqx)(jnp.array(2.0)).scale)(jnp.arange(2.0)).tolist()


@program
def gradient_in_the_instance_of_a_method(eqx):
    method = make(eqx)(jnp.array(2.0)).scale
    gradient = eqx.filter_grad(lambda method: method(3.0))(method)
    return float(gradient.__self__.weight)


@program
def tree_at_on_the_instance_of_a_method(eqx):
    method = eqx.tree_at(lambda method: method.__self__.weight, make(eqx)(2).scale, 5)
    return method(2)


@program
def methods_in_the_body_of_a_class_reach_each_other(eqx):
    class Model(eqx.Module):
        def first(self):
            return self.second() + 1

        def second(self):
            return self.third + 1

        @property
        def third(self):
            return self.fourth()

        @classmethod
        def fourth(cls):
            return cls.fifth()

        @staticmethod
        def fifth():
            return 10

    return Model().first()


@program
def class_method_that_makes_an_instance_of_the_subclass(eqx):
    class Base(eqx.Module):
        x: int

        @classmethod
        def make(cls):
            return cls(1)

    class Model(Base):
        y: int = 2

    return vars(Model.make()), type(Model.make()).__name__


@program
def class_property(eqx):
    class Model(eqx.Module):
        x: int = 3

        @functools.cached_property
        def double(self):
            return 2 * self.x

    model = Model()
    return model.double, model.double, jtu.tree_leaves(model)


@program
def special_methods_of_arithmetic(eqx):
    class Vector(eqx.Module):
        x: int

        def __add__(self, other):
            return Vector(self.x + other.x)

        def __radd__(self, other):
            return Vector(self.x + other)

        def __matmul__(self, other):
            return self.x * other.x

        def __neg__(self):
            return Vector(-self.x)

        def __lt__(self, other):
            return self.x < other.x

    one, two = Vector(1), Vector(2)
    return (one + two).x, (5 + one).x, one @ two, (-one).x, one < two, max(one, two).x


@program
def context_manager_and_iterator(eqx):
    class Model(eqx.Module):
        x: int

        def __enter__(self):
            return self.x

        def __exit__(self, *args):
            return True

        def __iter__(self):
            yield from range(self.x)

    with Model(3) as entered:
        raise ValueError
    return entered, [*Model(3)]


@program(differs="a method takes any name by keyword")
def call_with_a_parameter_named_self(eqx):
    class Model(eqx.Module):
        def __call__(this, self):
            return self

        def method(this, self, func):
            return self, func

    return Model()(self=3), Model().method(self=1, func=2)


@program
def method_made_by_jax_jit(eqx):
    class Model(eqx.Module):
        x: jax.Array

        @jax.jit
        def double(self):
            return 2 * self.x

        @functools.partial(jax.jit, static_argnums=1)
        def scale(self, factor):
            return factor * self.x

    model = Model(jnp.array(2.0))
    return float(model.double()), float(model.scale(3))


@program
def method_made_by_filter_jit(eqx):
    class Model(eqx.Module):
        x: jax.Array
        name: str

        @eqx.filter_jit
        def double(self, y, *, how="twice"):
            return 2 * self.x * y if how == "twice" else self.x

        @eqx.filter_jit
        def __call__(self, y):
            return self.x * y

    model = Model(jnp.array(2.0), "model")
    return float(model.double(3.0)), float(model.double(3.0, how="once")), float(model(4.0))


@program
def method_decorated_by_something_with_wraps(eqx):
    def twice(function):
        @functools.wraps(function)
        def wrapper(*args):
            return 2 * function(*args)

        return wrapper

    class Model(eqx.Module):
        x: int

        @twice
        def method(self, y):
            """Documented."""
            return self.x * y

    method = Model(3).method
    return method(4), method.__doc__, isinstance(method, eqx.Module)


@program
def callable_object_in_the_body_of_a_class_is_not_bound(eqx):
    class Callable:
        def __call__(self, *args):
            return len(args)

    class Model(eqx.Module):
        method = Callable()
        built_in = len
        partial = functools.partial(lambda *args: len(args))

    model = Model()
    return model.method(1), model.built_in([1, 2]), model.partial(1)


@program
def module_in_the_body_of_a_class_is_not_bound(eqx):
    class Part(eqx.Module):
        def __call__(self, *args):
            return len(args)

    class Model(eqx.Module):
        part = Part()

    return Model().part(1)


@program
def method_set_on_a_class_afterwards(eqx):
    Model = make(eqx)
    Model.tripled = lambda self: 3 * self.weight
    Model.__call__ = lambda self, x: self.weight + x
    return Model(2).tripled(), Model(2)(5), isinstance(Model(2).tripled, eqx.Module)


@program
def method_of_a_list_of_modules(eqx):
    Model = make(eqx)
    return [method(2) for method in (model.scale for model in (Model(1), Model(2)))]


@program
def methods_that_yield_and_wait(eqx):
    class Model(eqx.Module):
        x: int

        def items(self):
            yield self.x

        async def later(self):
            return self.x

    coroutine = Model(2).later()
    coroutine.close()
    return list(Model(1).items()), inspect.iscoroutine(coroutine)


@program
def namedtuple_of_methods(eqx):
    Pair = collections.namedtuple("Pair", ["one", "two"])
    model = make(eqx)(jnp.array(2.0))
    doubled = jtu.tree_map(lambda x: 2 * x if eqx.is_array(x) else x, Pair(model.scale, model))
    return float(doubled.one(1.0)), float(doubled.two.weight)
