"""A Module that a filtered function returned is as one made by hand."""

import copy
import dataclasses
import functools
import inspect
import pickle
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import pytest

import eqxlike
from tests.module.models import HasWeight, Inner

# Each reads a module in its own way, as the first to do so.
READINGS = {
    "attribute": lambda module: (module.weight.tolist(), module.name),
    "vars": lambda module: (vars(module)["weight"].tolist(), vars(module)["name"]),
    "fields": lambda module: [each.name for each in dataclasses.fields(module)],
    "asdict": lambda module: dataclasses.asdict(module)["name"],
    "hasattr": lambda module: (hasattr(module, "weight"), hasattr(module, "absent")),
    "getattr default": lambda module: getattr(module, "name", None),
    "object": lambda module: object.__getattribute__(module, "name"),
    "getstate": lambda module: sorted(module.__getstate__()),
    "dir": lambda module: {"weight", "name", "double"} <= {*dir(module)},
    "getmembers": lambda module: dict(inspect.getmembers(module))["name"],
    "getattr_static": lambda module: inspect.getattr_static(module, "name"),
    "repr": repr,
    "equality": lambda module: module == Returned(2 * jnp.ones(2), "returned"),
    "leaves": lambda module: [leaf.tolist() for leaf in jtu.tree_leaves(module)],
    "structure": jtu.tree_structure,
    "paths": lambda module: [jtu.keystr(path) for path, _ in jtu.tree_leaves_with_path(module)],
    "method": lambda module: module.double().tolist(),
    "property": lambda module: module.label,
    "cached property": lambda module: module.cached,
    "match": lambda module: module.__match_args__,
    "raw jit": lambda module: jax.jit(lambda module: module.double())(module).tolist(),
    "tree_at": lambda module: eqxlike.tree_at(lambda m: m.weight, module, 1).name,
    "copy": lambda module: copy.copy(module).name,
    "deepcopy": lambda module: copy.deepcopy(module).weight.tolist(),
    "replace": lambda module: dataclasses.replace(module, weight=1).name,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)).weight.tolist(),
    "dict update": lambda module: {**module.__dict__}["name"],
    "weakref": lambda module: weakref.ref(module)().name,
    "isinstance": lambda module: isinstance(module, Returned),
}


class Returned(eqxlike.Module):
    weight: Any
    name: str = eqxlike.field(static=True)

    @property
    def label(self):
        return self.name.upper()

    @functools.cached_property
    def cached(self):
        return self.name * 2

    def double(self):
        return 2 * self.weight


@pytest.mark.parametrize("how", READINGS)
def test_a_module_that_filter_jit_returned_reads_like_one_made_by_hand(how):
    @eqxlike.filter_jit
    def make(x):
        return Returned(2 * x, "returned")

    make(jnp.ones(2))
    by_hand = Returned(2 * jnp.ones(2), "returned")
    assert READINGS[how](make(jnp.ones(2))) == READINGS[how](by_hand)


def test_a_module_that_filter_jit_returned_satisfies_a_runtime_protocol_of_its_fields():
    assert isinstance(eqxlike.filter_jit(lambda x: Inner(2 * x))(jnp.ones(2)), HasWeight)


def test_a_module_that_filter_jit_returned_is_frozen():
    module = eqxlike.filter_jit(lambda x: Inner(2 * x))(jnp.ones(2))
    with pytest.raises(dataclasses.FrozenInstanceError):
        module.weight = 1


def test_an_absent_attribute_of_what_filter_jit_returned_is_named():
    module = eqxlike.filter_jit(lambda x: Inner(2 * x))(jnp.ones(2))
    with pytest.raises(AttributeError, match=r"'Inner' object has no attribute 'absent'"):
        _ = module.absent
