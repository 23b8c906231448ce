"""A Module that a filtered function returns behaves like a Module made by its class."""

import copy
import dataclasses
import functools
import gc
import inspect
import operator
import pickle
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import pytest

import eqxlike
from eqxlike._module import get_cached
from eqxlike._partition import flatten
from tests.module.models import HasWeight


class Returned(eqxlike.Module):
    weight: Any
    shift: Any = 0.0
    name: str = eqxlike.field(static=True, default="default")

    @property
    def label(self):
        return self.name.upper()

    @functools.cached_property
    def cached(self):
        return self.name * 2

    def double(self):
        return 2 * self.weight

    def change(self, write):
        write(self)
        return self


@eqxlike.filter_jit
def make(x):
    return Returned(2 * x, 3 * x, "given")


def make_unread():
    """A Module that a filtered function has returned, before its first use."""
    make(jnp.array(1.0))
    return make(jnp.array(1.0))


def absent(module):
    with pytest.raises(AttributeError, match="'Returned' object has no attribute 'absent'"):
        _ = module.absent


def assigned(module):
    with pytest.raises(dataclasses.FrozenInstanceError):
        module.weight = 1


# Ways to read a returned Module for the first time.
READINGS = {
    "attribute": lambda module: (module.weight.tolist(), module.name),
    "vars": lambda module: (vars(module)["weight"].tolist(), vars(module)["name"]),
    "fields": lambda module: [each.name for each in dataclasses.fields(module)],
    "asdict": lambda module: dataclasses.asdict(module)["name"],
    "hasattr": lambda module: (hasattr(module, "weight"), hasattr(module, "absent")),
    "object": lambda module: object.__getattribute__(module, "name"),
    "getstate": lambda module: sorted(module.__getstate__()),
    "dir": lambda module: {"weight", "name", "double"} <= {*dir(module)},
    "getmembers": lambda module: dict(inspect.getmembers(module))["name"],
    "getattr_static": lambda module: inspect.getattr_static(module, "name"),
    "repr": repr,
    "equality": lambda module: bool(module == Returned(jnp.array(2.0), jnp.array(3.0), "given")),
    "leaves": lambda module: [leaf.tolist() for leaf in jtu.tree_leaves(module)],
    "structure": jtu.tree_structure,
    "paths": lambda module: [jtu.keystr(path) for path, _ in jtu.tree_leaves_with_path(module)],
    "property": lambda module: module.label,
    "cached property": lambda module: module.cached,
    "raw jit": lambda module: jax.jit(Returned.double)(module).tolist(),
    "tree_at": lambda module: eqxlike.tree_at(lambda m: m.weight, module, 1).name,
    "copy": lambda module: copy.copy(module).name,
    "deepcopy": lambda module: copy.deepcopy(module).weight.tolist(),
    "replace": lambda module: dataclasses.replace(module, weight=1).name,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)).weight.tolist(),
    "dict update": lambda module: {**module.__dict__}["name"],
    "weakref": lambda module: weakref.ref(module)().name,
    "protocol": lambda module: isinstance(module, HasWeight),
    "absent": absent,
    "assigned": assigned,
}


def test_returned_module_reads_like_a_module_made_by_its_class():
    for how, read in READINGS.items():
        by_hand = Returned(jnp.array(2.0), jnp.array(3.0), "given")
        module = make_unread()
        assert (how, read(module)) == (how, read(by_hand))
        # Later reads give the same objects, and the cached partition is correct.
        before = [*vars(module).values()]
        read(module)
        assert all(map(operator.is_, before, vars(module).values())), how
        cached, (arrays, structure) = get_cached(module), flatten(copy.copy(module))
        assert [*map(id, cached.arrays)] == [*map(id, arrays)], how
        assert cached.structure is structure, how


