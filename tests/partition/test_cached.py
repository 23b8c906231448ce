"""The partition that is cached on a Module, and the checks of `checking_partitions`."""

import copy
import dataclasses
import functools

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

from eqxlike import Module, PartitionError, checking_partitions, filter_jit
from eqxlike._module import CachedPartition, get_cached
from eqxlike._partition import flatten, is_checking
from eqxlike._transforms._jit import _dispatch
from tests.partition.models import Empty, Pair, Point, flatten_cached
from tests.partition.statics import Holder, Named


def is_cached(module):
    """Whether a partition is cached on `module`."""
    return isinstance(get_cached(module), CachedPartition)


def assert_cached_is_fresh(module):
    cached = get_cached(module)
    dynamic, structure = cached.arrays, cached.structure
    arrays, fresh = flatten(jtu.tree_map(lambda leaf: leaf, module))
    assert structure is fresh
    assert [*map(id, dynamic)] == [*map(id, arrays)]


CACHED = {
    "nothing-in-it": Empty,
    "jax-array": lambda: Pair(jnp.ones(2)),
    "statics": lambda: Pair(1, "a"),
    "namedtuple": lambda: Pair(Point(jnp.ones(2), 1)),
    "module": lambda: Pair(Pair(jnp.ones(2)), Pair(Pair(None))),
    "static-field": lambda: Pair(jnp.ones(2), mode=("a", 1)),
    "object": lambda: Pair(Holder([1]), mode=Holder([1])),
    "bound-method": lambda: Pair(Calls(jnp.ones(2)).call),
    "containers-in-static-field": lambda: Pair(jnp.ones(2), mode={"a": [1, {2}], "b": Plain()}),
}
NOT_KEPT = {
    "list": lambda: Pair([jnp.ones(2)]),
    "dict": lambda: Pair({"a": jnp.ones(2)}),
    "list-in-tuple": lambda: Pair((1, Point([], 1))),
    "list-in-module": lambda: Pair(Pair(jnp.ones(2)), Pair([])),
    "partial": lambda: Pair(functools.partial(max, 1)),
    "own-hash": lambda: Pair(Named("a")),
    "own-hash-in-tuple-in-static-field": lambda: Pair(1, mode=(Named("a"),)),
    "partial-in-dict-in-static-field": lambda: Pair(1, mode={"a": functools.partial(max, 1)}),
}


class Plain:
    def __init__(self):
        self.value = [1]

    def __eq__(self, other):
        return True


class Calls(Module):
    weight: object

    def call(self, x):
        return self.weight * x


def test_partition_is_cached_if_nothing_inside_can_change():
    for make in CACHED.values():
        assert_cached_is_fresh(flatten_cached(make()))


def test_partition_is_not_cached_if_something_inside_can_change():
    assert [name for name in NOT_KEPT if is_cached(flatten_cached(NOT_KEPT[name]()))] == []


def test_partition_is_cached_on_modules_inside_and_next_to_a_list():
    for put in (lambda inner: Pair([inner, 1]), lambda inner: Pair([1], (inner,))):
        inner = Pair(jnp.ones(2))
        flatten(put(inner))
        assert_cached_is_fresh(inner)


def test_partition_is_cached_on_the_outermost_module_and_used_by_an_outer_module():
    inner = Pair(jnp.ones(2))
    flatten(Pair(inner))
    assert not is_cached(inner)
    flatten(inner)
    assert_cached_is_fresh(flatten_cached(Pair((inner, np.ones(3)), inner)))


COPIES = {
    "deepcopy": copy.deepcopy,
    "replace": lambda module: dataclasses.replace(module, left=module.left),
    "unflatten": lambda module: jtu.tree_unflatten(*reversed(jtu.tree_flatten(module))),
    "unflatten-without-leaves": lambda module: jtu.tree_structure(module).unflatten([None, None]),
}


def test_copy_has_no_partition_and_the_original_keeps_its_partition():
    for name, make_copy in COPIES.items():
        module = flatten_cached(Pair(np.ones(2), np.ones(3)))
        copied = make_copy(module)
        assert not is_cached(copied), name
        assert_cached_is_fresh(module)
        assert_cached_is_fresh(flatten_cached(copied))


def test_user_getattr_never_sees_the_slot():
    asked = []

    class Asks(Module):
        left: object

        def __getattr__(self, name):
            asked.append(name)
            raise AttributeError(name)

    flatten_cached(flatten_cached(Asks(jnp.ones(2))))
    filter_jit(lambda module: module.left)(Asks(jnp.ones(2)))
    assert [name for name in asked if "cached" in name] == []


TRACES = {
    "jit": lambda f: jax.jit(f)(jnp.ones(2)),
    "under-grad-of-jit": lambda f: jax.grad(filter_jit(f))(jnp.ones(2)),
}


