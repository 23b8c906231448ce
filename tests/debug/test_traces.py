"""Where a test takes `eqx`, the same program holds on Equinox, whose behaviour is the measure."""

import copy
import functools
import gc
import inspect
import pickle
import threading
import weakref

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import pytest

import eqxlike
from eqxlike.debug import assert_max_traces, get_num_traces
from tests.beside_equinox import both


def double(x, factor=2):
    """Doubles."""
    return factor * x


def linear(eqx, out_features=2):
    return eqx.nn.Linear(2, out_features, key=jax.random.key(0))


# --- what is returned ---------------------------------------------------------------------------


@both
@pytest.mark.parametrize("attribute", ["__name__", "__doc__", "__qualname__", "__module__"])
def test_shows_the_metadata_of_the_function(eqx, attribute):
    wrapped = eqx.debug.assert_max_traces(double, max_traces=1)
    assert getattr(wrapped, attribute) == getattr(double, attribute)


@both
def test_shows_the_signature_of_the_function(eqx):
    wrapped = eqx.debug.assert_max_traces(double, max_traces=1)
    assert inspect.signature(wrapped) == inspect.signature(double)


@both
def test_is_a_module_with_what_it_was_given(eqx):
    wrapped = eqx.debug.assert_max_traces(double, max_traces=1)
    assert isinstance(wrapped, eqx.Module)
    assert (wrapped.fn, wrapped.__wrapped__, wrapped.max_traces) == (double, double, 1)


@both
def test_its_leaves_are_those_of_what_it_wraps(eqx):
    module = linear(eqx)
    wrapped = eqx.debug.assert_max_traces(module, max_traces=1)
    assert eqxlike.tree_equal(jtu.tree_leaves(wrapped), jtu.tree_leaves(module))


@both
def test_is_a_decorator_with_arguments(eqx):
    decorated = eqx.debug.assert_max_traces(max_traces=1)(double)
    assert decorated(3) == 6


@both
def test_max_traces_is_needed(eqx):
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'max_traces'"):
        eqx.debug.assert_max_traces(double)


@both
def test_two_wrappers_of_one_function_are_different(eqx):
    one, other = (eqx.debug.assert_max_traces(double, max_traces=1) for _ in range(2))
    assert one != other


def test_what_is_no_function_is_an_error():
    with pytest.raises(TypeError, match="3 is not a callable object"):
        assert_max_traces(3, max_traces=1)  # pyright: ignore[reportArgumentType]


# --- counting -----------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("jit", ["filter_jit", "jax"])
def test_counts_the_traces_inside_a_jit(eqx, jit):
    function = eqx.debug.assert_max_traces(double, max_traces=None)
    jitted = eqx.filter_jit(function) if jit == "filter_jit" else jax.jit(function)
    counts = [eqx.debug.get_num_traces(jitted)]
    for x in (jnp.ones(2), jnp.zeros(2), jnp.ones(3)):
        jitted(x)
        counts.append(eqx.debug.get_num_traces(jitted))
    assert counts == [0, 1, 1, 2]


@both
def test_counts_the_calls_outside_of_a_jit(eqx):
    function = eqx.debug.assert_max_traces(double, max_traces=None)
    function(1)
    function(1)
    assert eqx.debug.get_num_traces(function) == 2


@both
@pytest.mark.parametrize("wrapper", ["filter_grad", "filter_vmap", "filter_value_and_grad"])
def test_the_count_is_found_inside_other_wrappers(eqx, wrapper):
    function = eqx.debug.assert_max_traces(lambda x: x.sum() ** 2, max_traces=None)
    wrapped = eqx.filter_jit(getattr(eqx, wrapper)(function))
    wrapped(jnp.ones((2,)))
    assert eqx.debug.get_num_traces(wrapped) == 1


@both
def test_the_outermost_wrapper_counts(eqx):
    inner = eqx.debug.assert_max_traces(double, max_traces=None)
    outer = eqx.debug.assert_max_traces(inner, max_traces=None)
    inner(1)
    assert eqx.debug.get_num_traces(outer) == 0


@both
def test_a_trace_that_fails_counts(eqx):
    def fail(x):
        raise ValueError("no")

    function = eqx.debug.assert_max_traces(fail, max_traces=1)
    with pytest.raises(ValueError, match="no"):
        function(1)
    assert eqx.debug.get_num_traces(function) == 1


@both
def test_what_is_not_wrapped_has_no_count(eqx):
    with pytest.raises(ValueError, match="does not appear to"):
        eqx.debug.get_num_traces(double)


def test_the_count_is_found_inside_a_partial():
    function = functools.partial(assert_max_traces(double, max_traces=None), 1)
    function()
    assert get_num_traces(function) == 1


@pytest.fixture
def scale():
    class Scale(eqxlike.Module):
        factor: jax.Array

        @assert_max_traces(max_traces=None)
        def plain(self, x):
            return self.factor * x

        @eqxlike.filter_jit
        @assert_max_traces(max_traces=1)
        def jitted(self, x):
            return self.factor * x

    return Scale


@pytest.mark.parametrize("name", ["plain", "jitted"])
def test_the_count_of_a_method_is_found_on_the_instance_and_the_class(scale, name):
    method = getattr(scale(jnp.array(2.0)), name)
    assert method(jnp.ones(2)).tolist() == [2, 2]
    assert get_num_traces(method) == get_num_traces(getattr(scale, name)) == 1


def test_the_instances_of_a_class_count_together(scale):
    scale(jnp.ones(1)).jitted(1.0)
    with pytest.raises(RuntimeError, match=r"self\.factor: f32\[1\] then f32\[3\]"):
        scale(jnp.ones(3)).jitted(1.0)


