"""`Partial`, and Modules that wrap a callable and show its metadata."""

import copy
import dataclasses
import functools
import inspect
import pickle
from typing import Any

import equinox
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

    # `pickle` looks for the class under this name.
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


# --- Partial ------------------------------------------------------------------------------------


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
