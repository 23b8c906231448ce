"""What is cached on a Module, and for how long."""

import collections
import copy
import dataclasses
import functools
import pickle
import threading

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

from eqxlike import (
    Module,
    checking_partitions,
    field,
    filter_eval_shape,
    filter_jit,
    tree_at,
)
from eqxlike._checking import is_checking
from eqxlike._module import CachedPartition, get_cached
from eqxlike._partition import flatten
from eqxlike._transforms._jit import _dispatcher
from tests.partition.models import Pair, Point, flatten_cached
from tests.partition.statics import Holder, Named


class Empty(Module):
    pass


def is_cached(module):
    """Whether a partition is cached on `module`."""
    return isinstance(get_cached(module), CachedPartition)


def assert_cached_is_fresh(module):
    cached = get_cached(module)
    dynamic, structure = cached.arrays, cached.structure
    arrays, fresh = flatten(jtu.tree_map(lambda leaf: leaf, module))
    assert structure is fresh
    assert [*map(id, dynamic)] == [*map(id, arrays)]


# What is cached.

CACHED = {
    "nothing-in-it": Empty,
    "jax-array": lambda: Pair(jnp.ones(2)),
    "key": lambda: Pair(jax.random.key(0)),
    "numpy-array": lambda: Pair(np.ones(2)),
    "numpy-scalar": lambda: Pair(np.float32(1)),
    "statics": lambda: Pair(1, "a"),
    "function": lambda: Pair(jnp.sin, lambda: 1),
    "tuple": lambda: Pair((jnp.ones(2), None, ())),
    "namedtuple": lambda: Pair(Point(jnp.ones(2), 1)),
    "module": lambda: Pair(Pair(jnp.ones(2)), Pair(Pair(None))),
    "static-field": lambda: Pair(jnp.ones(2), mode=("a", 1)),
    "object": lambda: Pair(Holder([1]), mode=Holder([1])),
    "method-of-an-object": lambda: Pair(Holder([1]).get),
    "bound-method": lambda: Pair(Calls(jnp.ones(2)).call),
}
NOT_KEPT = {
    "list": lambda: Pair([jnp.ones(2)]),
    "empty-list": lambda: Pair([]),
    "dict": lambda: Pair({"a": jnp.ones(2)}),
    "ordered-dict": lambda: Pair(collections.OrderedDict(a=jnp.ones(2))),
    "default-dict": lambda: Pair(collections.defaultdict(int, a=jnp.ones(2))),
    "list-in-tuple": lambda: Pair((1, Point([], 1))),
    "list-in-module": lambda: Pair(Pair(jnp.ones(2)), Pair([])),
    "partial": lambda: Pair(functools.partial(max, 1)),
    "own-hash": lambda: Pair(Named("a")),
    "own-hash-in-static-field": lambda: Pair(1, mode=Named("a")),
    "own-hash-in-tuple-in-static-field": lambda: Pair(1, mode=(Named("a"),)),
}


class Calls(Module):
    weight: object

    def call(self, x):
        return self.weight * x


@pytest.mark.parametrize("name", CACHED)
def test_partition_is_kept_where_nothing_inside_can_change(name):
    module = flatten_cached(CACHED[name]())
    assert_cached_is_fresh(module)


@pytest.mark.parametrize("name", NOT_KEPT)
def test_partition_is_not_kept_where_something_inside_can_change(name):
    assert not is_cached(flatten_cached(NOT_KEPT[name]()))


def test_partition_is_not_kept_over_a_node_that_somebody_registered():
    class Foreign:
        def __init__(self, value):
            self.value = value

    jtu.register_pytree_node(Foreign, lambda it: ((it.value,), None), lambda _, ch: Foreign(*ch))
    assert not is_cached(flatten_cached(Pair(Foreign(jnp.ones(2)))))


def test_partition_is_kept_on_modules_below_a_list():
    inner = Pair(jnp.ones(2))
    flatten(Pair([inner, 1]))
    assert_cached_is_fresh(inner)


