"""`on_retrace`, `max_traces` and `.traces`: counting traces, and reactions to a retrace."""

import copy
import functools
import pickle

import jax
import jax.numpy as jnp
import pytest

import eqxlike as eqx
from eqxlike import checking_partitions
from eqxlike.debug import RetraceError, RetraceWarning, Trace

ones = jnp.ones


def double(x):
    return 2 * x


def ignore(trace):
    """An `on_retrace` that does nothing."""


class Scale(eqx.Module):
    factor: jax.Array
    name: str = eqx.field(static=True, default="a")

    @eqx.filter_jit(max_traces=1)
    def method(self, x):
        return self.factor * x

    @classmethod
    @eqx.filter_jit(max_traces=1)
    def of_class(cls, x):
        return 2 * x


class Plain:
    @eqx.filter_jit(max_traces=1)
    def method(self, x):
        return 2 * x


def num_traces(function):
    return len(function.traces)


# --- the reaction to a retrace ---


def test_on_retrace_warn_warns_at_the_line_of_the_call():
    function = eqx.filter_jit(double, on_retrace="warn")
    function(ones(2))
    with pytest.warns(RetraceWarning, match=r"x: shape \(2,\) -> \(3,\)") as warned:
        function(ones(3))
    assert warned[0].filename == __file__


def test_on_retrace_error_refuses_a_second_trace_and_keeps_the_first():
    count = []
    function = eqx.filter_jit(lambda x: count.append(1) or 2 * x, on_retrace="error")
    function(ones(2))
    for _ in range(2):
        message = r"must not be traced again .* would be trace 2\."
        with pytest.raises(RetraceError, match=message) as caught:
            function(ones(3))
    assert caught.value.trace is not None
    assert caught.value.trace.differences[0].path == "x"
    assert function(ones(2)).tolist() == [2, 2]
    assert len(count) == num_traces(function) == 1


def test_callable_is_called_with_each_trace_after_the_first_and_may_refuse_it():
    class Seen:
        def __init__(self):
            self.traces, self.computed, self.refuses = [], [], False

        def see(self, trace):
            if self.refuses:
                raise KeyError("no")
            self.traces.append(trace)
            # This computation is not part of the traced program.
            self.computed.append(float(ones(2).sum()))

    seen, count = Seen(), []
    function = eqx.filter_jit(lambda x: count.append(1) or 2 * x, on_retrace=seen.see)
    for size in (2, 2, 3, 3, 4):
        function(ones(size))
    assert seen.traces == list(function.traces[1:])
    assert [type(each) for each in seen.traces] == [Trace, Trace]
    assert seen.computed == [2.0, 2.0]
    # A deep copy calls the method of the same object.
    function = copy.deepcopy(function)
    seen.refuses = True
    for _ in range(2):
        with pytest.raises(KeyError, match="no"):
            function(ones(5))
    function(ones(2))
    assert len(count) == 3
    seen.refuses = False
    assert function(ones(5)).tolist() == [2] * 5
    assert len(seen.traces) == 3


def test_max_traces_refuses_the_next_trace_before_it_starts():
    count = []
    function = eqx.filter_jit(lambda x: count.append(1) or x, max_traces=2)
    function(ones(1))
    function(1)  # Static values count too.
    message = r"may be traced 2 times \(`max_traces=2`\), but this would be trace 3\. What differs"
    for _ in range(2):
        with pytest.raises(RetraceError, match=message):
            function(ones(3))
    assert len(count) == 2


def test_invalid_options_raise():
    for max_traces in (0, -1, 1.0, True, "2"):
        with pytest.raises(ValueError, match="expects a whole number of at least 1"):
            eqx.filter_jit(double, max_traces=max_traces)
    message = r"on_retrace=...\)` expects 'warn', 'error' or a function"
    for on_retrace in ("raise", 3):
        with pytest.raises(ValueError, match=message):
            eqx.filter_jit(double, on_retrace=on_retrace)


# --- what counts as a trace ---


def test_trace_has_arguments_time_and_number():
    function = eqx.filter_jit(lambda x, how: x)
    function(ones(2), "a")
    (trace,) = function.traces
    assert trace.arguments == {"x": "float32[2]", "how": "'a'"}
    assert (trace.number, trace.compared_with, trace.differences) == (1, None, ())
    assert isinstance(trace.took_s, float)
    assert repr(trace) == "<trace 1 of <lambda>(x: float32[2], how: 'a')>"


