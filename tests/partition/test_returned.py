"""A Module that a filtered function returned is built when it is read, and nobody can tell."""

import copy
import dataclasses
import gc
import inspect
import operator
import pickle
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

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

    def sum(self):
        return self.left.sum()

    @property
    def first(self):
        return self.left[0]


def returned():
    """A Module that was just returned by a warm call."""
    make = filter_jit(lambda x: Pair(x, Pair((x + 1, "text")), mode="b"))
    make(jnp.ones(2))
    return make(jnp.ones(2))


def built():
    return Pair(jnp.ones(2), Pair((jnp.ones(2) + 1, "text")), mode="b")


READINGS = {
    "attribute": lambda it: it.left,
    "static-field": lambda it: it.mode,
    "inner": lambda it: it.right.left[0],
    "getattr": lambda it: getattr(it, "left", None),
    "getattr-missing": lambda it: getattr(it, "missing", None),
    "hasattr": lambda it: (hasattr(it, "left"), hasattr(it, "missing")),
    "vars": lambda it: sorted(vars(it)),
    "dict": lambda it: sorted(it.__dict__),
    "dict-of-object": lambda it: sorted(object.__getattribute__(it, "__dict__")),
    "getattribute-of-object": lambda it: object.__getattribute__(it, "left"),
    "getstate": lambda it: sorted(it.__getstate__()),
    "reduce": lambda it: sorted(it.__reduce_ex__(4)[2]),
    "dir": dir,
    "repr": repr,
    "copy": lambda it: repr(copy.copy(it)),
    "deepcopy": lambda it: repr(copy.deepcopy(it)),
    "pickle": lambda it: repr(pickle.loads(pickle.dumps(it))),
    "replace": lambda it: repr(dataclasses.replace(it, mode="c")),
    "asdict": lambda it: repr(dataclasses.asdict(it)),
    "astuple": lambda it: repr(dataclasses.astuple(it)),
    "equality": lambda it: it == built(),
    "equality-the-other-way-round": lambda it: built() == it,
    "leaves": jtu.tree_leaves,
    "leaves-with-paths": lambda it: [
        (jtu.keystr(path), leaf) for path, leaf in jtu.tree_leaves_with_path(it)
    ],
    "treedef": lambda it: jtu.tree_structure(it) == jtu.tree_structure(built()),
    "tree_map": lambda it: repr(jtu.tree_map(lambda leaf: leaf, it)),
    "tree_at": lambda it: repr(tree_at(lambda it: it.right.left[1], it, "other")),
    "jax-jit": lambda it: jax.jit(lambda x: x + 1)(it.left),
    "method": lambda it: it.sum(),
    "property": lambda it: it.first,
    "match": lambda it: match_fields(it),
    "members": lambda it: [name for name, _ in inspect.getmembers(it) if name in ("left", "mode")],
}


def match_fields(module):
    match module:
        case Pair(left=left, mode="b"):
            return left
    return None


@pytest.mark.parametrize("name", READINGS)
def test_returned_module_reads_like_one_that_was_built(name):
    read = READINGS[name]
    assert jtu.tree_all(jtu.tree_map(np.array_equal, read(returned()), read(built())))


@pytest.mark.parametrize("name", READINGS)
def test_module_that_was_read_gives_the_same_objects_again(name):
    module = returned()
    READINGS[name](module)
    first = module.left, module.right, module.mode, module.right.left[0]
    READINGS[name](module)
    again = module.left, module.right, module.mode, module.right.left[0]
    assert all(map(operator.is_, first, again))


@pytest.mark.parametrize("name", READINGS)
def test_partition_of_a_returned_module_is_right_after_reading(name):
    module = returned()
    READINGS[name](module)
    cached = get_cached(module)
    dynamic, structure = cached.arrays, cached.structure
    fresh, fresh_structure = flatten(copy.copy(module))
    assert [*map(id, dynamic)] == [*map(id, fresh)]
    assert structure is fresh_structure


def test_returned_module_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        returned().left = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        del returned().left


def test_missing_attribute_of_a_returned_module_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'Pair' object has no attribute 'missing'") as raised:
        returned().missing  # noqa: B018
    assert raised.value.name == "missing"


def test_property_of_a_returned_module_that_raises_shows_its_own_error():
    class Fails(Module):
        left: object

        @property
        def broken(self):
            raise AttributeError("of the property")

    module = filter_jit(Fails)(jnp.ones(2))
    with pytest.raises(AttributeError, match="of the property"):
        module.broken  # noqa: B018


def test_getattr_of_a_user_is_asked_for_what_is_missing_alone():
    class Asks(Module):
        left: object

        def __getattr__(self, name):
            return f"no {name}"

    make = filter_jit(Asks)
    make(jnp.ones(2))
    module = make(jnp.ones(2))
    assert module.other == "no other"
    assert (module.left == 1).all()


def test_getattribute_of_a_user_sees_every_field():
    seen = []

    class Watches(Module):
        left: object

        def __getattribute__(self, name):
            seen.append(name)
            return super().__getattribute__(name)

    make = filter_jit(Watches)
    make(jnp.ones(2))
    module = make(jnp.ones(2))
    assert (module.left == 1).all()
    assert "left" in seen


def test_field_that_hides_a_method_of_a_base_is_that_field():
    class Base(Module):
        def act(self):
            return "of the base"

    class Child(Base):
        act: object

    make = filter_jit(Child)
    make(jnp.ones(2))
    assert (make(jnp.ones(2)).act == 1).all()


def test_class_attribute_set_later_does_not_hide_a_field():
    class Late(Module):
        left: object

    make = filter_jit(Late)
    make(jnp.ones(2))
    module = make(jnp.ones(2))
    Late.left = "of the class"
    assert (module.left == 1).all()


@pytest.mark.usefixtures("compiles_alone")
def test_threads_that_read_a_returned_module_at_once_get_the_same_objects():
    for _ in range(20):
        module = returned()
        start = threading.Barrier(8, timeout=60)

        def read(_, module=module, start=start):
            start.wait()
            return id(module.right), id(module.right.left), id(module.left), id(vars(module))

        with ThreadPoolExecutor(8) as pool:
            assert len(set(pool.map(read, range(8)))) == 1


def test_returned_module_holds_arrays_and_no_more_than_a_built_one():
    module = returned()
    reference = weakref.ref(module.left)
    inner = module.right
    del module
    gc.collect()
    assert reference() is None
    assert inner.left[1] == "text"
