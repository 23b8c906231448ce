"""Calls from several threads: the first call traces once, and all are right."""

import threading
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import jax.tree_util as jtu
import pytest

from eqxlike import Module, clear_caches, filter_jit
from eqxlike._transforms._jit._donation import DonationWarnings

# So long waits only who would wait for ever: a failing test ends.
TIMEOUT_S = 60

pytestmark = pytest.mark.usefixtures("compiles_alone")


X = jnp.ones(2)


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


ARGUMENTS = {
    "array": lambda index: jnp.full(2, index),
    "module": lambda index: Pair(jnp.full(2, index), (jnp.full(3, index),)),
    "module-with-list": lambda index: Pair([jnp.full(2, index)], {"a": jnp.full(3, index)}),
}


def double(tree):
    return jtu.tree_map(lambda x: 2 * x, tree)


def test_threads_that_call_first_at_once_trace_once_and_get_each_its_own_result():
    for make in ARGUMENTS.values():
        traces, arguments = [], [make(index) for index in range(8)]
        jitted = filter_jit(lambda tree, traces=traces: traces.append(1) or double(tree))
        outputs = run_at_once(8, lambda index: jitted(arguments[index]))  # noqa: B023
        for output, expected in zip(outputs, map(double, arguments), strict=True):
            assert jtu.tree_structure(output) == jtu.tree_structure(expected)
            assert all(map(jnp.array_equal, jtu.tree_leaves(output), jtu.tree_leaves(expected)))
        assert len(traces) == 1


def test_threads_that_wrap_or_call_a_method_first_at_once_trace_once():
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

    def call_other():
        assert is_tracing.wait(TIMEOUT_S)
        other_is_calling.set()
        return function(jnp.ones(3))

    calls = [lambda: function(jnp.ones(2)), call_other]
    first, second = run_at_once(2, lambda index: calls[index]())
    assert (first == 2).all()
    assert (second == 2).all()
    assert sorted(shapes) == [(2,), (3,)]


# What the second thread calls, and whether it was called before.
@pytest.mark.parametrize(("args", "num_before"), [((jnp.ones(3), "fast"), 2), ((X, "fast"), 0)])
def test_thread_that_calls_what_is_warm_or_another_static_does_not_wait_for_one_that_traces(
    args, num_before
):
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

    calls = [lambda: function(X, "slow"), call_other]
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
