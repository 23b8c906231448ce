"""A Module that a filtered function returned is built when it is read, and nobody can tell."""

import copy
import dataclasses
import gc
import operator
import weakref

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

from eqxlike import Module, field, filter_jit, tree_at
from eqxlike._module import get_cached
from eqxlike._partition import flatten


class Pair(Module):
    left: object
    right: object = None
    mode: object = field(static=True, default="a")

    @property
    def first(self):
        return self.left[0]


make_pair = filter_jit(lambda x: Pair(x, Pair((x + 1, "text")), mode="b"))


@pytest.fixture(scope="module")
def returned():
    """A function that gives a Module as a warm call has just returned it."""
    make_pair(jnp.ones(2))
    return lambda: make_pair(jnp.ones(2))


def built():
    return Pair(jnp.ones(2), Pair((jnp.ones(2) + 1, "text")), mode="b")


# `tests/module/test_returned.py` has more.
READINGS = {
    "inner": lambda it: it.right.left[0],
    "hasattr": lambda it: (hasattr(it, "left"), hasattr(it, "missing")),
    "vars": lambda it: sorted(vars(it)),
    "getattribute-of-object": lambda it: object.__getattribute__(it, "left"),
    "reduce": lambda it: sorted(it.__reduce_ex__(4)[2]),
    "deepcopy": lambda it: repr(copy.deepcopy(it)),
    "leaves-with-paths": lambda it: [
        (jtu.keystr(path), leaf) for path, leaf in jtu.tree_leaves_with_path(it)
    ],
    "tree_at": lambda it: repr(tree_at(lambda it: it.right.left[1], it, "other")),
    "property": lambda it: it.first,
}


def test_returned_module_reads_like_one_that_was_built(returned):
    for name, read in READINGS.items():
        module = returned()
        assert jtu.tree_all(jtu.tree_map(np.array_equal, read(module), read(built()))), name
        # It gives the same objects again, and its partition is right.
        first = module.left, module.right, module.mode, module.right.left[0]
        read(module)
        again = module.left, module.right, module.mode, module.right.left[0]
        assert all(map(operator.is_, first, again)), name
        cached = get_cached(module)
        fresh, fresh_structure = flatten(copy.copy(module))
        assert [*map(id, cached.arrays)] == [*map(id, fresh)], name
        assert cached.structure is fresh_structure, name


def test_returned_module_is_frozen(returned):
    with pytest.raises(dataclasses.FrozenInstanceError):
        returned().left = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        del returned().left
    with pytest.raises(AttributeError, match="'Pair' object has no attribute 'missing'") as raised:
        returned().missing  # noqa: B018
    assert raised.value.name == "missing"


def warm(cls):
    """An instance of a class of one field, as a warm call has just returned it."""
    make = filter_jit(cls)
    with jax.disable_jit():
        make(jnp.ones(2))
        return make(jnp.ones(2))


def test_attributes_of_a_user_s_class_mean_what_they_do_in_one_that_was_built():
    class Fails(Module):
        left: object

        @property
        def broken(self):
            raise AttributeError("of the property")

        def __getattr__(self, name):
            return f"no {name}"

    assert warm(Fails).other == "no other"
    assert (warm(Fails).left == 1).all()

    class Broken(Module):
        left: object
        broken = Fails.broken

    with pytest.raises(AttributeError, match="of the property"):
        warm(Broken).broken  # noqa: B018

    seen = []

    class Watches(Module):
        left: object

        def __getattribute__(self, name):
            seen.append(name)
            return super().__getattribute__(name)

    assert (warm(Watches).left == 1).all()
    assert "left" in seen


def test_a_field_is_hidden_by_no_method_of_a_base_nor_by_a_class_attribute_set_later():
    class Base(Module):
        def act(self):
            return "of the base"

    class Child(Base):
        act: object

    assert (warm(Child).act == 1).all()

    class Late(Module):
        left: object

    module = warm(Late)
    Late.left = "of the class"
    assert (module.left == 1).all()


def test_returned_module_holds_arrays_and_no_more_than_a_built_one(returned):
    module = returned()
    reference = weakref.ref(module.left)
    inner = module.right
    del module
    gc.collect()
    assert reference() is None
    assert inner.left[1] == "text"
