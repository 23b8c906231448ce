"""Calls from several threads: the first call traces once, and all are right."""

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import pytest

from eqxlike import Module, clear_caches, filter_grad, filter_jit
from eqxlike._transforms._jit._donation import DonationWarnings

# So long waits only who would wait for ever: a failing test ends.
TIMEOUT_S = 60

pytestmark = pytest.mark.usefixtures("compiles_alone")


class Pair(Module):
    left: object
    right: object = None


def run_at_once(number, call):
    """`call(index)` in as many threads, started at one moment; the outputs in order."""
    start = threading.Barrier(number, timeout=TIMEOUT_S)

    def run(index):
        start.wait()
        return call(index)

    with ThreadPoolExecutor(number) as pool:
        return list(pool.map(run, range(number)))


class Counting:
    def __init__(self, function=lambda tree: jtu.tree_map(lambda x: 2 * x, tree), **options):
        self.count = 0

        def counted(tree):
            self.count += 1
            return function(tree)

        self.jitted = filter_jit(counted, **options)


ARGUMENTS = {
    "array": lambda index: jnp.full(2, index),
    "module": lambda index: Pair(jnp.full(2, index), (jnp.full(3, index),)),
    "module-with-list": lambda index: Pair([jnp.full(2, index)], {"a": jnp.full(3, index)}),
    "tuple": lambda index: (jnp.full(2, index), None),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_32_threads_that_call_first_at_once_trace_once(name):
    counting = Counting()
    run_at_once(32, lambda index: counting.jitted(ARGUMENTS[name](index)))
    assert counting.count == 1


@pytest.mark.parametrize("name", ARGUMENTS)
def test_32_threads_that_call_first_at_once_get_each_its_own_result(name):
    counting = Counting()
    arguments = [ARGUMENTS[name](index) for index in range(32)]
    outputs = run_at_once(32, lambda index: counting.jitted(arguments[index]))
    for argument, output in zip(arguments, outputs, strict=True):
        expected = jtu.tree_map(lambda x: 2 * x, argument)
        assert jtu.tree_structure(output) == jtu.tree_structure(expected)
        assert all(map(jnp.array_equal, jtu.tree_leaves(output), jtu.tree_leaves(expected)))


def test_32_threads_with_one_module_get_equal_results():
    counting = Counting()
    module = Pair(jnp.ones(2), (jnp.ones(3),))
    outputs = run_at_once(32, lambda _: counting.jitted(module))
    assert all((output.left == 2).all() for output in outputs)
    assert counting.count == 1


def test_32_threads_that_wrap_and_call_at_once_trace_once():
    count = 0

    def function(x):
        nonlocal count
        count += 1
        return 2 * x

    run_at_once(32, lambda _: filter_jit(function)(jnp.ones(2)))
    assert count == 1


def test_32_threads_that_call_a_method_first_at_once_trace_once():
    count = 0

    class Model(Module):
        weight: object

        @filter_jit
        def apply(self, x):
            nonlocal count
            count += 1
            return self.weight * x

    run_at_once(32, lambda index: Model(jnp.full(2, 1.0)).apply(jnp.full(2, float(index))))
    assert count == 1


def test_32_threads_with_out_shardings_trace_once():
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    counting = Counting(out_shardings=sharding)
    run_at_once(32, lambda index: counting.jitted(jnp.full(2, index)))
    assert counting.count == 1


def test_32_threads_that_call_with_a_new_shape_at_once_are_right():
    counting = Counting()
    counting.jitted(jnp.ones(2))
    outputs = run_at_once(32, lambda index: counting.jitted(jnp.full(3, index)))
    assert [int(output[0]) for output in outputs] == [2 * index for index in range(32)]


def test_threads_with_different_statics_trace_once_for_each():
    counts = dict.fromkeys(range(4), 0)

    def function(x, how):
        counts[how] += 1
        return x + how

    jitted = filter_jit(function)
    outputs = run_at_once(32, lambda index: jitted(jnp.full(2, index), index % 4))
    assert [int(output[0]) for output in outputs] == [index + index % 4 for index in range(32)]
    assert counts == dict.fromkeys(range(4), 1)


def test_thread_that_calls_while_another_traces_another_shape_is_right():
    is_tracing, other_is_calling = threading.Event(), threading.Event()
    shapes = []

    @filter_jit
    def function(x):
        shapes.append(x.shape)
        if x.shape == (2,):
            is_tracing.set()
            assert other_is_calling.wait(TIMEOUT_S)
        return 2 * x

    def call_other(_):
        assert is_tracing.wait(TIMEOUT_S)
        other_is_calling.set()
        return function(jnp.ones(3))

    calls = [lambda: function(jnp.ones(2)), lambda: call_other(None)]
    first, second = run_at_once(2, lambda index: calls[index]())
    assert (first == 2).all()
    assert (second == 2).all()
    assert sorted(shapes) == [(2,), (3,)]


def test_thread_that_calls_a_warm_shape_while_another_traces_does_not_wait_for_it():
    is_tracing, other_is_done = threading.Event(), threading.Event()
    waited = []

    @filter_jit
    def function(x):
        if x.shape == (2,):
            is_tracing.set()
            waited.append(not other_is_done.wait(TIMEOUT_S))
        return 2 * x

    function(jnp.ones(3))
    function(jnp.ones(3))

    def call_warm():
        assert is_tracing.wait(TIMEOUT_S)
        output = function(jnp.ones(3))
        other_is_done.set()
        return output

    calls = [lambda: function(jnp.ones(2)), call_warm]
    run_at_once(2, lambda index: calls[index]())
    assert waited == [False]


def test_thread_that_calls_another_static_while_another_traces_does_not_wait_for_it():
    is_tracing, other_is_done = threading.Event(), threading.Event()
    waited = []

    @filter_jit
    def function(x, how):
        if how == "slow":
            is_tracing.set()
            waited.append(not other_is_done.wait(TIMEOUT_S))
        return 2 * x

    def call_other():
        assert is_tracing.wait(TIMEOUT_S)
        output = function(jnp.ones(2), "fast")
        other_is_done.set()
        return output

    calls = [lambda: function(jnp.ones(2), "slow"), call_other]
    run_at_once(2, lambda index: calls[index]())
    assert waited == [False]


def test_two_functions_that_call_one_another_while_tracing_do_not_wait_for_each_other():
    both_trace = threading.Barrier(2, timeout=TIMEOUT_S)

    @filter_jit
    def first(x, is_outer):
        if is_outer:
            both_trace.wait()
            return second(x, False)
        return x + 1

    @filter_jit
    def second(x, is_outer):
        if is_outer:
            both_trace.wait()
            return first(x, False)
        return x + 2

    outputs = run_at_once(2, lambda index: (first, second)[index](jnp.zeros(2), True))
    assert [int(output[0]) for output in outputs] == [2, 1]


def test_failure_in_one_thread_is_not_the_failure_of_another():
    @filter_jit
    def function(x, how):
        if how % 2:
            raise ValueError(f"told to fail {how}")
        return x + how

    def call(index):
        try:
            return int(function(jnp.zeros((), int), index % 4))
        except ValueError as error:
            return str(error).split("\n")[0]

    expected = [0, "told to fail 1", 2, "told to fail 3"] * 4
    assert run_at_once(16, call) == expected


def test_threads_that_fail_first_at_once_leave_a_function_that_works():
    fails = True

    @filter_jit
    def function(x):
        if fails:
            raise ValueError("told to fail")
        return 2 * x

    def call(_):
        with pytest.raises(ValueError, match="told to fail"):
            function(jnp.ones(2))

    run_at_once(8, call)
    fails = False
    assert all((output == 2).all() for output in run_at_once(8, lambda _: function(jnp.ones(2))))


class _TakenByAnother(list):
    """What another thread takes as soon as somebody has asked whether there is any."""

    def __bool__(self):
        was_there = len(self) > 0
        self.clear()
        return was_there


def test_two_calls_may_end_at_once_that_had_warnings_hidden():
    donation_warnings = DonationWarnings("all")
    donation_warnings.to_restore = _TakenByAnother([lambda: None])
    donation_warnings.restore()
    assert not donation_warnings.to_restore


def test_calls_go_on_while_caches_are_cleared():
    function = filter_jit(lambda pair: Pair(pair.left + 1, pair.right))
    stop = threading.Event()

    def clear():
        for _ in range(10):
            clear_caches()
        stop.set()
        return []

    def call():
        outputs = []
        while not stop.is_set() or len(outputs) < 3:
            outputs.append(int(function(Pair(jnp.zeros((), int))).left))
        return outputs

    outputs = run_at_once(4, lambda index: (clear if index == 0 else call)())
    assert {output for each in outputs for output in each} == {1}


def test_module_fed_back_by_many_threads_is_right():
    grow = filter_jit(lambda pair: Pair(pair.left + 1, (pair.right[0] + 2,)))

    def call(_):
        pair = Pair(jnp.zeros((), int), (jnp.zeros((), int),))
        for _ in range(50):
            pair = grow(pair)
        return int(pair.left), int(pair.right[0])

    assert set(run_at_once(8, call)) == {(50, 100)}


def test_gradients_in_many_threads_are_right():
    gradient = filter_jit(filter_grad(lambda pair: pair.left**2))
    outputs = run_at_once(16, lambda index: float(gradient(Pair(jnp.array(float(index)))).left))
    assert outputs == [2.0 * index for index in range(16)]


def test_filters_of_warnings_do_not_grow_with_threads_that_donate():
    before = len(warnings.filters)
    for size in range(2, 6):
        function = filter_jit(lambda x: x.sum(), donate="all")
        run_at_once(8, lambda _, f=function, size=size: f(jnp.ones(size)))
    assert len(warnings.filters) == before
