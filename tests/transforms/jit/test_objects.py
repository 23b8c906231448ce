"""A function sees the very objects that it is passed, and a caller gets those it returned."""

import dataclasses
import functools
import gc
import sys
import threading
import warnings
import weakref
from unittest import mock

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxlike as eqx
from eqxlike import Module, field, filter_jit
from eqxlike._partition import flatten, num_interned


@dataclasses.dataclass(frozen=True)
class Config:
    size: int
    name: str = dataclasses.field(default="", compare=False)


@dataclasses.dataclass(unsafe_hash=True)
class Settings:
    size: int


class Configured(Module):
    config: Config = field(static=True)


def test_function_sees_its_own_argument_and_its_output_where_another_had_an_equal_one():
    for wrap in (lambda config: config, lambda config: Configured(config)):
        mine = wrap(Config(1, "first"))
        filter_jit(lambda it: 0)(mine)
        seen = filter_jit(lambda it: getattr(it, "config", it).name)(wrap(Config(1, "second")))
        assert seen == "second"
        returned = filter_jit(lambda wrap=wrap: wrap(Config(1, "theirs")))()
        assert getattr(returned, "config", returned).name == "theirs"


def test_change_of_a_returned_object_is_no_change_of_an_equal_one():
    mine = Settings(3)
    filter_jit(lambda it: 0)(mine)
    filter_jit(lambda: Settings(3))().size = 100
    assert mine.size == 3


def test_object_that_changed_is_not_given_back_for_an_equal_one():
    jitted = filter_jit(lambda it: it)
    first, second = Settings(4), Settings(4)
    jitted(first)
    first.size = 5
    assert jitted(second).size == 4


def test_call_replaced_in_its_class_is_the_one_that_is_traced():
    class Model:
        def __call__(self, x):
            return 2 * x

    jitted = filter_jit(Model())
    assert jitted(1.0) == 2
    Model.__call__ = lambda self, x: 5 * x
    assert jitted(jnp.ones(())) == 5
    Model.__call__ = lambda self, x, y: x + y
    assert jitted(1.0, 2.0) == 3


def test_partial_with_a_call_of_its_own_is_called_by_it():
    for base in (functools.partial, jax.tree_util.Partial):

        class Hundredfold(base):
            def __call__(self, *args):
                return 100 * super().__call__(*args)

        assert filter_jit(Hundredfold(lambda x, y: x * y, 2.0))(3.0) == 600


def test_object_that_only_says_it_is_a_module_is_static():
    pretender = mock.Mock(spec=Module)
    assert filter_jit(lambda x, it: it is pretender)(jnp.ones(()), pretender)


def test_tuple_with_an_iteration_of_its_own_is_compared_by_what_it_holds():
    class Hidden(tuple):
        def __iter__(self):
            return iter(())

    @filter_jit
    def first(x, hidden):
        return x * tuple.__getitem__(hidden, 0)

    assert [first(1.0, Hidden((number,))) for number in (2, 3, 2)] == [2, 3, 2]


@pytest.mark.usefixtures("compiles_alone")
def test_equality_that_calls_a_filtered_function_does_not_wait_for_itself():
    @filter_jit
    def equal(pair):
        return pair["first"] == pair["second"]

    class Asking:
        def __init__(self, number):
            self.number = number

        def __eq__(self, other):
            return bool(equal({"first": self.number, "second": other.number}))

        def __hash__(self):
            return 0

    results = []
    thread = threading.Thread(
        target=lambda: results.extend(
            filter_jit(lambda it: it.number)(Asking(number)) for number in (1, 2, 1)
        ),
        daemon=True,
    )
    thread.start()
    thread.join(60)
    assert results == [1, 2, 1]


def test_garbage_collection_asks_no_equality():
    # If it calls JAX while jaxlib takes a traceback, jaxlib frees code that is in use.
    asked_by = []

    class Asking:
        def __init__(self, number):
            self.number = number

        def __eq__(self, other):
            asked_by.append(is_collecting)
            return self.number == other.number

        def __hash__(self):
            return 0

    is_collecting = False
    before = num_interned()
    for numbers in ((1, 2, 3), (3, 1)):
        structures = [flatten(Asking(number))[1] for number in numbers]
        assert len(set(structures)) == len(numbers)
        is_collecting = True
        del structures
        gc.collect()
        is_collecting = False
        assert num_interned() <= before
    assert set(asked_by) == {False}


