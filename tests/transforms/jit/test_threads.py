"""Calls from several threads: the first call traces once, and all results are correct."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import pytest

from eqxlike import Module, filter_jit
from eqxlike._transforms._jit._fast_path import DonationWarnings
from tests.partition.models import Pair

# Only reached if a test fails.
TIMEOUT_S = 60

pytestmark = pytest.mark.usefixtures("compiles_alone")


def run_at_once(number, call):
    """Runs `call(index)` in `number` simultaneous threads, and returns the outputs in order."""
    start = threading.Barrier(number, timeout=TIMEOUT_S)

    def run(index):
        start.wait()
        return call(index)

    with ThreadPoolExecutor(number) as pool:
        return list(pool.map(run, range(number)))


def test_simultaneous_first_calls_trace_once_for_each_static_value():
    counts = dict.fromkeys(range(4), 0)

    @filter_jit
    def function(pair, how):
        counts[how] += 1
        return Pair([pair.left[0] + how], (2 * pair.right["a"], how))

    def call(index):
        return function(Pair([jnp.full(2, index)], {"a": jnp.full(3, index)}), index % 4)

    for index, output in enumerate(run_at_once(32, call)):
        assert (output.left[0] == index + index % 4).all()
        assert (output.right[0] == 2 * index).all()
        assert output.right[1] == index % 4
    assert counts == dict.fromkeys(range(4), 1)


@pytest.fixture
def switches_threads_often():
    """Finds races that otherwise occur once in 1,000 runs."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.parametrize("trial", range(20))
def test_simultaneous_first_calls_of_wrappers_and_methods_trace_once(trial, switches_threads_often):
    traces = []

    def function(x):
        traces.append("function")
        return 2 * x

    class Model(Module):
        weight: object

        @filter_jit
        def apply(self, x):
            traces.append("method")
            return self.weight * x

    run_at_once(32, lambda _: filter_jit(function)(jnp.ones(2)))
    run_at_once(32, lambda index: Model(jnp.full(2, 1.0)).apply(jnp.full(2, float(index))))
    assert traces == ["function", "method"]


# The arguments of the second thread's call, and the number of earlier calls.
@pytest.mark.parametrize(
    ("args", "num_before"), [((jnp.ones(3), "fast"), 2), ((jnp.ones(2), "fast"), 0)]
)
def test_call_with_a_warm_or_another_trace_does_not_wait_for_a_tracing_thread(args, num_before):
    is_tracing, other_is_done = threading.Event(), threading.Event()
    waited = []

    @filter_jit
    def function(x, how):
        if how == "slow":
            is_tracing.set()
            waited.append(not other_is_done.wait(TIMEOUT_S))
        return 2 * x

    for _ in range(num_before):
        function(*args)

    def call_other():
        assert is_tracing.wait(TIMEOUT_S)
        function(*args)
        other_is_done.set()

    calls = [lambda: function(jnp.ones(2), "slow"), call_other]
    run_at_once(2, lambda index: calls[index]())
    assert waited == [False]


def test_two_functions_that_call_each_other_while_tracing_do_not_deadlock():
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


class _EmptiedByAnotherThread(list):
    """A list that another thread empties directly after a check that it is not empty."""

    def __bool__(self):
        was_there = len(self) > 0
        self.clear()
        return was_there


def test_two_calls_that_hide_warnings_may_end_at_once():
    donation_warnings = DonationWarnings()
    donation_warnings.to_restore = _EmptiedByAnotherThread([lambda: None])
    donation_warnings.restore()
    assert not donation_warnings.to_restore
