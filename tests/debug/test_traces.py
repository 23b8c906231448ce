"""`assert_max_traces` counts traces and raises after too many."""

import copy
import functools
import gc
import inspect
import pickle
import weakref

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import pytest

import eqxlike
from eqxlike.debug import assert_max_traces, get_num_traces


def double(x, factor=2):
    """Doubles."""
    return factor * x


def linear(out_features=2):
    return eqxlike.nn.Linear(2, out_features, key=jax.random.key(0))


def test_wrapper_is_a_module_with_the_metadata_of_the_function():
    wrapped = assert_max_traces(double, max_traces=1)
    for attribute in ("__name__", "__doc__", "__qualname__", "__module__"):
        assert getattr(wrapped, attribute) == getattr(double, attribute)
    assert inspect.signature(wrapped) == inspect.signature(double)
    assert isinstance(wrapped, eqxlike.Module)
    assert (wrapped.fn, wrapped.__wrapped__, wrapped.max_traces) == (double, double, 1)
    module = linear()
    leaves = jtu.tree_leaves(assert_max_traces(module, max_traces=1))
    assert eqxlike.tree_equal(leaves, jtu.tree_leaves(module))
    assert wrapped != assert_max_traces(double, max_traces=1)
    assert assert_max_traces(max_traces=1)(double)(3) == 6


def test_invalid_arguments_raise():
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'max_traces'"):
        assert_max_traces(double)
    with pytest.raises(TypeError):
        assert_max_traces(3, max_traces=1)(1)
    with pytest.raises(ValueError, match="does not appear to"):
        get_num_traces(double)


def test_traces_inside_a_jit_count_and_raise_past_the_limit():
    for jit in (eqxlike.filter_jit, jax.jit):
        jitted = jit(assert_max_traces(double, max_traces=2))
        counts = [get_num_traces(jitted)]
        with jax.checking_leaks():
            for x in (jnp.ones(2), jnp.zeros(2), jnp.ones(3)):
                assert jitted(x).tolist() == (2 * x).tolist()
                counts.append(get_num_traces(jitted))
        with pytest.raises(RuntimeError, match="can only be traced 2 times"):
            jitted(jnp.ones(4))
        assert counts == [0, 1, 1, 2]


def test_count_includes_failed_calls_and_is_found_in_wrappers_and_copies():
    def fail(x):
        raise ValueError("no")

    inner = assert_max_traces(double, max_traces=None)
    outer = assert_max_traces(inner, max_traces=None)
    for each in (inner, copy.copy(inner), jtu.tree_map(lambda leaf: leaf, inner)):
        each(1)
    assert (get_num_traces(inner), get_num_traces(each), get_num_traces(outer)) == (3, 3, 0)
    function = assert_max_traces(fail, max_traces=1)
    with pytest.raises(ValueError, match="no"):
        function(1)
    assert get_num_traces(function) == 1
    function = assert_max_traces(lambda x: x.sum() ** 2, max_traces=None)
    wrapped = eqxlike.filter_jit(eqxlike.filter_grad(function))
    partial = functools.partial(wrapped, jnp.ones((2,)))
    partial()
    assert get_num_traces(wrapped) == get_num_traces(partial) == 1


class Wrapper:
    """A wrapper with an attribute `func` that is not the wrapped function."""

    def __init__(self, wrapped):
        self.__wrapped__ = wrapped

    @property
    def func(self):
        return self


def test_attribute_func_is_followed_in_a_partial_only():
    assert get_num_traces(Wrapper(assert_max_traces(double, max_traces=1))) == 0
    with pytest.raises(ValueError, match="does not appear to be wrapped"):
        get_num_traces(Wrapper(double))


class Scale(eqxlike.Module):
    factor: jax.Array

    @assert_max_traces(max_traces=None)
    def plain(self, x):
        return self.factor * x

    @eqxlike.filter_jit
    @assert_max_traces(max_traces=1)
    def jitted(self, x):
        return self.factor * x


