"""What is used once is not held: closures, models and wrappers die, and tables stay bounded."""

import collections
import functools
import gc
import linecache
import weakref

import jax
import jax.numpy as jnp
import pytest

from eqxlike import (
    Module,
    clear_caches,
    field,
    filter_grad,
    filter_jit,
    filter_value_and_grad,
    filter_vmap,
)
from eqxlike._codegen import forget_sources
from eqxlike._partition import num_interned

MANY = 10_000
# Each compiles.
SOME = 10


class Pair(Module):
    left: object
    right: object = None
    mode: object = field(static=True, default="a")


class Calls(Module):
    weight: object
    function: object

    def __call__(self, x):
        return self.function(self.weight * x)


def collect():
    """Collects garbage, what became garbage by that, and sources that wait to be forgotten."""
    for _ in range(3):
        gc.collect()
    forget_sources()


def make_closure():
    """A function that holds an array, and dies with it."""
    held = jnp.ones(3)
    return lambda x: (held * x).sum()


def identity(x):
    return x


@filter_jit
def apply(function, x):
    return function(x)


@filter_jit
def call_model(model, x):
    return model(x)


def with_default(closure):
    def function(x, closure=closure):
        return closure(x)

    return function


def with_attribute(closure):
    def function(x):
        return closure(x)

    function.itself = function
    return function


def returns_itself(closure):
    def function(x):
        return closure(x), function

    return function


