"""What `filter_jit` wraps: everything callable, in every place."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import pytest

from eqxlike import (
    Module,
    checking_partitions,
    filter_grad,
    filter_jit,
    filter_value_and_grad,
    filter_vmap,
)
from tests.transforms.jit.models import Affine, X, double, equal, scaled

# Decorating.


def test_decorator_without_arguments():
    @filter_jit
    def function(x):
        return x + 1

    assert equal(function(X), X + 1)


def test_decorator_with_arguments():
    @filter_jit(donate="none", keep_unused=True)
    def function(x, y):
        return x + 1

    assert equal(function(X, X), X + 1)


def test_decorator_with_no_arguments_in_brackets():
    @filter_jit()
    def function(x):
        return x + 1

    assert equal(function(X), X + 1)


@pytest.mark.parametrize("name", ["jitted", "jitted_with_options"])
def test_method_of_a_module(name):
    assert equal(getattr(Affine(jnp.ones(3)), name)(X), X)


def test_method_of_a_module_called_on_the_class():
    assert equal(Affine.jitted(Affine(jnp.ones(3)), X), X)


def test_method_of_a_module_traces_the_arrays_of_self():
    tracers = []

    class Model(Module):
        weight: object

        @filter_jit
        def apply(self):
            tracers.append(self.weight)
            return self.weight

    Model(jnp.ones(2)).apply()
    assert isinstance(tracers[0], jax.core.Tracer)


def test_method_of_a_plain_class():
    class Counter:
        def __init__(self, start):
            self.start = start

        @filter_jit
        def add(self, x):
            return x + self.start

    assert equal(Counter(1.0).add(X), X + 1)
    assert equal(Counter(2.0).add(X), X + 2)


def test_class_method():
    assert equal(Affine.of_class(X).scale, X)


def test_static_method():
    assert equal(Affine.static(X), 2 * X)
    assert equal(Affine(1.0).static(X), 2 * X)


def test_property():
    assert equal(Affine(jnp.ones(2)).doubled, 2 * jnp.ones(2))


def test_inherited_method():
    class Child(Affine):
        def __call__(self, x):
            return x + 5

    assert equal(Child(1.0).jitted(X), X + 5)


def test_method_that_calls_super():
    class Child(Affine):
        @filter_jit
        def jitted(self, x):
            return super().jitted(x) + 1

    assert equal(Child(jnp.ones(3)).jitted(X), X + 1)


def test_function_in_a_field():
    class Holds(Module):
        function: object

    assert equal(Holds(filter_jit(lambda x: x + 1)).function(X), X + 1)


def test_jitted_default_of_a_field():
    class Holds(Module):
        function: object = filter_jit(lambda x: x + 1)

    assert equal(Holds().function(X), X + 1)


# Wrapping what is callable.


class PlainCallable:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, x):
        return self.factor * x

    def apply(self, x):
        return self.factor * x


class SlottedCallable:
    __slots__ = ()

    def __call__(self, x):
        return 2 * x


def with_key(function):
    """A decorator that changes the signature, as `functools.wraps` cannot tell."""

    @functools.wraps(function)
    def inner(x):
        return function(x, 2.0)

    return inner


def with_default(function):
    @functools.wraps(function)
    def inner(*args, **kwargs):
        kwargs.setdefault("scale", 3.0)
        return function(*args, **kwargs)

    return inner


@jax.custom_jvp
def custom(x):
    return 2 * x


custom.defjvp(lambda primals, tangents: (custom(*primals), 3 * tangents[0]))

CALLABLES = {
    "function": double,
    "lambda": lambda x: 2 * x,
    "closure": (lambda y: lambda x: y * x)(jnp.array(2.0)),
    "module": Affine(jnp.array(2.0)),
    "module-method": Affine(jnp.array(2.0)).apply,
    "module-class": Affine,
    "plain-callable": PlainCallable(2.0),
    "plain-callable-with-array": PlainCallable(jnp.array(2.0)),
    "plain-method": PlainCallable(2.0).apply,
    "slotted-callable": SlottedCallable(),
    "partial": functools.partial(scaled, scale=2.0),
    "partial-with-array": functools.partial(scaled, scale=jnp.array(2.0)),
    "partial-by-place": functools.partial(jnp.multiply, jnp.array(2.0)),
    "partial-of-partial": functools.partial(functools.partial(scaled), scale=2.0),
    "partial-of-module": functools.partial(Affine(jnp.array(2.0)).apply, factor=2.0),
    "jax-partial": jtu.Partial(scaled, scale=jnp.array(2.0)),
    "jax-function": jnp.sin,
    "jax-ufunc": jnp.negative,
    "numpy-vectorize": jnp.vectorize(lambda x: 2 * x),
    "jit": jax.jit(double),
    "grad": jax.grad(lambda x: (x**2).sum()),
    "value_and_grad": jax.value_and_grad(lambda x: (x**2).sum()),
    "vmap": jax.vmap(lambda x: 2 * x),
    "checkpoint": jax.checkpoint(lambda x: 2 * x),
    "jacfwd": jax.jacfwd(lambda x: x**2),
    "custom_jvp": custom,
    "filter_jit": filter_jit(double),
    "filter_grad": filter_grad(lambda x: (x**2).sum()),
    "filter_value_and_grad": filter_value_and_grad(lambda x: (x**2).sum()),
    "filter_vmap": filter_vmap(lambda x: 2 * x),
    "wraps": functools.wraps(double)(lambda *args, **kwargs: double(*args, **kwargs)),
    "wraps-that-changes-the-signature": with_key(scaled),
    "wraps-that-adds-a-default": with_default(scaled),
    "module-of-jitted": Affine(jnp.array(2.0)).jitted,
}


def outputs_equal(first, second):
    same = jtu.tree_map(equal, first, second)
    return all(jtu.tree_leaves(same))


@pytest.mark.parametrize("name", CALLABLES)
def test_gives_what_the_plain_callable_gives(name):
    function = CALLABLES[name]
    jitted = filter_jit(function)
    for _ in range(3):  # The first call, and warm ones.
        assert outputs_equal(jitted(jnp.asarray(X)), function(jnp.asarray(X)))


@pytest.mark.parametrize("name", CALLABLES)
def test_gives_what_the_plain_callable_gives_in_checking_mode(name):
    function = CALLABLES[name]
    with checking_partitions():
        assert outputs_equal(filter_jit(function)(jnp.asarray(X)), function(jnp.asarray(X)))


def test_builtin_function_of_python():
    assert equal(filter_jit(max)(1, 2), 2)


def test_built_in_method_of_a_dict():
    assert equal(filter_jit({"a": X}.get)("a"), X)


def test_array_bound_by_partial_is_no_constant():
    jitted = filter_jit(functools.partial(scaled, scale=jnp.array(2.0)))
    assert "2.0" not in jitted.lower(X).as_text()


def test_array_of_a_module_is_no_constant():
    assert "7.0" not in filter_jit(Affine(jnp.array(7.0))).lower(X).as_text()


def test_array_of_the_instance_of_a_method_is_no_constant():
    assert "7.0" not in filter_jit(Affine(jnp.array(7.0)).apply).lower(X).as_text()


def test_what_cannot_be_called_is_refused():
    with pytest.raises(TypeError, match="3 is not a callable object"):
        filter_jit(3)


def test_two_callables_that_are_equal_are_told_apart():
    @dataclasses.dataclass(frozen=True)
    class Constant:
        value: object

        def __call__(self):
            return jnp.asarray(self.value)

    integer, floating = filter_jit(Constant(2)), filter_jit(Constant(2.0))
    assert integer().dtype == jnp.int32
    assert floating().dtype == jnp.float32


def test_callable_outlives_an_equal_one():
    jitted = filter_jit(functools.partial(PlainCallable(2.0)))
    assert equal(jitted(X), 2 * X)
    first, second = PlainCallable(2.0), PlainCallable(2.0)
    jitted_first, jitted_second = filter_jit(first), filter_jit(second)
    jitted_first(X)
    del first, jitted_first
    assert equal(jitted_second(X[:2]), 2 * X[:2])
