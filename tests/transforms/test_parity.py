"""Where `filter_jit` and its kin differ from those of Equinox."""

import functools

import equinox
import jax
import jax.numpy as jnp
import pytest

import eqxlike

X = jnp.arange(3.0)


def count_traces(eqx, calls):
    traces = []

    def function(x, y=1):
        traces.append(1)

    jitted = eqx.filter_jit(function)
    for args, kwargs in calls:
        jitted(*args, **kwargs)
    return len(traces)


def test_unhashable_static_leaf_is_a_type_error_that_names_its_path():
    with pytest.raises(ValueError, match="Non-hashable static arguments"):
        equinox.filter_jit(lambda x: x)({"a": [set()]})
    with pytest.raises(TypeError, match=r"the static part of x\['a'\]\[0\], of type set"):
        eqxlike.filter_jit(lambda x: x)({"a": [set()]})


def test_calls_that_differ_only_in_spelling_share_a_trace():
    calls = [((X,), {}), ((X, 1), {}), ((X,), {"y": 1}), ((), {"y": 1, "x": X})]
    assert count_traces(eqxlike, calls) < count_traces(equinox, calls)


def test_equal_statics_of_different_types_have_each_their_trace():
    calls = [((X, static), {}) for static in (1, 1.0, True)]
    assert (count_traces(eqxlike, calls), count_traces(equinox, calls)) == (3, 1)


def test_struct_stands_for_an_array_where_a_function_is_lowered():
    struct = jax.ShapeDtypeStruct((3,), jnp.float32)
    double = [eqx.filter_jit(lambda x: 2 * x) for eqx in (eqxlike, equinox)]
    assert double[0].lower(struct).compile()(X).tolist() == [0, 2, 4]
    with pytest.raises(TypeError, match="unsupported operand"):
        double[1].lower(struct)


def test_decorator_is_called_by_its_own_signature():
    def with_offset(function):
        @functools.wraps(function)
        def wrapper(x, offset):
            return function(x) + offset

        return wrapper

    function = with_offset(lambda x: 2 * x)
    assert eqxlike.filter_jit(function)(X, X).tolist() == [0, 3, 6]
    with pytest.raises(TypeError, match="too many positional arguments"):
        equinox.filter_jit(function)(X, X)


def test_donation_is_by_the_name_of_a_parameter_too():
    x, y = jnp.ones(3), jnp.ones(3)
    eqxlike.filter_jit(lambda x, y: (x + 1, y), donate=("x",))(x, y)
    assert (x.is_deleted(), y.is_deleted()) == (True, False)
    with pytest.raises(ValueError, match="donate"):
        equinox.filter_jit(lambda x, y: (x + 1, y), donate=("x",))


def test_transformed_method_shows_the_metadata_of_the_method():
    def scale_of(eqx):
        class Model(eqx.Module):
            @eqx.filter_vmap
            def scale(self, x):
                """Scales."""

        return Model().scale

    assert (scale_of(eqxlike).__name__, scale_of(eqxlike).__doc__) == ("scale", "Scales.")
    assert not hasattr(scale_of(equinox), "__name__")