def test_returned_module_keeps_only_its_own_arrays_alive():
    nested = eqxlike.filter_jit(lambda x: Returned(x, Returned((x + 1, "text"))))
    nested(jnp.ones(2))
    module = nested(jnp.ones(2))
    reference, inner = weakref.ref(module.weight), module.shift
    del module
    gc.collect()
    assert reference() is None
    assert inner.weight[1] == "text"


# --- attributes of a user's class ----------------------------------------------------------------


def warm(cls):
    """An instance of a class with one field, returned by a warm call."""
    make = eqxlike.filter_jit(cls)
    with jax.disable_jit():
        make(jnp.ones(2))
        return make(jnp.ones(2))


def test_returned_module_respects_properties_getattr_and_getattribute():
    class Fails(eqxlike.Module):
        left: object

        @property
        def broken(self):
            raise AttributeError("of the property")

        def __getattr__(self, name):
            return f"no {name}"

    assert warm(Fails).other == "no other"
    assert (warm(Fails).left == 1).all()

    class Broken(eqxlike.Module):
        left: object
        broken = Fails.broken

    with pytest.raises(AttributeError, match="of the property"):
        warm(Broken).broken  # noqa: B018

    class Watches(eqxlike.Module):
        left: object

        def __getattribute__(self, name):
            return name if name == "left" else super().__getattribute__(name)

    assert warm(Watches).left == "left"


def test_field_wins_over_a_base_method_and_a_later_class_attribute():
    class Base(eqxlike.Module):
        def act(self):
            return "of the base"

    class Child(Base):
        act: object

    assert (warm(Child).act == 1).all()

    class Late(eqxlike.Module):
        left: object

    module = warm(Late)
    Late.left = "of the class"
    assert (module.left == 1).all()


# --- written before it is read --------------------------------------------------------------------

WRITINGS = {
    "object.__setattr__": lambda module: object.__setattr__(module, "_cache", 1),
    "vars": lambda module: vars(module).update(_cache=1),
    "object.__delattr__": lambda module: [
        object.__setattr__(module, "_cache", 1),
        object.__setattr__(module, "_other", 1),
        object.__delattr__(module, "_other"),
    ],
}

READINGS_OF_WRITTEN = {
    "attributes": (lambda it: (it.weight, it.shift, it.name), (2.0, 3.0, "given")),
    "vars": (lambda it: sorted(vars(it)), ["_cache", "name", "shift", "weight"]),
    "leaves": (lambda it: [float(leaf) for leaf in jtu.tree_leaves(it)], [2.0, 3.0]),
    "repr": (repr, "Returned(weight=weak_f32[], shift=weak_f32[], name='given')"),
    "copy": (
        lambda it: vars(copy.copy(it)),
        {"_cache": 1, "weight": 2.0, "shift": 3.0, "name": "given"},
    ),
    "next call": (eqxlike.filter_jit(lambda it: (it.weight, it.shift, it.name)), (2, 3, "given")),
}


@pytest.mark.parametrize("how", WRITINGS)
def test_returned_module_that_is_written_before_it_is_read_keeps_its_fields(how):
    for reading, (read, expected) in READINGS_OF_WRITTEN.items():
        found = read(make_unread().change(WRITINGS[how]))
        assert (reading, found) == (reading, expected)
    module = make_unread().change(lambda module: object.__setattr__(module, "shift", 7.0))
    assert (module.weight, module.shift, module.name) == (2, 7, "given")


@pytest.mark.usefixtures("compiles_alone")
def test_threads_read_the_same_objects_from_a_returned_module():
    for _ in range(20):
        module = make_unread()
        start = threading.Barrier(8, timeout=60)

        def visit(number, module=module, start=start):
            start.wait()
            object.__setattr__(module, f"_cache{number}", number)
            return id(module.weight), id(module.shift), id(vars(module)), module.name

        with ThreadPoolExecutor(8) as pool:
            assert len(set(pool.map(visit, range(8)))) == 1
        assert len(vars(module)) == 3 + 8
