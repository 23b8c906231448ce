"""`filter_pure_callback`: what goes in, what comes back, how it is mapped, and its errors."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxlike
from eqxlike import filter_jit, filter_pure_callback

X = jnp.arange(3.0)
STRUCT = jax.ShapeDtypeStruct((3,), jnp.float32)


def call(callback, *args, result=STRUCT, under=filter_jit, **kwargs):
    """Calls `callback` from compiled code."""

    def function(args):
        return filter_pure_callback(callback, *args, result_shape_dtypes=result, **kwargs)

    return under(function)(args)


# --- arguments ----------------------------------------------------------------------------------


def test_arrays_are_passed_as_jax_arrays_and_all_else_as_it_is():
    seen = []

    def callback(x, tree, *, name):
        seen.append((isinstance(x, jax.Array), isinstance(tree["y"], jax.Array), tree["n"], name))
        return x

    for under in (filter_jit, lambda function: function):
        call(callback, X, {"y": np.ones(2), "n": 2}, name="n", under=under)
    assert seen == [(True, True, 2, "n")] * 2


def test_keyword_arguments_may_be_arrays_and_no_array_is_needed():
    added = call(lambda x, *, y: np.asarray(x) + np.asarray(y), X, y=X)
    assert added.tolist() == [0, 2, 4]
    assert call(lambda: np.ones(3, np.float32)).tolist() == [1, 1, 1]


def test_unhashable_statics_and_typed_keys_go_in():
    def output(x):
        callback = lambda x, s: np.asarray(x) + len(s)
        return filter_pure_callback(callback, x, {1}, result_shape_dtypes=STRUCT)

    assert filter_jit(output)(X).tolist() == [1, 2, 3]
    # A typed key is passed as its data.
    shape = jax.ShapeDtypeStruct((1,), jnp.int32)
    assert call(lambda key: np.int32(key.shape), jax.random.key(0), result=shape) == 2


class Scale(eqxlike.Module):
    weight: Any

    def __call__(self, x):
        return np.asarray(self.weight).reshape(3) * np.asarray(x)


def test_a_module_that_is_the_callback_may_hold_traced_arrays():
    @filter_jit
    def scaled(model, x):
        return filter_pure_callback(model, x, result_shape_dtypes=STRUCT)

    assert scaled(Scale(X), X).tolist() == [0, 1, 4]


# --- results ------------------------------------------------------------------------------------


def test_static_leaves_come_back_as_they_are_and_double_precision_as_single():
    x, text, number, nothing = call(lambda x: (x, "t", 3, None), X, result=(STRUCT, "t", 3, None))
    assert (x.tolist(), text, number, nothing) == ([0, 1, 2], "t", 3, None)
    assert call(lambda x: np.asarray(x, np.float64), X).dtype == jnp.float32


def test_an_array_or_a_tracer_may_say_what_the_result_is_like():
    for form in (X, np.ones(3, np.float32)):
        assert call(lambda x: x, X, result=form).tolist() == [0, 1, 2]
    with jax.checking_leaks():
        same = filter_jit(lambda x: filter_pure_callback(lambda x: x, x, result_shape_dtypes=x))
        assert same(X).tolist() == [0, 1, 2]


def test_statics_alone_and_a_python_number_may_come_back():
    assert call(lambda x: "s", X, result="s") == "s"
    assert call(lambda: 1.5, result=jax.ShapeDtypeStruct((), jnp.float32)) == 1.5


# --- under other transformations ----------------------------------------------------------------


def shapes_under_vmap(**options):
    """What a callback returns under `jax.vmap`, and with arrays of which shapes it was called."""
    shapes = []

    def callback(x, y):
        shapes.append((x.shape, y.shape))
        return np.asarray(x) * np.asarray(y)

    def function(x):
        return filter_pure_callback(callback, x, X, result_shape_dtypes=STRUCT, **options)

    output = jax.vmap(function)(jnp.ones((2, 3)))
    assert output.tolist() == [[0, 1, 2]] * 2
    return shapes


def test_vmap_method_says_how_the_callback_is_called():
    expected = {
        "sequential": [((3,), (3,))] * 2,
        "expand_dims": [((2, 3), (1, 3))],
        "broadcast_all": [((2, 3), (2, 3))],
    }
    assert {each: shapes_under_vmap(vmap_method=each) for each in expected} == expected


def test_vectorized_is_the_older_form_of_vmap_method():
    assert shapes_under_vmap(vectorized=True) == [((2, 3), (3,))]
    assert shapes_under_vmap(vectorized=False) == [((3,), (3,))] * 2


def test_arrays_of_the_callback_are_no_batches_under_vmap():
    options = {"result_shape_dtypes": STRUCT, "vmap_method": "broadcast_all"}
    output = jax.vmap(lambda x: filter_pure_callback(Scale(X), x, **options))(jnp.ones((2, 3)))
    assert output.tolist() == [[0, 1, 2]] * 2


def test_sharding_is_where_the_callback_is_called():
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    assert call(lambda x: x, X, sharding=device).tolist() == [0, 1, 2]


# --- errors -------------------------------------------------------------------------------------


AB = {"a": [STRUCT, STRUCT]}
# What is expected, what comes, and what the error says.
OTHERS = {
    "container": ((STRUCT,), [X], r"Expected \(f32\[3\],\)"),
    "static": ((STRUCT, "t"), (X, "u"), r"'u' as result\[1\]; expected 't'"),
    "nothing": (STRUCT, None, "None"),
    "shape": (
        AB,
        {"a": [X, X[:2]]},
        r"returned f32\[2\]\(numpy\) as result\['a'\]\[1\]; expected f32\[3\]",
    ),
    "dtype": (
        AB,
        {"a": [X, X.astype(int)]},
        r"i32\[3\]\(numpy\) as result\['a'\]\[1\]; expected f32\[3\]",
    ),
    "kind": (AB, {"a": [X, "text"]}, r"'text' as result\['a'\]\[1\]; expected f32\[3\]"),
    "structure": (
        AB,
        {"a": [X]},
        r"(?s)Expected \{'a': \[f32\[3\], f32\[3\]\]\}; it returned \{'a': \[f32.*"
        r"Missing: result\['a'\]\[1\]\.",
    ),
    "more": (AB, {"a": [X, X], "b": X}, r"Unexpected: result\['b'\]\."),
}


def test_error_of_another_result_names_path_expected_and_came():
    for result, returned, message in OTHERS.values():
        came = jax.tree_util.tree_map(lambda x: x if type(x) is str else np.asarray(x), returned)
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            jax.block_until_ready(call(lambda came=came: came, result=result))


def test_error_of_another_batch_says_how_many_were_expected():
    def function(x):
        return filter_pure_callback(
            lambda x: np.asarray(x)[0], x, result_shape_dtypes=STRUCT, vmap_method="expand_dims"
        )

    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"f32\[3\]\(numpy\) as result; expected f32\[2,3\]"
    ):
        jax.block_until_ready(jax.vmap(function)(jnp.ones((2, 3))))


def test_methods_of_vmap_that_are_wrong_are_errors():
    with pytest.raises(ValueError, match="vmap_method"):
        call(lambda x: x, X, vmap_method="some")
    with pytest.raises(ValueError, match="not both; it got 'sequential' and True"):
        call(lambda x: x, X, vmap_method="sequential", vectorized=True)
