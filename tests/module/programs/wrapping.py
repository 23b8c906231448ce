"""`Partial`, and Modules that wrap a callable and show its metadata."""

import copy
import dataclasses
import functools
import inspect
import pickle
from typing import Any

import equinox
import jax
import jax.numpy as jnp
import jax.tree_util as jtu

import eqxlike
from tests.beside_equinox import error_of
from tests.module.programs.registry import affine, everything, program

NAMES = ("__name__", "__qualname__", "__doc__", "__module__", "__annotations__")


def make_twice(library):
    class Twice(library.Module):
        """Calls twice."""

        function: Any
        tag: Any = 0

        def __call__(self, *args, **kwargs):
            return self.function(*args, **kwargs), self.function(*args, **kwargs)

        @property
        def __wrapped__(self):
            return self.function

    # Where pickle finds it.
    Twice.__qualname__ = f"{library.__name__.capitalize()}Twice"
    return Twice


EquinoxTwice, EqxlikeTwice = make_twice(equinox), make_twice(eqxlike)


def twice(eqx):
    return {equinox: EquinoxTwice, eqxlike: EqxlikeTwice}[eqx]


def metadata(value):
    return [getattr(value, name, "none") for name in NAMES]


@program
def wrapper_shows_what_it_wraps(eqx):
    wrapper = twice(eqx)(affine)
    updated = eqx.module_update_wrapper(wrapper)
    return (
        (metadata(updated), str(inspect.signature(updated)), updated(2, 3)),
        (updated is wrapper, type(updated) is type(wrapper), wrapper.__doc__),
        (hasattr(wrapper, "__name__"), hasattr(dataclasses.replace(updated, tag=2), "__name__")),
        (updated == wrapper, updated == eqx.module_update_wrapper(twice(eqx)(affine))),
        error_of(setattr, updated, "__name__", "other"),
    )


@program
def wrapper_of_something_else_given(eqx):
    updated = eqx.module_update_wrapper(twice(eqx)(everything), affine)
    by_keyword = eqx.module_update_wrapper(twice(eqx)(everything), wrapped=affine)
    return metadata(updated), metadata(by_keyword), updated.__wrapped__ is everything


@program
def wrappers_that_are_refused(eqx):
    class Plain(eqx.Module):
        function: Any

    class WithField(eqx.Module):
        __wrapped__: Any

    wrappers = [(Plain(affine),), (Plain(affine), affine), (WithField(affine),)]
    wrappers.append((functools.partial(affine),))
    return [error_of(eqx.module_update_wrapper, *args) for args in wrappers]


@program
def wrapper_keeps_its_metadata(eqx):
    updated = eqx.module_update_wrapper(twice(eqx)(affine, 3))
    mapped = jtu.tree_map(lambda leaf: 2 * leaf if leaf == 3 else leaf, updated)
    copies = copy.copy(updated), copy.deepcopy(updated), pickle.loads(pickle.dumps(updated))
    with_array = eqx.module_update_wrapper(twice(eqx)(affine, jnp.array(2.0)))
    returned = eqx.filter_jit(lambda wrapper: wrapper)(with_array)
    gradient = eqx.filter_grad(lambda wrapper: wrapper.tag**2)(with_array)
    wrappers = mapped, *copies, returned, gradient, eqx.filter_jit(lambda it: it)(returned)
    return [(metadata(each), each.tag) for each in wrappers[:4]], [
        (metadata(each), float(each.tag), jtu.tree_structure(each).num_leaves)
        for each in wrappers[4:]
    ]


@program
def wrapper_of_other_callables(eqx):
    class Wrapped:
        """A class."""

        def __init__(self, size):
            pass

    class Model(eqx.Module):
        weight: Any

        def method(self, x):
            """Scales."""
            return self.weight * x

    def without_hash(x: []):  # pyright: ignore
        return x

    callables = [
        Wrapped,
        functools.partial(affine, 1),
        Model(jnp.array(2.0)).method,
        eqx.module_update_wrapper(twice(eqx)(affine)),
        eqx.filter_jit(affine),
        without_hash,
    ]
    wrappers = [eqx.module_update_wrapper(twice(eqx)(each, jnp.ones(2))) for each in callables]
    mapped = jtu.tree_map(lambda leaf: leaf, wrappers[-1])
    wrappers.append(eqx.filter_jit(wrappers[-2]))
    return mapped.__annotations__, [
        (
            [getattr(each, name, "none") for name in NAMES if name != "__qualname__"],
            str(inspect.signature(each)),
            jtu.tree_map(lambda leaf: leaf, each).__doc__,
            sum(map(eqx.is_array, jtu.tree_leaves(each))),
        )
        for each in wrappers
    ]