@pytest.mark.parametrize("name", TRACES)
def test_partition_with_a_tracer_is_not_cached(name):
    modules = []

    @filter_jit
    def inner(module):
        modules.append(module)
        flatten(module)
        return module.right[0].sum()

    def function(x):
        module = Pair(jnp.ones(2), (x,))
        flatten(module)
        modules.append(module)
        return inner(module)

    TRACES[name](function)
    assert len(modules) > 1
    assert not any(map(is_cached, modules))


def test_output_with_a_tracer_is_not_cached():
    outputs, make = [], filter_jit(Pair)
    make(jnp.ones(2), jnp.ones(2))

    def function(x):
        outputs.append(make(jnp.ones(2), x))
        outputs.append(make(x, x))
        return outputs[0].right.sum() + outputs[1].left.sum()

    jax.grad(function)(jnp.ones(2))
    assert not any(map(is_cached, outputs))


def test_new_module_takes_the_fast_path_and_is_distinguished_by_its_statics(monkeypatch):
    jitted = filter_jit(lambda module: (module.left * 2, module.mode))

    def make(number, **kwargs):
        inner = Pair(jnp.array(number), (jnp.array(1.0), "text"))
        return Pair(jnp.array(number), inner, **kwargs)

    jitted(make(0.0))
    jitted(make(1.0, mode="b"))
    walks = []
    walk = _dispatch.flatten
    monkeypatch.setattr(_dispatch, "flatten", lambda *a, **k: walks.append(a) or walk(*a, **k))
    for number in (2.0, 3.0):
        assert jitted(make(number)) == (2 * number, "a")
        assert jitted(make(number, mode="b")) == (2 * number, "b")
    assert bool(walks) is is_checking()
    assert jitted(make(4.0, mode="c")) == (8, "c")
    assert walks


# --- under `checking_partitions` -----------------------------------------------------------------

EDITS = {
    "equal-static-leaf": lambda it: it.__dict__.update(right=1.0),
    "static-field": lambda it: it.__dict__.update(mode="b"),
    "to-another-type": lambda it: it.__dict__.update(left=[jnp.ones(2)]),
    "to-static": lambda it: object.__setattr__(it, "left", 1.0),
    "equal-array": lambda it: it.__dict__.update(left=it.left + 0),
}
WHERE = {
    "itself": lambda it: it,
    "in-a-list": lambda it: [1, it],
    "in-a-module-with-a-list": lambda it: Pair([], it),
}


def assert_edit_is_found(function, *args):
    with checking_partitions(), pytest.raises(PartitionError, match="Pair was changed"):
        function(*args)


def test_checking_finds_an_edit():
    for edit in EDITS.values():
        for put in WHERE.values():
            module = flatten_cached(Pair(jnp.ones(2), 1))
            tree = put(module)
            edit(module)
            assert_edit_is_found(flatten, tree)
        inner = Pair(jnp.ones(2), 1)
        outer = flatten_cached(Pair((inner, "b")))
        edit(inner)
        assert_edit_is_found(flatten, outer)


def test_checking_finds_an_edit_of_a_returned_module():
    make, read = filter_jit(lambda x: Pair(x, 1)), filter_jit(lambda module: module.left)
    make(jnp.ones(2))
    for edit in EDITS.values():
        module = make(jnp.ones(2))
        edit(module)
        assert_edit_is_found(read, module)


def test_checking_finds_an_edit_in_a_warm_call_and_leaves_the_output_unchanged():
    function = filter_jit(lambda module: (module.right, module.left * 2))
    pair = Pair(jnp.ones(2), (1, "a"))
    function(pair)
    function(pair)
    with checking_partitions():
        right, left = function(pair)
    assert (right, left.tolist()) == ((1, "a"), [2, 2])
    pair.__dict__["left"] = jnp.zeros(2)
    assert_edit_is_found(function, pair)


def test_checking_accepts_unchanged_modules():
    module = flatten_cached(Pair(jnp.ones(2), np.zeros(2)))
    module.right.fill(1)
    copied = copy.copy(module)
    copied.__dict__["left"] = np.ones(3)
    with checking_partitions():
        assert [*map(id, flatten(module)[0])] == [id(module.left), id(module.right)]
        assert flatten(copied)[0][0].shape == (3,)


def test_checking_accepts_a_change_of_a_container_in_a_static_field():
    # Equal Modules share the Structure of the first Module.
    first, module = [flatten_cached(Pair(jnp.ones(2), mode={"a": [1]})) for _ in range(2)]
    with checking_partitions():
        first.mode["a"].append(2)
        structures = [flatten(each)[1] for each in (first, module, module)]
        assert structures[0] is not structures[1] is structures[2]
        module.mode["a"].append(2)
        assert flatten(module)[1] is structures[0]


def test_checking_ends_with_its_context(monkeypatch):
    monkeypatch.setattr("eqxlike._partition._flatten._depth", 0)
    module = flatten_cached(Pair(jnp.ones(2)))
    with checking_partitions():
        pass
    module.__dict__["left"] = jnp.zeros(2)
    assert flatten(module)[0][0] is not module.left
