"""Where a test takes `eqx`, the same program holds on Equinox, whose behaviour is the measure."""

import inspect
from typing import Any

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxlike
from eqxlike import filter_jit, filter_pure_callback
from tests.beside_equinox import both

X = jnp.arange(3.0)
STRUCT = jax.ShapeDtypeStruct((3,), jnp.float32)


def call(eqx, callback, *args, result=STRUCT, under=None, **kwargs):
    """Calls `callback` from compiled code."""

    def function(args):
        return eqx.filter_pure_callback(callback, *args, result_shape_dtypes=result, **kwargs)

    return (eqx.filter_jit if under is None else under)(function)(args)


def test_has_the_parameters_of_equinox():
    def parameters(library):
        signature = inspect.signature(library.filter_pure_callback)
        return [(p.name, p.kind, p.default) for p in signature.parameters.values()]

    assert parameters(eqxlike) == parameters(equinox)


# --- arguments ----------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("is_compiled", [True, False])
def test_arrays_are_passed_as_jax_arrays_and_all_else_as_it_is(eqx, is_compiled):
    seen = []

    def callback(x, tree, *, name):
        seen.append((isinstance(x, jax.Array), isinstance(tree["y"], jax.Array), tree["n"], name))
        return x

    under = None if is_compiled else lambda function: function
    call(eqx, callback, X, {"y": np.ones(2), "n": 2}, name="n", under=under)
    assert seen == [(True, True, 2, "n")]


@both
def test_keyword_arguments_may_be_arrays(eqx):
    assert call(eqx, lambda x, *, y: np.asarray(x) + np.asarray(y), X, y=X).tolist() == [0, 2, 4]


@both
def test_modules_go_in_and_come_out(eqx):
    class Model(eqx.Module):
        weight: Any
        name: str = eqx.field(static=True)

    doubled = call(
        eqx,
        lambda model: Model(2 * np.asarray(model.weight), model.name),
        Model(X, "n"),
        result=Model(STRUCT, "n"),
    )
    assert (doubled.weight.tolist(), doubled.name) == ([0, 2, 4], "n")


@both
def test_a_static_argument_need_not_be_hashable(eqx):
    def output(x):
        return eqx.filter_pure_callback(
            lambda x, s: np.asarray(x) + len(s), x, {1}, result_shape_dtypes=STRUCT
        )

    assert eqx.filter_jit(output)(X).tolist() == [1, 2, 3]


@both
def test_a_typed_key_is_passed_as_its_data(eqx):
    shape = jax.ShapeDtypeStruct((1,), jnp.int32)
    assert call(eqx, lambda key: np.int32(key.shape), jax.random.key(0), result=shape) == 2


@both
def test_a_callback_without_arrays_is_called(eqx):
    assert call(eqx, lambda: np.ones(3, np.float32)).tolist() == [1, 1, 1]


def test_a_module_that_is_the_callback_may_hold_traced_arrays():
    class Model(eqxlike.Module):
        weight: Any

        def __call__(self, x):
            return np.asarray(self.weight) * np.asarray(x)

    @filter_jit
    def scaled(model, x):
        return filter_pure_callback(model, x, result_shape_dtypes=STRUCT)

    assert scaled(Model(X), X).tolist() == [0, 1, 4]


# --- results ------------------------------------------------------------------------------------


@both
def test_static_leaves_come_back_as_they_are(eqx):
    x, text, number, nothing = call(
        eqx, lambda x: (x, "t", 3, None), X, result=(STRUCT, "t", 3, None)
    )
    assert (x.tolist(), text, number, nothing) == ([0, 1, 2], "t", 3, None)


@both
@pytest.mark.parametrize("form", [X, np.ones(3, np.float32)], ids=["jax", "numpy"])
def test_an_array_may_say_what_the_result_is_like(eqx, form):
    assert call(eqx, lambda x: x, X, result=form).tolist() == [0, 1, 2]


@both
def test_a_tracer_may_say_what_the_result_is_like(eqx):
    with jax.checking_leaks():
        same = eqx.filter_jit(
            lambda x: eqx.filter_pure_callback(lambda x: x, x, result_shape_dtypes=x)
        )
        assert same(X).tolist() == [0, 1, 2]


@both
def test_double_precision_is_taken_for_single(eqx):
    assert call(eqx, lambda x: np.asarray(x, np.float64), X).dtype == jnp.float32


@both
def test_nothing_but_statics_may_come_back(eqx):
    assert call(eqx, lambda x: "s", X, result="s") == "s"


def test_a_python_number_is_taken_for_an_array_of_rank_0():
    struct = jax.ShapeDtypeStruct((), jnp.float32)
    assert call(eqxlike, lambda: 1.5, result=struct) == 1.5


# --- under other transformations ----------------------------------------------------------------


def shapes_under_vmap(eqx, **options):
    """What a callback returns under `jax.vmap`, and with arrays of which shapes it was called."""
    shapes = []

    def callback(x, y):
        shapes.append((x.shape, y.shape))
        return np.asarray(x) * np.asarray(y)

    def function(x):
        return eqx.filter_pure_callback(callback, x, X, result_shape_dtypes=STRUCT, **options)

    output = jax.vmap(function)(jnp.ones((2, 3)))
    assert output.tolist() == [[0, 1, 2]] * 2
    return shapes


@both
@pytest.mark.parametrize(
    ("method", "shapes"),
    [
        ("sequential", [((3,), (3,))] * 2),
        ("expand_dims", [((2, 3), (1, 3))]),
        ("broadcast_all", [((2, 3), (2, 3))]),
    ],
)
def test_vmap_method_says_how_the_callback_is_called(eqx, method, shapes):
    assert shapes_under_vmap(eqx, vmap_method=method) == shapes


