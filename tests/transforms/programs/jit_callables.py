"""What `filter_jit` wraps."""

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from tests.transforms.programs.registry import program

X = jnp.arange(3.0)


@program
def decorator_with_arguments(eqx):
    @eqx.filter_jit(donate="none", inline=True)
    def function(x):
        return x + 1

    return function(X)


@program
def methods(eqx):
    class Model(eqx.Module):
        weight: Any
        name: str = eqx.field(static=True)

        @eqx.filter_jit
        def scale(self, x, times=2):
            return times * self.weight * x, self.name

        @classmethod
        @eqx.filter_jit
        def make(cls, x):
            return cls(x, "made").weight, cls.__name__

        @staticmethod
        @eqx.filter_jit
        def double(x):
            return 2 * x

        @property
        @eqx.filter_jit
        def total(self):
            return self.weight.sum()

        @eqx.filter_jit
        def __call__(self, x):
            return self.scale(x)

    model = Model(X, "n")
    return (
        [model.scale(X), model.scale(X, times=3), Model.scale(model, X), model(X), model.total],
        [Model.make(X), model.make(X), Model.double(X), model.double(X)],
    )


@program
def inherited_methods(eqx):
    class Base(eqx.Module):
        weight: Any

        @eqx.filter_jit
        def scale(self, x):
            return self.weight * x

    class Child(Base):
        @eqx.filter_jit
        def scale(self, x):
            return super().scale(x) + 1

    return Child(X).scale(X), Base(X).scale(X)


@program
def method_of_a_plain_class(eqx):
    class Counter:
        start = 2.0

        @eqx.filter_jit
        def add(self, x):
            return x + self.start

    return Counter().add(X)


@program
def bound_method(eqx):
    class Model(eqx.Module):
        weight: Any

        def scale(self, x, *, times=1):
            return times * self.weight * x

    return eqx.filter_jit(Model(X).scale)(X, times=2)


@program
def module(eqx):
    class Model(eqx.Module):
        weight: Any
        name: str = eqx.field(static=True)

        def __call__(self, x, *, times=1):
            return times * self.weight * x, self.name

    return eqx.filter_jit(Model(X, "n"))(X, times=2)


@program
def class_of_a_module(eqx):
    class Model(eqx.Module):
        weight: Any
        size: int

        def __init__(self, size, *, key):
            self.weight = jax.random.uniform(key, (size,))
            self.size = size

    model = eqx.filter_jit(Model)(2, key=jax.random.key(0))
    return model.weight, model.size


@program
def partials(eqx):
    def function(x, y, *, name):
        return x - y, name

    bound = functools.partial(function, X, name="n")
    return (
        eqx.filter_jit(bound)(2 * X),
        eqx.filter_jit(bound)(2 * X, name="m"),
        eqx.filter_jit(jtu.Partial(function, X, name="n"))(2 * X),
        eqx.filter_jit(lambda call, y: call(y))(jtu.Partial(function, X, name="n"), X),
    )


@program
def partial_of_the_library(eqx):
    partial = eqx.Partial(lambda x, y, name: (x - y, name), X, name="n")
    return eqx.filter_jit(partial)(2 * X), eqx.filter_jit(lambda call, y: call(y))(partial, X)


@program
def functions_of_jax(eqx):
    squared = jax.custom_jvp(lambda x: x**2)
    squared.defjvps(lambda tangent, _, x: 5.0 * tangent)
    jitted = eqx.filter_jit(squared)
    return eqx.filter_jit(jnp.cumsum)(X), jitted(X), jax.grad(lambda x: jitted(x).sum())(X)


@program
def function_of_another_transformation(eqx):
    return (
        eqx.filter_jit(eqx.filter_grad(lambda x, s: (x**2).sum() * s))(X, 2.0),
        eqx.filter_jit(eqx.filter_vmap(lambda x, s: (2 * x, s)))(X, "s"),
        eqx.filter_jit(jax.checkpoint(lambda x: jnp.sin(x)))(X),
    )


@program
def closures(eqx):
    factors = [2.0]

    @eqx.filter_jit
    def scale(x):
        return factors[0] * x + X

    before = scale(X)
    factors[0] = 3.0
    return before, scale(X), scale(X[:1])


@program
def what_is_wrapped_is_shown(eqx):
    def function(x, y: int = 3, *, z="z"):
        """Does."""

    jitted = eqx.filter_jit(function)
    return (
        [jitted.__name__, jitted.__qualname__, jitted.__doc__, jitted.__module__],
        str(inspect.signature(jitted)),
        jitted.__wrapped__ is function,
    )


@program
def recursion(eqx):
    @eqx.filter_jit
    def power(x, times):
        return x if times == 0 else x * power(x, times - 1)

    return power(X, 3)
