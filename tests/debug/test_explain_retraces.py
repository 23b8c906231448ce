"""`explain_retraces` reports the traces in its block."""

import jax
import jax.numpy as jnp
import pytest

import eqxlike as eqx
from eqxlike.debug import RetraceError, RetraceWarning, explain_retraces

ones = jnp.ones


def lines(trace):
    return [str(each) for each in trace.differences]


def test_block_prints_each_trace_after_the_first(capsys):
    function = eqx.filter_jit(lambda x: None)
    function(ones(1))
    with explain_retraces(), explain_retraces(id) as outer, explain_retraces(id) as inner:
        function(ones(1))
        assert outer == inner == []
        function(ones(2))
        function(ones(2))
    function(ones(3))
    assert outer == inner == [function.traces[1]]
    assert capsys.readouterr().out == f"{function.traces[1]}\n"


def test_block_reports_functions_that_are_defined_again():
    def identity(x):
        return x

    with explain_retraces(id) as retraces:
        # The same function in new wrappers.
        eqx.filter_jit(identity)(1.0)
        eqx.filter_jit(eqx.filter_grad(identity))(jnp.ones(()))
        eqx.filter_jit(identity, max_traces=3)(1.0)
        assert retraces == []
        for _ in range(3):
            eqx.filter_jit(lambda x: None)(ones(2))
    assert [trace.number for trace in retraces] == [2, 3]
    assert lines(retraces[0]) == ["<lambda>: a function -> another function from the same lines"]
    assert "Define and wrap it once, outside of the loop" in str(retraces[0])


def test_function_inside_a_transformation_has_its_own_path():
    for width in (2, 3):
        mapped = eqx.filter_jit(
            eqx.filter_vmap(eqx.nn.Linear(2, width, key=jax.random.key(0))), max_traces=100
        )
        mapped(ones((4, 2)))
    assert "<function>.weight: shape (2, 2) -> (3, 2)" in lines(mapped.traces[-1])


def test_block_reports_cleared_caches():
    function = eqx.filter_jit(lambda x: None)
    with explain_retraces(id) as retraces:
        function(ones(2))
        eqx.clear_caches()
        function(ones(2))
        assert "the caches were cleared" in str(retraces[0])
        function(ones(3))
        eqx.clear_caches()
        # The report compares with the most similar trace, not with the latest.
        function(ones(2))
    assert retraces[-1].differences == ()


def test_block_warns_with_the_line_of_the_call_and_refuses_other_words():
    function = eqx.filter_jit(lambda x: None)
    with explain_retraces("warn"):
        function(ones(2))
        with pytest.warns(RetraceWarning, match=r"x: shape \(2,\) -> \(3,\)") as warned:
            function(ones(3))
    assert warned[0].filename == __file__
    message = r"`explain_retraces\(on_retrace=...\)` expects 'warn', 'error' or a function"
    for on_retrace in ("print", 3, None):
        with pytest.raises(ValueError, match=message), explain_retraces(on_retrace):
            pass


def test_block_raises_and_the_call_succeeds_after_the_block():
    function = eqx.filter_jit(lambda x: 2 * x)
    function(ones(2))
    with explain_retraces("error"):
        for _ in range(2):
            with pytest.raises(RetraceError, match=r"must not be traced again.*would be trace 2\."):
                function(ones(3))
        assert function(ones(2)).tolist() == [2, 2]
    assert len(function.traces) == 1
    assert function(ones(3)).tolist() == [2, 2, 2]