USES = {
    "wrapped": lambda closure, x: filter_jit(closure)(x),
    "wrapped-and-donated": lambda closure, x: filter_jit(closure, donate="all")(x + 1),
    "wrapped-and-lowered": lambda closure, x: filter_jit(closure).lower(x),
    "wrapped-and-compiled": lambda closure, x: filter_jit(closure).lower(x).compile()(x),
    "wrapped-twice": lambda closure, x: filter_jit(filter_jit(closure))(x),
    "wrapped-grad": lambda closure, x: filter_jit(filter_grad(closure))(x),
    "wrapped-value-and-grad": lambda closure, x: filter_jit(filter_value_and_grad(closure))(x),
    "wrapped-vmap": lambda closure, x: filter_jit(filter_vmap(closure))(x),
    "wrapped-jax-grad": lambda closure, x: filter_jit(jax.grad(closure))(x),
    "wrapped-jax-jit": lambda closure, x: filter_jit(jax.jit(closure))(x),
    "under-jax-jit": lambda closure, x: jax.jit(filter_jit(closure))(x),
    "under-jax-vmap": lambda closure, x: jax.vmap(filter_jit(closure))(x),
    "argument": lambda closure, x: apply(closure, x),
    "keyword-argument": lambda closure, x: apply(x=x, function=closure),
    "leaf-of-a-module": lambda closure, x: call_model(Calls(x, closure), x),
    "leaf-of-a-wrapped-module": lambda closure, x: filter_jit(Calls(x, closure))(x),
    "static-field": lambda closure, x: filter_jit(lambda pair: pair.left)(Pair(x, mode=closure)),
    "default": lambda closure, x: filter_jit(with_default(closure))(x),
    "function-in-a-cycle": lambda closure, x: filter_jit(with_attribute(closure))(x),
    "function-that-returns-itself": lambda closure, x: filter_jit(returns_itself(closure))(x),
    "function-given-itself": lambda closure, x: filter_jit(lambda f, x: closure(x))(closure, x),
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


def use_once(name, number):
    """Weak references to closures that were used and dropped."""
    x = jnp.ones(3)
    references = []
    for _ in range(number):
        closure = make_closure()
        references.append(weakref.ref(closure))
        USES[name](closure, x)
        del closure
    return references


@pytest.mark.parametrize("name", USES)
def test_closure_dies_after_its_use(name):
    references = use_once(name, 2)
    collect()
    assert [reference() for reference in references] == [None] * 2


# JAX itself holds what a trace that failed computed with.
@pytest.mark.parametrize("name", [name for name in USES if name != "failed"])
def test_arrays_are_as_many_as_before_after_the_use_of_closures(name):
    use_once(name, 1)
    collect()
    before = len(jax.live_arrays())
    use_once(name, 2)
    collect()
    assert len(jax.live_arrays()) == before


@pytest.mark.parametrize(
    "name", ["wrapped-grad", "argument", "leaf-of-a-module", "function-that-returns-itself"]
)
def test_closure_dies_after_clear_caches(name):
    references = use_once(name, 1)
    clear_caches()
    collect()
    assert [reference() for reference in references] == [None]


# Many of each. Where each would compile, `disable_jit` runs the function itself, with everything
# around it as ever.


def growth(make, number=MANY):
    """How many more objects there are after `number` rounds than after a tenth of them."""
    for _ in range(number // 10):
        make()
    collect()
    before = len(gc.get_objects())
    for _ in range(number - number // 10):
        make()
    collect()
    return len(gc.get_objects()) - before


def test_10_000_wrappers_of_one_function_leave_nothing():
    assert growth(lambda: filter_jit(identity)) < 100


def test_10_000_wrappers_of_closures_leave_nothing():
    assert growth(lambda: filter_jit(make_closure())) < 100


def test_10_000_models_passed_to_one_function_leave_nothing():
    function = filter_jit(lambda pair: pair.left)
    x = jnp.ones(2)
    assert growth(lambda: function(Pair(x, (x, "a")))) < 100


def test_10_000_models_returned_by_one_function_leave_nothing():
    function = filter_jit(lambda x: Pair(x, (x, "a")))
    x = jnp.ones(2)
    assert growth(lambda: function(x)) < 100


def test_10_000_models_with_lists_leave_nothing():
    function = filter_jit(lambda pair: pair)
    x = jnp.ones(2)
    assert growth(lambda: function(Pair([x], {"a": "b"}))) < 100


def test_10_000_wrapped_models_leave_nothing():
    x = jnp.ones(2)
    assert growth(lambda: filter_jit(Calls(x, jnp.sum))(x)) < 100


def test_states_of_one_partial_are_bounded(monkeypatch):
    monkeypatch.setattr("eqxlike._transforms._jit._cache._MAX_CACHED", 8)
    partial = functools.partial(max, key=0)
    function = filter_jit(lambda partial: partial.keywords["key"])

    def step():
        partial.keywords["key"] += 1
        assert function(partial) == partial.keywords["key"]

    with jax.disable_jit():
        assert growth(step, 500) < 2_000


def test_2_000_closures_wrapped_and_called_leave_nothing():
    x = jnp.ones(3)
    with jax.disable_jit():
        assert growth(lambda: filter_jit(lambda x: x)(x), 2_000) < 100


def test_2_000_closures_as_arguments_leave_nothing():
    function = filter_jit(lambda closure, x: x)
    x = jnp.ones(3)
    with jax.disable_jit():
        assert growth(lambda: function(lambda: x, x), 2_000) < 100


def test_2_000_models_with_closures_leave_nothing():
    function = filter_jit(lambda model, x: x)
    x = jnp.ones(3)
    with jax.disable_jit():
        assert growth(lambda: function(Calls(x, lambda x: x), x), 2_000) < 100


def test_1_000_functions_that_failed_leave_nothing():
    def fail():
        def function(x):
            raise ValueError("told to fail")

        with pytest.raises(ValueError, match="told to fail"):
            filter_jit(function)("a")

    with jax.disable_jit():
        assert growth(fail, 1_000) < 100


@pytest.mark.parametrize("donate", ["none", "all"])
def test_functions_that_were_compiled_leave_no_structures(donate):
    def use():
        filter_jit(lambda x: Pair(x + 1, mode=object()), donate=donate)(jnp.ones(2))

    use()
    collect()
    before = num_interned()
    for _ in range(SOME):
        use()
    collect()
    assert num_interned() == before


def test_functions_that_were_compiled_leave_no_source():
    def use():
        filter_jit(lambda pair: (pair, 1))(Pair(jnp.ones(2)))

    use()
    collect()
    before = len(linecache.cache)
    for _ in range(SOME):
        use()
    collect()
    forget_sources()
    # `linecache` itself may note files of the standard library.
    assert len([name for name in linecache.cache if name.startswith("<eqxlike")]) <= before


def test_models_that_were_dropped_die_at_once():
    function = filter_jit(lambda pair: Pair(pair.left, pair))
    references = []
    for _ in range(3):
        model = function(Pair(jnp.ones(2)))
        references += [weakref.ref(model), weakref.ref(model.left)]
        del model
    # Not by the collector: nothing is in a cycle.
    assert [reference() for reference in references] == [None] * 6


def test_arguments_are_not_held_by_the_last_call():
    function = filter_jit(lambda pair: None)
    model, array = Pair(jnp.ones(2)), jnp.ones(3)
    references = [weakref.ref(model), weakref.ref(array), weakref.ref(model.left)]
    function(model)
    function(Pair(array))
    del model, array
    assert [reference() for reference in references] == [None] * 3


def test_partition_kept_on_a_module_holds_only_its_own_arrays():
    model = filter_jit(lambda x, y: (Pair(x), Pair(y)))(jnp.ones(2), jnp.ones(3))
    first, second = model
    reference = weakref.ref(second.left)
    del model, second
    assert reference() is None
    assert first.left.shape == (2,)


def test_entries_are_bounded(monkeypatch):
    monkeypatch.setattr("eqxlike._transforms._jit._cache._MAX_CACHED", 4)
    monkeypatch.setattr("eqxlike._transforms._jit._dispatcher._MAX_RECENT", 2)

    class Named:
        pass

    function = filter_jit(lambda name: None)
    names = [Named() for _ in range(30)]
    references = [weakref.ref(name) for name in names]
    for name in names:
        function(name)
    del names, name
    collect()
    assert sum(reference() is not None for reference in references) <= 4 + 2


def test_entries_are_bounded_whatever_the_names_of_the_arguments(monkeypatch):
    monkeypatch.setattr("eqxlike._transforms._jit._cache._MAX_CACHED", 4)
    monkeypatch.setattr("eqxlike._transforms._jit._dispatcher._MAX_RECENT", 2)

    class Named:
        pass

    function = filter_jit(lambda **named: None)
    names = [Named() for _ in range(30)]
    references = [weakref.ref(name) for name in names]
    for index, name in enumerate(names):
        function(**{f"name{index}": name})
    del names, name
    collect()
    assert sum(reference() is not None for reference in references) <= 4 + 2


def test_clear_caches_empties_all():
    class Named:
        pass

    function = filter_jit(lambda name, x: x)
    name = Named()
    reference = weakref.ref(name)
    for _ in range(3):
        function(name, jnp.ones(2))
    del name
    clear_caches()
    collect()
    assert reference() is None


def test_objects_of_compiled_methods_die_after_clear_caches():
    class Trainer:
        def loss(self, x):
            return 2 * x

    trainers = [Trainer() for _ in range(2)]
    references = [weakref.ref(trainer) for trainer in trainers]
    for trainer in trainers:
        filter_jit(trainer.loss)(jnp.ones(2))
    del trainers, trainer
    clear_caches()
    collect()
    assert [reference() for reference in references] == [None] * 2


def test_tables_hold_no_class_of_objects_that_were_used_once():
    counts = collections.Counter()

    def use():
        class Named:
            pass

        counts["all"] += 1
        weakref.finalize(Named, counts.update, ["died"])
        filter_jit(lambda name: None)(Named())

    for _ in range(5):
        use()
    collect()
    assert counts["died"] == counts["all"]
