"""Bound methods as pytrees, class and static methods, callables in a class body."""

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from tests.beside_equinox import error_of
from tests.module.programs.registry import program


def make(eqx):
    class Model(eqx.Module):
        weight: Any

        def scale(self, x: int = 2, /, *, shift: int = 0) -> int:
            """Scales."""
            return self.weight * x + shift

        def other(self):
            return self.weight

    return Model


def make_with_mixin(eqx):
    class Mixin:
        def scale(self, x, *, shift=0):
            return self.weight * x + shift

    class Model(Mixin, eqx.Module):
        weight: Any

    return Model


@program
def a_method_is_a_module(eqx):
    found = []
    for Model in (make(eqx), make_with_mixin(eqx)):
        model = Model(2)
        method = model.scale
        children, _ = eqx.tree_flatten_one_level(method)
        paths = [(jtu.keystr(path), leaf) for path, leaf in jtu.tree_leaves_with_path(method)]
        doubled = jtu.tree_map(lambda leaf: 2 * leaf, method)
        found += [
            (isinstance(method, eqx.Module), method(3, shift=1), doubled(3), paths),
            (len(children), children[0] is model, method.__self__ is model),
            (
                method.__func__ is Model.scale,
                inspect.isfunction(Model.scale),
                Model.scale(model, 3),
            ),
            error_of(setattr, method, "tag", 1),
        ]
    return found


@program
def methods_of_equal_instances_are_equal(eqx):
    Model = make(eqx)
    one, same, other = Model(2).scale, Model(2).scale, Model(3).scale
    structures = [jtu.tree_structure(each) for each in (one, other, Model(2).other)]
    arrays = [Model(jnp.array(value)).scale for value in (1.0, 1.0, 2.0)]
    return (
        [one == same, one == other, one == Model(2).other, hash(one) == hash(same)],
        [structures[0] == each for each in structures[1:]],
        [bool(arrays[0] == each) for each in arrays[1:]],
        ({Model(1).scale: "found"}[Model(1).scale], error_of(hash, arrays[0])),
    )


@program
def metadata_of_a_method(eqx):
    class Model(make(eqx)):
        def any(*args, key=None):
            pass

        def __call__(self):
            return 1

    method = Model(1).scale
    names = [
        (each.__name__, each.__doc__, each.__module__, each.__annotations__)
        for each in (method, functools.wraps(method)(lambda: None))
    ]
    signatures = [str(inspect.signature(each)) for each in (method, Model(1).any)]
    return names, signatures, method.__qualname__, inspect.ismethod(Model(1).__call__)


@program
def methods_are_transformed(eqx):
    found = []
    for Model in (make(eqx), make_with_mixin(eqx)):
        method = Model(jnp.array(2.0)).scale
        traces = []

        @eqx.filter_jit
        def call(method, x, traces=traces):
            traces.append(None)
            return method(x), eqx.filter_grad(lambda method: method(x))(method)

        first, gradient = call(method, jnp.array(3.0))
        second, _ = call(Model(jnp.array(4.0)).scale, jnp.array(3.0))
        found += [
            (float(first), float(second), len(traces), float(gradient.__self__.weight)),
            jax.vmap(method)(jnp.arange(2.0)).tolist(),
            functools.partial(Model(2).scale, shift=3)(4),
            eqx.tree_at(lambda method: method.__self__.weight, method, 5)(2),
        ]
    return found


@program
def methods_go_through_what_knows_no_modules(eqx):
    def step(method, x):
        return method, jax.lax.cond(x > 0, lambda f: f(x), lambda f: f(x + 10), method)

    @jax.jit
    def run(method):
        return jax.lax.scan(step, method, jnp.arange(2.0)), jax.grad(lambda f: f(3.0))(method)

    (method, outputs), gradient = run(make(eqx)(jnp.array(2.0)).scale)
    return float(method(3.0)), outputs.tolist(), float(gradient.__self__.weight)


@program
def methods_reach_each_other(eqx):
    class Base(eqx.Module):
        x: int = 0

        def first(self):
            return self.second() + 1

        def second(self):
            return self.third()

        @staticmethod
        def third():
            return 10

        @classmethod
        def make(cls):
            return cls(1)

    class Model(Base):
        y: int = 2

        def first(self):
            return super().first() + 100

    return Model().first(), Model.third(), vars(Model.make()), vars(Model(3).make())


@program(differs="a method takes any name by keyword")
def call_with_a_parameter_named_self(eqx):
    class Model(eqx.Module):
        def __call__(this, self):
            return self

        def method(this, self, func):
            return self, func

    return Model()(self=3), Model().method(self=1, func=2)


@program
def methods_made_by_transformations(eqx):
    class Model(eqx.Module):
        x: Any

        @functools.partial(jax.jit, static_argnums=1)
        def scale(self, factor):
            return factor * self.x

        @eqx.filter_jit
        def double(self, y, *, how="twice"):
            return 2 * self.x * y if how == "twice" else self.x

        @eqx.filter_jit
        def __call__(self, y):
            return self.x * y

        @eqx.filter_value_and_grad
        def square(self, factor):
            return factor * self.x**2

        @eqx.filter_vmap(in_axes=(None, 0))
        def each(self, y):
            return self.x * y

    model = Model(jnp.array(2.0))
    value, gradient = model.square(3.0)
    return (
        [float(each) for each in (model.scale(3), model.double(3.0), model.double(3.0, how="no"))],
        (float(model(4.0)), float(value), float(gradient.x), model.each(jnp.arange(2.0)).tolist()),
    )


@program
def what_in_the_body_of_a_class_is_bound(eqx):
    class Part(eqx.Module):
        def __call__(self, *args):
            return len(args)

    class Callable:
        def __call__(self, *args):
            return len(args)

    class Model(eqx.Module):
        weight: int
        part = Part()
        callable_ = Callable()
        built_in = len
        partial = functools.partial(lambda *args: len(args))
        lambda_ = lambda self, x: self.weight + x

        def scale(self, x):
            return self.weight * x

        triple = functools.partialmethod(scale, 3)

        @functools.singledispatchmethod
        def kind(self, value):
            return "object"

        @kind.register
        def _(self, value: int):
            return "int"

        def items(self):
            yield self.weight

    model = Model(2)
    return (
        [model.part(1), model.callable_(1), model.built_in([1, 2]), model.partial(1)],
        [model.lambda_(1), model.triple(), model.kind(1), model.kind("a"), [*model.items()]],
        [isinstance(each, eqx.Module) for each in (model.lambda_, model.items)],
    )


@program
def method_set_on_a_class_afterwards(eqx):
    Model = make(eqx)
    Model.tripled = lambda self: 3 * self.weight
    Model.__call__ = lambda self, x: self.weight + x
    Model.number = 5
    model = Model(2)
    return model.tripled(), model(5), isinstance(model.tripled, eqx.Module), model.number
