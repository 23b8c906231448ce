"""Recording traces adds no cost to a warm call, and its memory is small and freed."""

import gc
import sys
import types
import weakref

import jax.numpy as jnp
import numpy as np
import pytest

import eqxlike as eqx
from eqxlike._transforms._jit import _differences, _traces
from tests.transforms.models import Scale

ones = jnp.ones


def test_texts_of_many_leaves_are_made_on_first_use(monkeypatch):
    described = []

    def describe_static(value, *key, **options):
        described.append(value)
        return _differences.describe_static(value, *key, **options)

    monkeypatch.setattr(_traces, "describe_static", describe_static)
    function = eqx.filter_jit(lambda leaves, x: x)
    leaves = [*range(500), ones(2), *map(str, range(500))]
    function(leaves, ones(3))
    assert described == []
    function([*leaves[:-1], "another"], ones(3))
    (difference,) = function.traces[1].differences
    found = difference.path, difference.before, difference.after
    assert found == ("leaves[1000]", "'499'", "'another'")


def bytecode_of_a_warm_call(function, *args):
    """The Python frames and instructions, and the C calls, of a warm call."""
    for _ in range(3):
        function(*args)
    found = []

    def trace(frame, event, arg):
        frame.f_trace_opcodes = True
        found.append((frame.f_code.co_name, event, frame.f_lasti))
        return trace

    def profile(frame, event, arg):
        if event.startswith("c_"):
            found.append((event, arg.__name__))

    before = sys.gettrace(), sys.getprofile()
    gc.disable()
    for _ in range(2):  # Since Python 3.12, opcodes are only reported the second time.
        found.clear()
        sys.setprofile(profile)
        sys.settrace(trace)
        try:
            function(*args)
        finally:
            sys.settrace(before[0])
            sys.setprofile(before[1])
    gc.enable()
    return [each for each in found if each[1] not in ("settrace", "setprofile")]


@pytest.mark.usefixtures("plain_dispatch")
def test_warm_call_runs_the_same_instructions_with_and_without_options():
    def step(model, x):
        return model.weight * x

    model, x = Scale(ones(2)), ones(2)
    expected = bytecode_of_a_warm_call(eqx.filter_jit(step), model, x)
    assert len(expected) > 15
    for options in ({"on_retrace": id}, {"on_retrace": "error", "max_traces": 3}):
        assert bytecode_of_a_warm_call(eqx.filter_jit(step, **options), model, x) == expected
    with eqx.debug.explain_retraces():
        assert bytecode_of_a_warm_call(eqx.filter_jit(step), model, x) == expected


# --- memory ---


def reachable(*roots):
    """The objects reachable from `roots`, except through classes and modules."""
    found, todo = {}, list(roots)
    while todo:
        each = todo.pop()
        if id(each) not in found and not isinstance(each, type | types.ModuleType):
            found[id(each)] = each
            todo += gc.get_referents(each)
    return list(found.values())


def test_closures_passed_as_arguments_and_traced_functions_are_freed():
    def closure():
        held = ones(3)
        return lambda x: held * x

    function = eqx.filter_jit(lambda apply, x: apply(x), on_retrace=id)
    closures = [closure(), closure()]
    for apply in closures:
        function(apply, ones(3))
    references = [weakref.ref(each) for each in closures]
    trace = function.traces[-1]
    del closures, apply
    gc.collect()
    assert [reference() for reference in references] == [None, None]
    assert "another <lambda>" in str(trace)
    references = [weakref.ref(function), weakref.ref(function.__wrapped__)]  # pyright: ignore
    del function, trace
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_new_function_at_the_address_of_a_deleted_function_is_distinguished():
    function = eqx.filter_jit(lambda apply, x: apply(x))
    for _ in range(3):
        function((lambda: lambda x: x)(), ones(3))
        gc.collect()
    assert ["another" in str(trace) for trace in function.traces] == [False, True, True]


def test_latest_traces_are_kept():
    function = eqx.filter_jit(lambda n: None)
    for n in range(34):
        function(n)
    assert [trace.number for trace in function.traces] == list(range(3, 35))


def test_traces_share_the_common_parts_of_their_arguments():
    model = [Scale(np.ones(2)) for _ in range(40)]
    function = eqx.filter_jit(lambda model, n: None)
    for n in range(2):
        function(model, n)
    first, second = ({*map(id, reachable(trace))} for trace in function.traces)
    assert len(second - first) < 40 < len(first & second)