def test_flattening_inside_interning_does_not_wait_for_itself():
    done = []

    class Static:
        def __hash__(self):
            return 1

        def __eq__(self, other):
            # As garbage collection may, anywhere.
            flatten(("inner", len(done)))
            done.append(None)
            return True

    thread = threading.Thread(target=lambda: [flatten(Static()) for _ in range(3)], daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert done


@pytest.mark.usefixtures("compiles_alone")
def test_donation_in_many_threads_leaves_no_filter_of_warnings():
    before = list(warnings.filters)
    all_trace = threading.Barrier(4, timeout=60)

    def use():
        @filter_jit(donate="all")
        def traced(x):
            all_trace.wait()
            return x.sum()

        traced(jnp.ones(2))

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not all_trace.broken
    assert list(warnings.filters) == before


def test_class_dies_whose_instances_were_called():
    def use():
        class Local:
            def __call__(self, x):
                return x

            def method(self, x):
                return x

        instance = Local()
        filter_jit(instance)(jnp.ones(()))
        filter_jit(instance.method)(jnp.ones(()))
        return weakref.ref(Local)

    references = [use() for _ in range(3)]
    for _ in range(3):
        gc.collect()
    assert [reference() for reference in references] == [None] * 3


# --- methods of objects that are no Modules: bound methods are hashable whatever they are bound to


@dataclasses.dataclass(frozen=True)
class Frozen:
    """Hashable to look at, but not with an array in it."""

    scale: object

    def loss(self, x):
        return jnp.sum(x * self.scale)


@dataclasses.dataclass
class Unhashable:
    scale: object

    loss = Frozen.loss


class Plain:
    def __init__(self, scale):
        self.scale = scale

    loss = Frozen.loss


USES = {
    "function": lambda library, f, x: library.filter_jit(f)(x),
    "argument": lambda library, f, x: library.filter_jit(lambda f, x: f(x))(f, x),
    "gradient": lambda library, f, x: library.filter_jit(library.filter_value_and_grad(f))(x)[1],
    "partial": lambda library, f, x: library.filter_jit(functools.partial(f))(x),
    "lowered": lambda library, f, x: library.filter_jit(f).lower(x).compile()(x),
}


def test_method_is_called_as_in_equinox():
    x = jnp.arange(3.0)
    for use in USES.values():
        for cls, scale in ((Frozen, jnp.full(3, 2.0)), (Unhashable, 2.0)):
            instance = cls(scale)
            ours, theirs = (use(library, instance.loss, x) for library in (eqx, equinox))
            np.testing.assert_array_equal(ours, theirs)


def test_repeated_calls_are_traced_once():
    for cls in (Frozen, Unhashable, Plain):
        traces = []

        class Traced(cls):
            def loss(self, x, traces=traces):
                traces.append(None)
                return jnp.sum(x * self.scale)

        instance = Traced(jnp.full(3, 2.0))
        jitted = eqx.filter_jit(instance.loss)
        for _ in range(3):
            jitted(jnp.arange(3.0))
            eqx.filter_jit(instance.loss)(jnp.arange(3.0))
        assert len(traces) == 1


def test_instance_is_static_by_identity_as_in_equinox():
    def outputs(library, cls, use):
        instance, x = cls(2.0), jnp.arange(3.0)
        found = [USES[use](library, instance.loss, x)]
        instance.scale = 3.0
        return [*found, *(USES[use](library, each.loss, x) for each in (instance, cls(3.0)))]

    for cls, use in ((Unhashable, "argument"), (Plain, "function")):
        np.testing.assert_array_equal(outputs(eqx, cls, use), outputs(equinox, cls, use))


def test_numpy_array_of_the_instance_is_not_read_by_a_warm_call(monkeypatch):
    monkeypatch.setattr("eqxlike._checking._depth", 0)
    instance = Plain(np.ones((2, 3), np.float32))
    jitted = eqx.filter_jit(instance.loss)
    x = jnp.ones((2, 3))
    jitted(x)
    called = []
    before = sys.getprofile()
    sys.setprofile(
        lambda frame, event, function: event == "c_call" and called.append(function.__name__)
    )
    try:
        jitted(x)
    finally:
        sys.setprofile(before)
    assert "tobytes" not in called
    assert len(called) < 20


def test_instance_whose_hash_raises_is_static_by_identity():
    for error in (TypeError("no hash today"), ValueError("no hash today")):

        class Broken(Plain):
            def __hash__(self, error=error):
                raise error

        jitted = eqx.filter_jit(Broken(jnp.full(3, 2.0)).loss)
        assert [float(jitted(jnp.ones(3))) for _ in range(3)] == [6, 6, 6]