@pytest.mark.parametrize(
    ("vectorized", "shapes"), [(True, [((2, 3), (3,))]), (False, [((3,), (3,))] * 2)]
)
def test_vectorized_is_the_older_form_of_vmap_method(vectorized, shapes):
    assert shapes_under_vmap(eqxlike, vectorized=vectorized) == shapes


def test_arrays_of_the_callback_are_no_batches_under_vmap():
    class Model(eqxlike.Module):
        weight: Any

        def __call__(self, x):
            return np.asarray(self.weight).reshape(3) * np.asarray(x)

    function = filter_pure_callback
    output = jax.vmap(
        lambda x: function(Model(X), x, result_shape_dtypes=STRUCT, vmap_method="broadcast_all")
    )(jnp.ones((2, 3)))
    assert output.tolist() == [[0, 1, 2]] * 2


@both
def test_without_vmap_method_vmap_is_the_error_of_jax(eqx):
    with pytest.raises(NotImplementedError, match="vmap_method"):
        shapes_under_vmap(eqx)


@both
def test_statics_come_back_under_filter_vmap(eqx):
    def function(x):
        return eqx.filter_pure_callback(
            lambda x: (x, "t"), x, result_shape_dtypes=(STRUCT, "t"), vmap_method="sequential"
        )

    assert eqx.filter_vmap(function)(jnp.ones((2, 3)))[1] == "t"


@both
def test_a_gradient_is_the_error_of_jax(eqx):
    def function(x):
        return eqx.filter_pure_callback(lambda x: x, x, result_shape_dtypes=STRUCT).sum()

    with pytest.raises(ValueError, match="custom_jvp"):
        jax.grad(function)(X)


@both
def test_is_called_in_each_turn_of_a_scan(eqx):
    def step(x, _):
        callback = lambda x: np.asarray(x) + 1
        return eqx.filter_pure_callback(callback, x, result_shape_dtypes=STRUCT), None

    assert jax.lax.scan(step, X, None, length=3)[0].tolist() == [3, 4, 5]


@both
def test_sharding_is_where_the_callback_is_called(eqx):
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    assert call(eqx, lambda x: x, X, sharding=device).tolist() == [0, 1, 2]


# --- errors -------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize(
    ("result", "callback"),
    [
        ((STRUCT,), lambda x: [x]),
        ((STRUCT, "t"), lambda x: (x, "u")),
        (STRUCT, lambda x: x[:2]),
        (STRUCT, lambda x: np.asarray(x, np.int32)),
        (STRUCT, lambda x: None),
    ],
    ids=["structure", "static", "shape", "dtype", "nothing"],
)
def test_another_result_than_was_said_is_an_error(eqx, result, callback):
    with pytest.raises(jax.errors.JaxRuntimeError):
        call(eqx, callback, X, result=result).block_until_ready()


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (
            {"a": [X, X[:2]]},
            r"returned f32\[2\]\(numpy\) as result\['a'\]\[1\]; expected was f32\[3\]",
        ),
        (
            {"a": [X, X.astype(int)]},
            r"i32\[3\]\(numpy\) as result\['a'\]\[1\]; expected was f32\[3\]",
        ),
        ({"a": [X, "text"]}, r"'text' as result\['a'\]\[1\]; expected was f32\[3\]"),
        ({"a": [X]}, r"Expected was \{'a': \[f32\[3\], f32\[3\]\]\}; it returned \{'a': \[f32"),
        ({"a": [X]}, r"Missing: result\['a'\]\[1\]\.\n"),
        ({"a": [X, X], "b": X}, r"Not expected: result\['b'\]\.\n"),
    ],
    ids=["shape", "dtype", "kind", "structure", "missing", "more"],
)
def test_error_of_another_result_names_path_expected_and_came(returned, message):
    returned = jax.tree_util.tree_map(lambda x: x if type(x) is str else np.asarray(x), returned)
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        call(eqxlike, lambda: returned, result={"a": [STRUCT, STRUCT]})


def test_error_of_another_static_names_path_expected_and_came():
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"'u' as result\[1\]; expected was 't'"):
        call(eqxlike, lambda x: (x, "u"), X, result=(STRUCT, "t"))


def test_error_of_another_batch_says_how_many_were_expected():
    def function(x):
        return filter_pure_callback(
            lambda x: np.asarray(x)[0], x, result_shape_dtypes=STRUCT, vmap_method="expand_dims"
        )

    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"f32\[3\]\(numpy\) as result; expected was f32\[2,3\]"
    ):
        jax.vmap(function)(jnp.ones((2, 3)))


@both
def test_what_the_callback_raises_is_in_the_error(eqx):
    def callback(x):
        raise KeyError("mine")

    with pytest.raises(jax.errors.JaxRuntimeError, match="KeyError: 'mine'"):
        call(eqx, callback, X)


@both
def test_an_unknown_vmap_method_is_the_error_of_jax(eqx):
    with pytest.raises(ValueError, match="vmap_method"):
        call(eqx, lambda x: x, X, vmap_method="some")


def test_both_forms_of_vmap_method_are_an_error():
    with pytest.raises(ValueError, match="not both; it got 'sequential' and True"):
        call(eqxlike, lambda x: x, X, vmap_method="sequential", vectorized=True)


def test_what_is_no_function_is_an_error():
    with pytest.raises(TypeError, match="3 is not a callable object"):
        filter_pure_callback(3, X, result_shape_dtypes=STRUCT)