def test_partition_is_kept_on_modules_beside_a_list():
    inner = Pair(jnp.ones(2))
    flatten(Pair([1], (inner,)))
    assert_cached_is_fresh(inner)


def test_partition_is_kept_on_the_outermost_module_alone():
    inner = Pair(jnp.ones(2))
    flatten(Pair(inner))
    assert not is_cached(inner)


def test_partition_kept_on_an_inner_module_serves_the_outer_one():
    inner = flatten_cached(Pair(jnp.ones(2)))
    outer = flatten_cached(Pair((inner, np.ones(3)), inner))
    assert_cached_is_fresh(outer)


def test_module_without_all_fields_gives_the_arrays_it_has():
    module = object.__new__(Pair)
    module.__dict__["right"] = jnp.ones(2)
    assert flatten(module)[0] == [module.right]


def test_nothing_is_kept_while_init_runs():
    class Grows(Module):
        left: object
        right: object

        def __init__(self):
            self.left = jnp.ones(2)
            flatten(self)
            self.right = jnp.ones(3)
            flatten(self)
            self.left = jnp.ones(4)

    assert [array.size for array in flatten(Grows())[0]] == [4, 3]


# What drops it.

COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "replace": lambda module: dataclasses.replace(module, left=module.left),
    "replace-static": lambda module: dataclasses.replace(module, mode="b"),
    "unflatten": lambda module: jtu.tree_unflatten(*reversed(jtu.tree_flatten(module))),
    "tree_map": lambda module: jtu.tree_map(lambda leaf: leaf, module),
    "tree_at": lambda module: tree_at(lambda it: it.left, module, module.left),
    "unflatten-without-leaves": lambda module: jtu.tree_structure(module).unflatten([None, None]),
}


@pytest.mark.parametrize("name", COPIES)
def test_partition_is_dropped_by(name):
    module = flatten_cached(Pair(np.ones(2), np.ones(3)))
    assert not is_cached(COPIES[name](module))


@pytest.mark.parametrize("name", COPIES)
def test_partition_of_the_original_stays_through(name):
    module = flatten_cached(Pair(np.ones(2), np.ones(3)))
    COPIES[name](module)
    assert_cached_is_fresh(module)


@pytest.mark.parametrize("name", COPIES)
def test_partition_made_anew_is_right_after(name):
    module = flatten_cached(Pair(np.ones(2), np.ones(3)))
    assert_cached_is_fresh(flatten_cached(COPIES[name](module)))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_partition_is_in_no_pickle(protocol):
    module = Pair(1, "a")
    before = pickle.dumps(module, protocol)
    assert pickle.dumps(flatten_cached(module), protocol) == before


def test_partition_is_invisible():
    module = Pair(jnp.ones(2))
    before = dir(module), {**vars(module)}, repr(module), dataclasses.asdict(Pair(1))
    flatten_cached(module)
    assert (dir(module), {**vars(module)}, repr(module), dataclasses.asdict(Pair(1))) == before


def test_getattr_of_a_user_does_not_see_the_slot():
    asked = []

    class Asks(Module):
        left: object

        def __getattr__(self, name):
            asked.append(name)
            raise AttributeError(name)

    flatten_cached(flatten_cached(Asks(jnp.ones(2))))
    filter_jit(lambda module: module.left)(Asks(jnp.ones(2)))
    assert [name for name in asked if "cached" in name] == []


# It never holds tracers.

TRACES = {
    "jit": lambda f: jax.jit(f)(jnp.ones(2)),
    "filter_jit": lambda f: filter_jit(f)(jnp.ones(2)),
    "grad": lambda f: jax.grad(f)(jnp.ones(2)),
    "jvp": lambda f: jax.jvp(f, (jnp.ones(2),), (jnp.ones(2),)),
    "vmap": lambda f: jax.vmap(f)(jnp.ones((3, 2))),
    "eval_shape": lambda f: filter_eval_shape(f, jnp.ones(2)),
    "scan": lambda f: jax.lax.scan(lambda c, x: (c + f(x), None), 0.0, jnp.ones((3, 2))),
    "under-grad-of-jit": lambda f: jax.grad(filter_jit(f))(jnp.ones(2)),
}