def test_a_method_of_a_plain_class_is_bound_to_its_instance():
    class Plain:
        @assert_max_traces(max_traces=1)
        def method(self, x):
            return self, x

    plain = Plain()
    assert plain.method(1) == (plain, 1)
    assert get_num_traces(plain.method) == 1


def test_a_wrapped_module_is_passed_to_filter_jit_without_being_traced_anew():
    wrapped = assert_max_traces(linear(eqxlike), max_traces=1)
    call = eqxlike.filter_jit(lambda module, x: module(x))
    for _ in range(3):
        call(wrapped, jnp.ones(2))
    assert get_num_traces(wrapped) == 1


@pytest.mark.usefixtures("compiles_alone")
def test_threads_count_together():
    function = assert_max_traces(double, max_traces=None)
    threads = [threading.Thread(target=lambda: [function(1) for _ in range(200)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert get_num_traces(function) == 800


@pytest.mark.usefixtures("compiles_alone")
def test_threads_that_come_first_to_a_jit_count_one_trace():
    jitted = eqxlike.filter_jit(assert_max_traces(double, max_traces=1))
    threads = [threading.Thread(target=jitted, args=(jnp.ones(2),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert get_num_traces(jitted) == 1


# --- copies and memory --------------------------------------------------------------------------


@both
@pytest.mark.parametrize(
    "make", [copy.copy, lambda tree: jtu.tree_map(lambda leaf: leaf, tree)], ids=["copy", "map"]
)
def test_copies_count_together(eqx, make):
    function = eqx.debug.assert_max_traces(double, max_traces=None)
    copied = make(function)
    function(1)
    copied(1)
    assert eqx.debug.get_num_traces(function) == eqx.debug.get_num_traces(copied) == 2


@pytest.mark.parametrize(
    "make", [copy.deepcopy, lambda tree: pickle.loads(pickle.dumps(tree))], ids=["deep", "pickle"]
)
def test_a_deep_copy_counts_anew(make):
    function = assert_max_traces(linear(eqxlike), max_traces=2)
    function(jnp.ones(2))
    copied = make(function)
    assert get_num_traces(copied) == 0
    assert copied(jnp.ones(2)).tolist() == function(jnp.ones(2)).tolist()
    assert (get_num_traces(copied), get_num_traces(function)) == (1, 2)


def test_holds_neither_function_nor_arguments():
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


def test_leaks_no_tracers():
    jitted = jax.jit(assert_max_traces(double, max_traces=1))
    with jax.checking_leaks():
        assert jitted(jnp.ones(2)).tolist() == [2, 2]


# --- too many traces ----------------------------------------------------------------------------


@both
@pytest.mark.parametrize("jit", ["filter_jit", "jax"])
def test_too_many_traces_are_an_error(eqx, jit):
    function = eqx.debug.assert_max_traces(double, max_traces=1)
    jitted = eqx.filter_jit(function) if jit == "filter_jit" else jax.jit(function)
    jitted(jnp.ones(2))
    with pytest.raises(RuntimeError, match="can only be traced 1 times"):
        jitted(jnp.ones(3))


@both
@pytest.mark.parametrize("max_traces", [0, -1])
def test_no_trace_may_be_allowed(eqx, max_traces):
    function = eqx.debug.assert_max_traces(double, max_traces=max_traces)
    with pytest.raises(RuntimeError, match=f"can only be traced {max_traces} times"):
        function(1)


@both
def test_each_call_past_the_limit_is_an_error_and_counts(eqx):
    function = eqx.debug.assert_max_traces(double, max_traces=1)
    function(1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="can only be traced 1 times"):
            function(1)
    assert eqx.debug.get_num_traces(function) == 3


def error_of(function, *calls, max_traces=1):
    """The message of the last of some calls, each a tuple of arguments."""
    wrapped = assert_max_traces(function, max_traces=max_traces)
    for arguments in calls[:-1]:
        wrapped(*arguments)
    with pytest.raises(RuntimeError, match="can only be traced") as caught:
        wrapped(*calls[-1])
    return str(caught.value)


def test_the_error_names_the_function_and_says_what_has_changed():
    assert error_of(double, (jnp.ones(2), 2), (jnp.ones(3), 2)) == (
        "`double` can only be traced 1 times, and this is trace 2. What differs from trace 1:\n"
        "  x: f32[2] then f32[3]"
    )


def test_the_error_compares_with_the_most_similar_trace():
    calls = [(jnp.ones(2), 2), (jnp.ones(3), 3), (jnp.ones(2), 4)]
    message = error_of(double, *calls, max_traces=2)
    assert message.endswith("What differs from trace 1:\n  factor: 2 then 4")


def test_of_traces_that_are_alike_the_error_takes_the_latest():
    message = error_of(double, (1,), (1,), (2,), max_traces=2)
    assert "What differs from trace 2:" in message


def test_the_error_says_so_where_nothing_differs_that_can_be_seen():
    message = error_of(double, (1,), (1,))
    assert "like those of trace 1" in message
    assert "jitted anew for each call" in message


def test_the_error_shows_a_bounded_number_of_changes():
    message = error_of(double, (list(range(30)),), (list(range(1, 31)),))
    assert message.count(" then ") == 20
    assert message.endswith("and 10 more")


def test_only_the_latest_traces_are_remembered():
    # The first call is like the last, and would be named if it were remembered.
    calls = [("text",), *((number,) for number in range(29)), ("text",)]
    message = error_of(double, *calls, max_traces=30)
    assert message.endswith("What differs from trace 30:\n  x: 28 then 'text'")
