"""`Partial`, and Modules that wrap a callable and show its metadata."""

import copy
import dataclasses
import functools
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import equinox
import jax.numpy as jnp
import jax.tree_util as jtu

import eqxlike
from tests.module.programs.functions import affine, everything
from tests.module.programs.registry import program

NAMES = ("__name__", "__qualname__", "__doc__", "__module__", "__annotations__")


class EquinoxTwice(equinox.Module):
    """Calls twice."""

    function: Any
    tag: Any = 0

    def __call__(self, *args, **kwargs):
        return self.function(*args, **kwargs), self.function(*args, **kwargs)

    @property
    def __wrapped__(self):
        return self.function


class EqxlikeTwice(eqxlike.Module):
    """Calls twice."""

    function: Any
    tag: Any = 0

    def __call__(self, *args, **kwargs):
        return self.function(*args, **kwargs), self.function(*args, **kwargs)

    @property
    def __wrapped__(self):
        return self.function


def twice(eqx):
    """A class that pickle can find."""
    return {equinox: EquinoxTwice, eqxlike: EqxlikeTwice}[eqx]


def metadata(value):
    return [getattr(value, name, "none") for name in NAMES]


@program
def wrapper_shows_what_it_wraps(eqx):
    wrapper = eqx.module_update_wrapper(twice(eqx)(affine))
    return metadata(wrapper), str(inspect.signature(wrapper)), wrapper(2, 3)


@program
def wrapper_that_was_not_updated_shows_itself(eqx):
    return twice(eqx)(affine).__doc__, hasattr(twice(eqx)(affine), "__name__")


@program
def wrapper_is_copied_not_changed(eqx):
    wrapper = twice(eqx)(affine)
    updated = eqx.module_update_wrapper(wrapper)
    return updated is wrapper, type(updated) is type(wrapper), wrapper.__doc__, updated.__doc__


@program
def wrapper_of_something_else_given(eqx):
    updated = eqx.module_update_wrapper(twice(eqx)(everything), affine)
    by_keyword = eqx.module_update_wrapper(twice(eqx)(everything), wrapped=affine)
    return metadata(updated), metadata(by_keyword), updated.__wrapped__ is everything


@program
def wrapper_without_the_property(eqx):
    class Wrapper(eqx.Module):
        function: Callable

    return eqx.module_update_wrapper(Wrapper(affine))


@program
def wrapper_without_the_property_of_something_given(eqx):
    class Wrapper(eqx.Module):
        function: Callable

    return eqx.module_update_wrapper(Wrapper(affine), affine)


@program
def wrapper_with_a_field_for_the_property(eqx):
    class Wrapper(eqx.Module):
        __wrapped__: Any

    return eqx.module_update_wrapper(Wrapper(affine))


@program
def wrapper_that_is_no_module(eqx):
    return eqx.module_update_wrapper(functools.partial(affine))


@program
def wrapper_has_the_same_leaves(eqx):
    updated = eqx.module_update_wrapper(twice(eqx)(affine, 3))
    return jtu.tree_leaves(updated), [each.name for each in dataclasses.fields(updated)]


@program
def wrapper_keeps_its_metadata_in_a_map(eqx):
    updated = eqx.module_update_wrapper(twice(eqx)(affine, 3))
    mapped = jtu.tree_map(lambda leaf: 2 * leaf if leaf == 3 else leaf, updated)
    return metadata(mapped), mapped.tag


@program
def wrapper_keeps_its_metadata_through_filter_jit(eqx):
    updated = eqx.module_update_wrapper(twice(eqx)(affine, jnp.ones(2)))
    returned = eqx.filter_jit(lambda wrapper: wrapper)(updated)
    return metadata(returned), metadata(eqx.filter_jit(lambda wrapper: wrapper)(returned))


@program
def wrapper_keeps_its_metadata_in_copies(eqx):
    updated = eqx.module_update_wrapper(twice(eqx)(affine, 3))
    copies = copy.copy(updated), copy.deepcopy(updated), pickle.loads(pickle.dumps(updated))
    return [metadata(each) for each in copies]


@program
def wrapper_that_was_replaced_shows_itself(eqx):
    updated = eqx.module_update_wrapper(twice(eqx)(affine))
    return hasattr(dataclasses.replace(updated, tag=2), "__name__")


@program
def wrapper_has_a_structure_of_its_own(eqx):
    wrapper = twice(eqx)(affine)
    updated = eqx.module_update_wrapper(wrapper)
    same = eqx.module_update_wrapper(twice(eqx)(affine))
    return updated == wrapper, updated == same


@program
def wrapper_of_a_class(eqx):
    class Wrapped:
        """A class."""

        def __init__(self, size):
            pass

    updated = eqx.module_update_wrapper(twice(eqx)(Wrapped))
    return updated.__name__, updated.__doc__, str(inspect.signature(updated))


@program
def wrapper_of_what_has_no_name(eqx):
    updated = eqx.module_update_wrapper(twice(eqx)(functools.partial(affine, 1)))
    return hasattr(updated, "__name__"), updated.__module__, updated(2)


@program
def wrapper_of_a_method(eqx):
    class Model(eqx.Module):
        weight: Any

        def method(self, x):
            """Scales."""
            return self.weight * x

    updated = eqx.module_update_wrapper(twice(eqx)(Model(jnp.array(2.0)).method))
    arrays = [leaf.tolist() for leaf in jtu.tree_leaves(updated) if eqx.is_array(leaf)]
    return updated.__name__, updated.__doc__, str(inspect.signature(updated)), arrays


@program
def wrapper_of_a_wrapper(eqx):
    inner = eqx.module_update_wrapper(twice(eqx)(affine))
    return metadata(eqx.module_update_wrapper(twice(eqx)(inner)))


@program
def wrapper_of_a_filtered_function(eqx):
    updated = eqx.module_update_wrapper(twice(eqx)(eqx.filter_jit(affine)))
    return metadata(updated), metadata(eqx.filter_jit(updated))


@program
def wrapper_under_filter_grad(eqx):
    updated = eqx.module_update_wrapper(twice(eqx)(affine, jnp.array(2.0)))
    gradient = eqx.filter_grad(lambda wrapper: wrapper.tag**2)(updated)
    return float(gradient.tag), gradient.__name__


@program
def wrapper_is_frozen(eqx):
    eqx.module_update_wrapper(twice(eqx)(affine)).__name__ = "other"


@program(differs="a property of the class has the first word")
def wrapper_with_a_name_of_its_own(eqx):
    class Wrapper(twice(eqx)):
        @property
        def __name__(self):
            return "own"

    updated = eqx.module_update_wrapper(Wrapper(affine))
    return updated.__name__, updated.__doc__


@program
def wrapper_metadata_with_annotations_that_have_no_hash(eqx):
    def function(x: []):  # pyright: ignore
        return x

    updated = eqx.module_update_wrapper(twice(eqx)(function, jnp.ones(2)))
    return jtu.tree_map(lambda leaf: leaf, updated).__annotations__


@program
def signatures_of_the_functions(eqx):
    return [
        [(each.name, each.kind) for each in inspect.signature(function).parameters.values()]
        for function in (eqx.module_update_wrapper, eqx.static_field, eqx.StrictConfig)
    ]
