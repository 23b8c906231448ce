"""A function sees the very objects that it is passed, and a caller gets those it returned."""

import dataclasses
import functools
import gc
import threading
import warnings
import weakref
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from eqxlike import Module, field, filter_jit
from eqxlike._partition import flatten


@dataclasses.dataclass(frozen=True)
class Config:
    size: int
    name: str = dataclasses.field(default="", compare=False)


@dataclasses.dataclass(unsafe_hash=True)
class Settings:
    size: int


class Configured(Module):
    config: Config = field(static=True)


@pytest.mark.parametrize("wrap", [lambda config: config, lambda config: Configured(config)])
def test_function_sees_its_own_argument_where_another_was_called_with_an_equal_one(wrap):
    filter_jit(lambda it: 0)(wrap(Config(1, "first")))
    seen = filter_jit(lambda it: getattr(it, "config", it).name)(wrap(Config(1, "second")))
    assert seen == "second"


@pytest.mark.parametrize("wrap", [lambda config: config, lambda config: Configured(config)])
def test_what_is_returned_is_not_replaced_by_an_equal_object_of_somebody_else(wrap):
    mine = wrap(Config(2, "mine"))
    filter_jit(lambda it: 0)(mine)
    returned = filter_jit(lambda: wrap(Config(2, "theirs")))()
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


def test_call_replaced_by_one_with_other_parameters_is_called():
    class Model:
        def __call__(self, x):
            return 2 * x

    jitted = filter_jit(Model())
    Model.__call__ = lambda self, x, y: x + y
    assert jitted(1.0, 2.0) == 3


@pytest.mark.parametrize("base", [functools.partial, jax.tree_util.Partial])
def test_partial_with_a_call_of_its_own_is_called_by_it(base):
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


def test_unhashable_argument_is_named_by_its_parameter():
    with pytest.raises(TypeError, match=r"the static part of options\['sizes'\], of type set"):
        filter_jit(lambda x, options: x)(jnp.ones(()), {"sizes": {1, 2}})
    with pytest.raises(TypeError, match=r"the static part of rest\[1\], of type set"):
        filter_jit(lambda x, *rest: x)(jnp.ones(()), 1, {1, 2})