@pytest.mark.parametrize("name", TRACES)
def test_partition_with_a_tracer_is_not_kept(name):
    modules = []

    def function(x):
        module = Pair(jnp.ones(2), (x,))
        filter_jit(lambda module: module.right[0])(module)
        flatten(module)
        modules.append(module)
        return x.sum()

    TRACES[name](function)
    assert modules
    assert not any(map(is_cached, modules))


@pytest.mark.parametrize("name", TRACES)
def test_argument_of_a_traced_function_keeps_no_tracer(name):
    seen = []

    @filter_jit
    def inner(module):
        seen.append(module)
        flatten(module)
        return module.left.sum()

    TRACES[name](lambda x: inner(Pair(x)))
    assert seen
    assert not any(map(is_cached, seen))


def test_output_that_is_a_tracer_is_not_kept():
    outputs = []

    def function(x):
        outputs.append(filter_jit(Pair)(x))
        return outputs[-1].left.sum()

    jax.grad(function)(jnp.ones(2))
    assert not is_cached(outputs[0])


def test_output_that_is_partly_a_tracer_is_not_kept():
    outputs = []
    make = filter_jit(lambda x, y: Pair(x, y))
    make(jnp.ones(2), jnp.ones(2))

    def function(x):
        outputs.append(make(jnp.ones(2), x))
        return outputs[-1].right.sum()

    jax.grad(function)(jnp.ones(2))
    assert not is_cached(outputs[0])


def test_constant_module_met_inside_a_trace_keeps_its_own_arrays():
    constant = Pair(jnp.ones(2))
    jax.jit(lambda x: x * flatten_cached(constant).left)(jnp.ones(2))
    assert_cached_is_fresh(constant)


def test_threads_that_flatten_at_once_keep_one_right_partition():
    for _ in range(20):
        module = Pair((jnp.ones(2), Pair(np.ones(2))))
        start = threading.Barrier(8)

        def walk(module=module, start=start):
            start.wait()
            flatten(module)

        threads = [threading.Thread(target=walk) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert_cached_is_fresh(module)


class Anew(Module):
    left: object
    right: object = None
    mode: str = field(static=True, default="a")


def test_module_made_anew_for_each_call_takes_the_fast_path_and_is_told_apart(monkeypatch):
    jitted = filter_jit(lambda module: (module.left * 2, module.mode))

    def make(number, **kwargs):
        inner = Anew(jnp.array(number), (jnp.array(1.0), "text"))
        return Anew(jnp.array(number), inner, **kwargs)

    jitted(make(0.0))
    jitted(make(1.0, mode="b"))
    walks = []
    walk = _dispatcher.flatten
    monkeypatch.setattr(_dispatcher, "flatten", lambda *a, **k: walks.append(a) or walk(*a, **k))
    for number in (2.0, 3.0):
        assert jitted(make(number)) == (2 * number, "a")
        assert jitted(make(number, mode="b")) == (2 * number, "b")
    assert bool(walks) is is_checking()
    assert jitted(make(4.0, mode="c")) == (8, "c")
    assert walks


def test_partition_kept_by_the_fast_path_is_that_of_the_walk():
    jitted = filter_jit(lambda module: module.left)
    x = jnp.ones(2)
    jitted(Anew(x, Anew(x)))
    module = Anew(x, Anew(x))
    jitted(module)
    cached = get_cached(module)
    arrays, structure = cached.arrays, cached.structure
    with checking_partitions():
        found, again = flatten(module)
    assert structure is again
    assert [*map(id, arrays)] == [*map(id, found)]
