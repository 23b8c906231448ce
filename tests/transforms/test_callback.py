"""`filter_pure_callback`: its arguments, results, batches and errors."""

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


def test_arrays_are_passed_as_jax_arrays_and_other_leaves_unchanged():
    seen = []

    def callback(x, tree, *, name, y):
        seen.append((isinstance(x, jax.Array), isinstance(tree["y"], jax.Array), tree["n"], name))
        return np.asarray(x) + np.asarray(y)

    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for options in ({"under": filter_jit}, {"under": lambda f: f}, {"sharding": device}):
        added = call(callback, X, {"y": np.ones(2), "n": 2}, name={"n"}, y=X, **options)
        assert added.tolist() == [0, 2, 4]
    assert seen == [(True, True, 2, {"n"})] * 3
    jaxpr = jax.make_jaxpr(lambda x: call(jnp.sin, x, under=lambda f: f, sharding=device))(X)
    assert jaxpr.eqns[0].params["sharding"] is not None
    # A typed key is passed as its data.
    shape = jax.ShapeDtypeStruct((1,), jnp.int32)
    assert call(lambda key: np.int32(key.shape), jax.random.key(0), result=shape) == 2


class Scale(eqxlike.Module):
    weight: Any

    def __call__(self, x):
        return np.asarray(self.weight).reshape(3) * np.asarray(x)


def test_callback_may_be_a_module_with_traced_arrays():
    @filter_jit
    def scaled(model, x):
        return filter_pure_callback(model, x, result_shape_dtypes=STRUCT)

    assert scaled(Scale(X), X).tolist() == [0, 1, 4]


# --- results ------------------------------------------------------------------------------------


def test_static_leaves_are_returned_unchanged_and_double_precision_becomes_single():
    # The text that the callback returns is equal, but a different object.
    callback = lambda x: (x, "".join("st"), 3, None)
    x, text, number, nothing = call(callback, X, result=(STRUCT, "st", 3, None))
    assert (x.tolist(), text, number, nothing) == ([0, 1, 2], "st", 3, None)
    assert call(lambda x: np.asarray(x, np.float64), X).dtype == jnp.float32
    assert call(lambda x: "s", X, result="s") == "s"
    assert call(lambda: 1.5, result=jax.ShapeDtypeStruct((), jnp.float32)) == 1.5


def test_result_shape_may_be_given_by_an_array_or_a_tracer():
    for form in (X, np.ones(3, np.float32)):
        assert call(lambda x: x, X, result=form).tolist() == [0, 1, 2]
    with jax.checking_leaks():
        same = filter_jit(lambda x: filter_pure_callback(lambda x: x, x, result_shape_dtypes=x))
        assert same(X).tolist() == [0, 1, 2]


# --- under other transformations ----------------------------------------------------------------


def shapes_under_vmap(**options):
    """The shapes of the arguments of a callback in its calls under `jax.vmap`."""
    shapes = []

    def callback(x, y):
        shapes.append((x.shape, y.shape))
        return np.asarray(x) * np.asarray(y)

    def function(x):
        return filter_pure_callback(callback, x, X, result_shape_dtypes=STRUCT, **options)

    output = jax.vmap(function)(jnp.ones((2, 3)))
    assert output.tolist() == [[0, 1, 2]] * 2
    return shapes


def test_vmap_method_selects_the_shapes_of_the_calls():
    for options, shapes in (
        ({"vmap_method": "sequential"}, [((3,), (3,))] * 2),
        ({"vmap_method": "expand_dims"}, [((2, 3), (1, 3))]),
        ({"vmap_method": "broadcast_all"}, [((2, 3), (2, 3))]),
        # The older option.
        ({"vectorized": True}, [((2, 3), (3,))]),
        ({"vectorized": False}, [((3,), (3,))] * 2),
    ):
        assert shapes_under_vmap(**options) == shapes


def test_arrays_of_the_callback_are_not_mapped():
    options = {"result_shape_dtypes": STRUCT, "vmap_method": "broadcast_all"}
    output = jax.vmap(lambda x: filter_pure_callback(Scale(X), x, **options))(jnp.ones((2, 3)))
    assert output.tolist() == [[0, 1, 2]] * 2


# --- errors -------------------------------------------------------------------------------------


AB = {"a": [STRUCT, STRUCT]}
SECOND = r"result\['a'\]\[1\]"
# Tuples (expected result, result of the callback, words of the error).
RESULTS = [
    ((STRUCT,), [X], r"Expected \(f32\[3\],\)"),
    ((STRUCT, "t"), (X, "u"), r"'u' as result\[1\]; expected 't'"),
    (STRUCT, None, "None"),
    (AB, {"a": [X, X[:2]]}, rf"returned f32\[2\]\(numpy\) as {SECOND}; expected f32\[3\]"),
    (AB, {"a": [X, X.astype(int)]}, rf"i32\[3\]\(numpy\) as {SECOND}; expected f32\[3\]"),
    (AB, {"a": [X, "text"]}, rf"'text' as {SECOND}; expected f32\[3\]"),
    (AB, {"a": [X]}, r"Expected \{'a': \[f32\[3\], f32\[3\]\]\}; it returned \{'a': \[f32"),
    (AB, {"a": [X]}, rf"Missing: {SECOND}\."),
    (AB, {"a": [X, X], "b": X}, r"Unexpected: result\['b'\]\."),
]


def test_error_of_a_result_names_its_path_and_the_expected_type():
    for result, returned, message in RESULTS:
        came = jax.tree_util.tree_map(lambda x: x if type(x) is str else np.asarray(x), returned)
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            jax.block_until_ready(call(lambda came=came: came, result=result))
    first = lambda x: np.asarray(x)[0]
    options = {"result_shape_dtypes": STRUCT, "vmap_method": "expand_dims"}
    message = r"f32\[3\]\(numpy\) as result; expected f32\[2,3\]"
    mapped = jax.vmap(lambda x: filter_pure_callback(first, x, **options))
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(mapped(jnp.ones((2, 3))))


def test_invalid_vmap_methods_raise():
    with pytest.raises(ValueError, match="vmap_method"):
        call(lambda x: x, X, vmap_method="some")
    with pytest.raises(ValueError, match="not both; it got 'sequential' and True"):
        call(lambda x: x, X, vmap_method="sequential", vectorized=True)