def test_failed_trace_does_not_count():
    def function(x):
        if len(x) == 3:
            raise ValueError("three")
        return x

    function = eqx.filter_jit(function, max_traces=2)
    function(ones(2))
    with pytest.raises(ValueError, match="three"):
        function(ones(3))
    for size in (2, 4):
        function(ones(size))
    assert num_traces(function) == 2
    eqx.clear_caches()
    assert function.traces == ()
    function(ones(5))
    assert [trace.number for trace in function.traces] == [1]


def test_wrappers_of_a_function_share_its_traces_if_their_options_are_equal():
    def function(x):
        return x

    for wrapper in (first := eqx.filter_jit(function, max_traces=1), copy.copy(first)):
        wrapper(ones(2))
    with pytest.raises(RetraceError):
        eqx.filter_jit(function, max_traces=1)(ones(3))
    assert num_traces(eqx.filter_jit(function, max_traces=6)) == 0


def test_copies_share_the_traces_of_the_function():
    function = eqx.filter_jit(double, on_retrace=ignore, max_traces=1000)
    for clone in (copy.copy, copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))):
        cloned, before = clone(function), function.traces
        cloned(ones(len(before) + 10))
        assert function.traces == cloned.traces != before


METHODS = {
    "of an instance": (lambda: Scale(ones(1)).method, Scale.method),
    "of a class": (lambda: Scale.of_class, Scale.of_class),
    "of a plain class": (lambda: getattr(Plain(), "method"), Plain.method),  # noqa: B009
}


def test_methods_count_the_traces_of_all_instances():
    for name, (get, of_class) in METHODS.items():
        eqx.clear_caches()
        assert get()(ones(2)).tolist() == [2, 2] or name == "of an instance"
        with pytest.raises(RetraceError, match=r"\n  x: shape \(2,\) -> \(3,\)"):
            get()(ones(3))
        assert num_traces(of_class) == 1
    Scale(ones(1)).method(ones(2))
    message = r"(?s)`Scale.method` .*self\.name: static value 'a' -> 'b'"
    with pytest.raises(RetraceError, match=message):
        Scale(ones(1), "b").method(ones(2))


def test_module_counts_its_calls():
    class Model(eqx.Module):
        weight: jax.Array

        def __call__(self, x):
            return self.weight @ x

    eqx.filter_jit(Model(ones((3, 2))), max_traces=1)(ones(2))
    other = eqx.filter_jit(Model(ones((4, 2))), max_traces=1)
    with pytest.raises(RetraceError, match=r"`Model.__call__` .*\n  self\.weight: shape \(3, 2\)"):
        other(ones(2))


def test_trace_names_the_arguments_of_a_partial_and_the_function_in_a_transformation():
    jitted = eqx.filter_jit(functools.partial(lambda n, x: x, 3))
    jitted(ones(2))
    assert jitted.traces[0].arguments == {"n": "3", "x": "float32[2]"}
    jitted = eqx.filter_jit(eqx.filter_grad(lambda x: (x**2).sum()))
    jitted(ones(2))
    assert jitted.traces[0].function == "<lambda>"


def test_retrace_error_in_an_outer_trace_leaves_both_functions_usable():
    inner = eqx.filter_jit(lambda x: x, max_traces=1)
    outer = eqx.filter_jit(lambda x: inner(x), on_retrace="error")
    inner(ones(2))
    with pytest.raises(RetraceError, match="may be traced once"):
        outer(ones(3))
    assert outer(ones(2)).tolist() == [1, 1]
    assert (num_traces(inner), num_traces(outer)) == (1, 1)


def test_lowering_counts_as_a_trace_and_the_next_call_does_not():
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for options in ({}, {"out_shardings": (sharding, sharding)}):
        function = eqx.filter_jit(lambda x: (x, x), max_traces=1, **options)
        function.lower(jax.ShapeDtypeStruct((2,), jnp.float32)).compile()
        for _ in range(2):
            function(ones(2))
        with pytest.raises(RetraceError):
            function.lower(ones(3))
        assert num_traces(function) == 1


def test_disable_jit_makes_no_traces_and_checking_mode_counts_the_same():
    function = eqx.filter_jit(lambda model, x: model.factor * x, max_traces=2)
    with jax.disable_jit():
        for size in (1, 2, 3):
            function(Scale(ones(size)), ones(size))
    assert function.traces == ()
    with checking_partitions():
        for size in (1, 2, 1, 2):
            function(Scale(ones(1)), ones(size))
    assert num_traces(function) == 2