def test_count_of_a_method_is_found_on_the_instance_and_the_class():
    class Plain:
        @assert_max_traces(max_traces=1)
        def method(self, x):
            return self, x

    plain = Plain()
    assert plain.method(1) == (plain, 1)
    assert get_num_traces(plain.method) == 1
    for name in ("plain", "jitted"):
        method = getattr(Scale(jnp.array(2.0)), name)
        assert method(jnp.ones(2)).tolist() == [2, 2]
        assert get_num_traces(method) == get_num_traces(getattr(Scale, name)) == 1
    with pytest.raises(RuntimeError, match=r"self\.factor: shape \(\) -> \(2,\)"):
        Scale(jnp.ones(2)).jitted(jnp.ones(2))


def test_deep_copy_counts_from_zero():
    for make in (copy.deepcopy, lambda tree: pickle.loads(pickle.dumps(tree))):
        function = assert_max_traces(linear(), max_traces=2)
        function(jnp.ones(2))
        copied = make(function)
        assert get_num_traces(copied) == 0
        assert copied(jnp.ones(2)).tolist() == function(jnp.ones(2)).tolist()
        assert (get_num_traces(copied), get_num_traces(function)) == (1, 2)


def test_wrapper_keeps_neither_function_nor_arguments_alive():
    class Argument:
        pass

    function, argument = assert_max_traces(lambda x: None, max_traces=2), Argument()
    references = [weakref.ref(function.fn), weakref.ref(argument)]
    function(argument)
    del argument
    gc.collect()
    assert references[1]() is None
    del function
    gc.collect()
    assert references[0]() is None


def test_each_call_past_the_limit_raises_and_counts():
    for max_traces in (-1, 0, 1):
        function = assert_max_traces(double, max_traces=max_traces)
        for number in range(3):
            if number < max_traces:
                function(1)
                continue
            with pytest.raises(RuntimeError, match=f"can only be traced {max_traces} times"):
                function(1)
        assert get_num_traces(function) == 3


def error_of(function, *calls, max_traces=1):
    """The message of the error in the last of `calls`, which are tuples of arguments."""
    wrapped = assert_max_traces(function, max_traces=max_traces)
    for arguments in calls[:-1]:
        wrapped(*arguments)
    with pytest.raises(RuntimeError, match="can only be traced") as caught:
        wrapped(*calls[-1])
    return str(caught.value)


def test_error_names_the_function_and_the_differences():
    message = error_of(double, (jnp.ones(2), 2), (jnp.ones(3), 2))
    assert message.startswith(
        "`double` can only be traced 1 times, and this is trace 2. What differs from trace 1:\n"
        "  x: shape (2,) -> (3,)\n"
    )
    assert "`double` can only be traced 0 times" in error_of(double, (1,), max_traces=0)
    partial = functools.partial(lambda x, other: x, other={1})
    for function, before, after, line in (
        (partial, 1, 2, "x: static value 1 -> 2"),
        (lambda *args: args, 1, 2, "args[0]: static value 1 -> 2"),
        (lambda self: self, linear(), linear(3), "self.weight: shape (2, 2) -> (3, 2)"),
    ):
        assert f"  {line}\n" in error_of(function, (before,), (after,))


def test_error_compares_with_the_most_similar_of_the_latest_traces():
    calls = [(jnp.ones(2), 2), (jnp.ones(3), 3), (jnp.ones(2), 4)]
    message = error_of(double, *calls, max_traces=2)
    assert "What differs from trace 1:\n  factor: static value 2 -> 4\n" in message
    assert "What differs from trace 2:" in error_of(double, (1,), (1,), (2,), max_traces=2)
    assert "are the same as in trace 1, so something" in error_of(double, (1,), (1,))
    # The first call equals the last, but only the latest 16 traces are kept.
    calls = [("text",), *((number,) for number in range(29)), ("text",)]
    message = error_of(double, *calls, max_traces=30)
    assert "What differs from trace 30:\n  x: static value 28 -> 'text'\n" in message