@program(differs="a property of the class has the first word")
def wrapper_with_a_name_of_its_own(eqx):
    class Wrapper(twice(eqx)):
        @property
        def __name__(self):
            return "own"

    updated = eqx.module_update_wrapper(Wrapper(affine))
    return updated.__name__, updated.__doc__


@program
def signatures_of_what_is_public(eqx):
    functions = [eqx.module_update_wrapper, eqx.static_field, eqx.StrictConfig, eqx.Partial]
    exact = [eqx.Module, eqx.field]
    return [
        [(each.name, each.kind) for each in inspect.signature(function).parameters.values()]
        for function in functions + exact
    ], [[p.default for p in inspect.signature(each).parameters.values()] for each in exact]


# --- Partial ------------------------------------------------------------------------------------


@program
def partial_calls_with_what_it_has(eqx):
    partial = eqx.Partial(everything, 1, a=2)
    named = eqx.Partial(everything, self=1, func=2, args=3, keywords=4)
    outputs = partial(), partial(3, b=4), named(), eqx.Partial[int](affine, 1)(2)
    errors = error_of(eqx.Partial), error_of(eqx.Partial, func=affine), error_of(eqx.Partial(3))
    return outputs, errors, (partial.func is everything, partial.args, partial.keywords)


@program(differs="a keyword of the call replaces one given before, as in `functools.partial`")
def partial_keyword_given_twice(eqx):
    return eqx.Partial(everything, a=1)(a=2)


@program
def partial_is_a_module(eqx):
    class Named(eqx.Partial):
        name: str = "named"

    partial = eqx.Partial(affine, 1, [2], shift=3)
    others = [eqx.Partial(affine, *args, shift=3) for args in ((1, [2]), (1,))]
    return (
        (isinstance(partial, eqx.Module), isinstance(partial, functools.partial)),
        ([each.name for each in dataclasses.fields(partial)], eqx.Partial.__match_args__),
        [(jtu.keystr(path), leaf) for path, leaf in jtu.tree_leaves_with_path(partial)],
        (repr(partial), [partial == other for other in others]),
        error_of(setattr, partial, "func", everything),
        (Named(affine, 1)(2), Named(affine, 1).name),
    )


@program(
    differs="the hash of a Module is that of its leaves, also where a dict is among its fields"
)
def partial_hash(eqx):
    return hash(eqx.Partial(affine, 1)) == hash(eqx.Partial(affine, 1))


@program
def partial_copies(eqx):
    partial = eqx.Partial(affine, 2, shift=1)
    copies = copy.copy(partial), copy.deepcopy(partial), pickle.loads(pickle.dumps(partial))
    changed = eqx.tree_at(lambda partial: partial.keywords["shift"], partial, 5)
    return [each(3) for each in copies], [each == partial for each in copies], changed(1)


@program
def partial_of_other_callables(eqx):
    class Model(eqx.Module):
        weight: Any
        unbound = eqx.Partial(everything, 1)

        def __call__(self, x):
            return self.weight * x

        def method(self, x):
            return self.weight + x

    model = Model(jnp.array(2.0))
    partials = eqx.Partial(model, 3.0), eqx.Partial(model.method, 3.0)
    doubled = jtu.tree_map(lambda x: 2 * x if eqx.is_array(x) else x, partials)
    inner = functools.partial(affine, 2)
    return (
        [float(each()) for each in (*partials, *doubled)],
        eqx.Partial(eqx.Partial(inner, 3), shift=1)(),
        eqx.Partial(eqx.Partial, affine, 2)(3)(),
        model.unbound(2),
    )


@program
def partial_is_transformed(eqx):
    traces = []

    def scale(factor, x):
        traces.append(None)
        return factor * x

    call = eqx.filter_jit(lambda partial, x: partial(x))
    partials = [eqx.Partial(scale, jnp.array(value)) for value in (3.0, 4.0)]
    outputs = [float(call(partial, jnp.array(2.0))) for partial in partials]
    num_traces = len(traces)
    return (outputs, num_traces, eqx.filter_vmap(partials[0])(jnp.arange(2.0)).tolist()), [
        float(eqx.filter_grad(lambda partial: partial(2.0))(partials[0]).args[0]),
        float(jax.jit(lambda args: eqx.Partial(scale, *args)(2.0))(partials[0].args)),
    ]
