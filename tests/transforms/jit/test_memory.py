"""Closures, models and wrappers are freed after use, and caches are bounded."""

import gc
import linecache
import weakref

import jax
import jax.numpy as jnp
import pytest

from eqxlike import Module, clear_caches, filter_grad, filter_jit
from eqxlike._partition import num_interned
from eqxlike._traceback import forget_sources
from tests.partition.models import Pair


class Calls(Module):
    weight: object
    function: object

    def __call__(self, x):
        return self.function(self.weight * x)


def collect():
    """Collects all garbage, and deletes the sources of deleted functions."""
    for _ in range(3):
        gc.collect()
    forget_sources()


def make_closure():
    """A closure over an array. Nothing else refers to the array."""
    held = jnp.ones(3)
    return lambda x: (held * x).sum()


@filter_jit
def apply(function, x):
    return function(x)


def with_attribute(closure):
    def function(x):
        return closure(x)

    function.itself = function
    return function


def returns_itself(closure):
    def function(x):
        return closure(x), function

    return function


def of_class(closure):
    """An instance of a local class. Nothing else refers to the class."""
    return type("Local", (), {"__call__": lambda self, x: closure(x)})()


USES = {
    "instance-of-a-class": lambda closure, x: filter_jit(of_class(closure))(x),
    "method-of-a-class": lambda closure, x: filter_jit(of_class(closure).__call__)(x),
    "argument-of-a-class": lambda closure, x: filter_jit(lambda it: None)(of_class(closure)),
    "wrapped": lambda closure, x: filter_jit(closure)(x),
    "wrapped-and-donated": lambda closure, x: filter_jit(closure, donate="all")(x + 1),
    "wrapped-and-compiled": lambda closure, x: filter_jit(closure).lower(x).compile()(x),
    "wrapped-grad": lambda closure, x: filter_jit(filter_grad(closure))(x),
    "wrapped-jax-jit": lambda closure, x: filter_jit(jax.jit(closure))(x),
    "under-jax-jit": lambda closure, x: jax.jit(filter_jit(closure))(x),
    "argument": lambda closure, x: apply(closure, x),
    "leaf-of-a-module": lambda closure, x: apply(Calls(x, closure), x),
    "static-field": lambda closure, x: filter_jit(lambda pair: pair.left)(Pair(x, mode=closure)),
    "default": lambda closure, x: filter_jit(lambda x, closure=closure: closure(x))(x),
    "function-in-a-cycle": lambda closure, x: filter_jit(with_attribute(closure))(x),
    "function-that-returns-itself": lambda closure, x: filter_jit(returns_itself(closure))(x),
    "method-of-a-module": lambda closure, x: filter_jit(Calls(x, closure).__call__)(x),
    "returned": lambda closure, x: filter_jit(lambda x: Pair(x, closure))(x),
    "bound-by-partial": lambda closure, x: filter_jit(jax.tree_util.Partial(closure))(x),
    "failed": lambda closure, x: fail_with(closure, x),
    "called-warm": lambda closure, x: [call(x) for call in [filter_jit(closure)] * 3],
}


def fail_with(closure, x):
    def function(x):
        closure(x)
        raise ValueError("told to fail")

    with pytest.raises(ValueError, match="told to fail"):
        filter_jit(function)(x)


def use_once(name):
    """Uses a closure and returns a weak reference to it."""
    closure = make_closure()
    USES[name](closure, jnp.ones(3))
    return weakref.ref(closure)


def test_closures_and_their_arrays_are_freed_after_use():
    use_once("wrapped")
    collect()
    before = len(jax.live_arrays())
    references = {name: use_once(name) for name in USES if name != "failed"}
    collect()
    assert [name for name, reference in references.items() if reference() is not None] == []
    assert len(jax.live_arrays()) == before
    # JAX itself keeps the arrays of a failed trace alive.
    reference = use_once("failed")
    collect()
    assert reference() is None


def test_many_wrappers_models_and_closures_are_freed():
    x = jnp.ones(2)
    first, same = filter_jit(lambda pair: pair.left), filter_jit(lambda pair: pair)
    call, ignore = filter_jit(lambda closure, x: x), filter_jit(lambda model, x: x)

    def use():
        filter_jit(make_closure())
        filter_jit(Calls(x, jnp.sum))(x)
        filter_jit(lambda x: x)(x)
        first(Pair(x, (x, "a")))
        same(Pair([x], {"a": "b"}))
        call(lambda: x, x)
        ignore(Calls(x, lambda x: x), x)
        fail_with(lambda x: x, x)

    def count(number):
        for _ in range(number):
            use()
        collect()
        return len(gc.get_objects())

    # Without `jit`, no call compiles. Everything else is unchanged.
    with jax.disable_jit():
        before = count(20)
        assert count(60) - before < 40


def test_structures_and_source_of_deleted_functions_are_freed():
    def use():
        filter_jit(lambda x: (Pair(x + 1, mode=object()), 1), donate="all")(jnp.ones(2))

    def left():
        collect()
        # `linecache` may also contain files of the standard library.
        sources = [name for name in linecache.cache if name.startswith("<eqxlike")]
        return num_interned(), len(sources)

    use()
    before = left()
    for _ in range(3):
        use()
    assert left() == before


def test_models_and_arguments_are_freed_without_garbage_collection():
    function = filter_jit(lambda pair: Pair(pair.left, pair))
    references = []
    for _ in range(3):
        model = function(Pair(jnp.ones(2)))
        references += [weakref.ref(model), weakref.ref(model.left)]
        del model
    assert [reference() for reference in references] == [None] * 6
    function = filter_jit(lambda pair: None)
    model, array = Pair(jnp.ones(2)), jnp.ones(3)
    references = [weakref.ref(each) for each in (model, array, model.left)]
    function(model)
    function(Pair(array))
    del model, array
    assert [reference() for reference in references] == [None] * 3


def test_cache_is_bounded_for_any_names_of_arguments(monkeypatch):
    monkeypatch.setattr("eqxlike._transforms._jit._dispatch._MAX_CACHED", 4)
    monkeypatch.setattr("eqxlike._transforms._jit._dispatch._MAX_RECENT", 2)

    class Named:
        pass

    for is_named in (False, True):
        function = filter_jit(lambda **named: None)
        names = [Named() for _ in range(8)]
        references = [weakref.ref(name) for name in names]
        for index, name in enumerate(names):
            function(**{f"name{index * is_named}": name})
        del names, name
        collect()
        assert sum(reference() is not None for reference in references) <= 4 + 2


def test_clear_caches_drops_the_programs_of_a_closure():
    traces = []

    @filter_jit
    def call(function, x):
        traces.append(None)
        return function(x)

    def double(x):
        return 2 * x

    for num_traces in (1, 2):
        call(double, jnp.ones(2))
        call(double, jnp.ones(2))
        assert len(traces) == num_traces
        clear_caches()


def test_clear_caches_frees_arguments_and_objects_of_compiled_methods():
    class Named:
        def loss(self, x):
            return 2 * x

    function = filter_jit(lambda name, x: x)
    named = [Named() for _ in range(2)]
    references = [weakref.ref(each) for each in named]
    for _ in range(3):
        function(named[0], jnp.ones(2))
    filter_jit(named[1].loss)(jnp.ones(2))
    del named
    clear_caches()
    collect()
    assert [reference() for reference in references] == [None] * 2
