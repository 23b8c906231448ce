"""Ways to wrap a function, each with what eqxlike has for it and with what raw JAX has."""

import collections
import functools
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

import eqxlike

Library = collections.namedtuple(
    "Library", ["vmap", "jit", "grad", "value_and_grad", "checkpoint", "partial", "base_class"]
)


def unchanged(function):
    return function


OURS = Library(
    eqxlike.filter_vmap,
    eqxlike.filter_jit,
    eqxlike.filter_grad,
    eqxlike.filter_value_and_grad,
    eqxlike.filter_checkpoint,
    eqxlike.Partial,
    eqxlike.Module,
)
# Nothing is compiled, and nothing of ours is used.
PLAIN = Library(
    jax.vmap, unchanged, jax.grad, jax.value_and_grad, unchanged, functools.partial, object
)


class Wrappers:
    """The ways to wrap a function of an array, all around the same few functions.

    These are new for each object, with nothing compiled for them yet. They add the rank of what
    they get, so that no two orders of wrappers compute the same by chance. Each method takes what
    it wraps, and a number to bind.
    """

    def __init__(self, library):
        self.library = library
        self.base = lambda x: jnp.sin(x) + x.ndim
        self.above = lambda inner, x: 2 * inner(x) + x.ndim
        self.scaled = lambda inner, factor, x: factor * inner(x) - x.ndim
        self.raised = lambda inner, x, *, power: inner(x) ** power + 3 * x.ndim
        self.total = lambda inner, x: jnp.sum(inner(x))
        self.model = make_model(library)
        self.plain_class = make_plain_class()

    def build(self, chain, number):
        """The function wrapped in what `chain` names, innermost first."""
        built = self.base
        for name in chain:
            built = getattr(self, name)(built, number)
        return built

    def partial(self, inner, number):
        return functools.partial(self.above, inner)

    def partial_of_array(self, inner, number):
        return functools.partial(self.scaled, inner, jnp.float32(number))

    def partial_of_static(self, inner, number):
        return functools.partial(self.raised, inner, power=number)

    def jax_partial(self, inner, number):
        return jtu.Partial(self.above, inner)

    def jax_partial_of_array(self, inner, number):
        return jtu.Partial(self.scaled, inner, jnp.float32(number))

    def our_partial(self, inner, number):
        return self.library.partial(self.above, inner)

    def our_partial_of_static(self, inner, number):
        return self.library.partial(self.raised, inner, power=number)

    def vmap(self, inner, number):
        return self.library.vmap(inner)

    def vmap_to_last_axis(self, inner, number):
        return self.library.vmap(inner, out_axes=-1)

    def jit(self, inner, number):
        return self.library.jit(inner)

    def checkpoint(self, inner, number):
        return self.library.checkpoint(inner)

    def grad(self, inner, number):
        return self.library.grad(functools.partial(self.total, inner))

    def value_and_grad(self, inner, number):
        differentiated = self.library.value_and_grad(functools.partial(self.total, inner))
        return lambda x: jnp.add(*differentiated(x))

    def module(self, inner, number):
        return self.model(inner, number)

    def module_of_array(self, inner, number):
        return self.model(inner, jnp.float32(number))

    def method_of_module(self, inner, number):
        return self.model(inner, number).apply

    def jitted_method_of_module(self, inner, number):
        return self.model(inner, number).jitted

    def object(self, inner, number):
        return self.plain_class(inner)

    def method_of_object(self, inner, number):
        return self.plain_class(inner).apply

    def closure(self, inner, number):
        return lambda x: 7 * x.ndim - inner(x)


NAMES = sorted(name for name in vars(Wrappers) if not name.startswith("_") and name != "build")


def make_model(library):
    class Model(library.base_class):
        inner: Any
        weight: Any

        def __init__(self, inner, weight):
            self.inner = inner
            self.weight = weight

        def __call__(self, x):
            return self.weight * self.inner(x) + 5 * x.ndim

        def apply(self, x):
            return self.inner(x) - self.weight * x.ndim

        @library.jit
        def jitted(self, x):
            return self.inner(x) + 2 * self.weight * x.ndim

    return Model


def make_plain_class():
    class Plain:
        def __init__(self, inner):
            self.inner = inner

        def __call__(self, x):
            return self.inner(x) / 2 + x.ndim

        def apply(self, x):
            return self.inner(x) / 4 - x.ndim

    return Plain
