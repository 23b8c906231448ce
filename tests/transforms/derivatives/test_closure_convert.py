"""Where a test takes `eqx`, the same program holds on Equinox, whose behaviour is the measure."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxlike
from eqxlike import filter_closure_convert
from tests.beside_equinox import both

TWO, THREE = jnp.float32(2), jnp.float32(3)


def scaling_by(factor):
    return lambda x: factor * x


# --- what is closed over ------------------------------------------------------------------------


@both
def test_tracers_closed_over_are_consts(eqx):
    def function(z):
        converted = eqx.filter_closure_convert(scaling_by(z), TWO)
        assert [each is z for each in converted.consts] == [True]
        return converted(TWO)

    assert jax.grad(function)(THREE) == 2


@both
@pytest.mark.parametrize("factor", [THREE, jnp.int32(3)], ids=["float", "int"])
def test_arrays_closed_over_are_consts(eqx, factor):
    converted = eqx.filter_closure_convert(scaling_by(factor), factor)
    assert (converted.consts, converted(factor)) == ([factor], 9)


@both
def test_arrays_of_a_module_are_consts(eqx):
    class Model(eqx.Module):
        weight: Any

        def __call__(self, x):
            return self.weight * x

    assert eqx.filter_closure_convert(Model(THREE), TWO).consts == [THREE]


@both
def test_consts_are_leaves(eqx):
    converted = eqx.filter_closure_convert(scaling_by(THREE), TWO)
    doubled = jax.tree_util.tree_map(
        lambda leaf: leaf * 2 if eqx.is_array(leaf) else leaf, converted
    )
    assert doubled(TWO) == 12


@both
def test_may_leave_a_transformation_that_its_consts_belong_to(eqx):
    @eqx.filter_jit
    def make(factor):
        return eqx.filter_closure_convert(scaling_by(factor), TWO)

    assert make(THREE)(TWO) == 6


@both
def test_may_be_passed_to_a_transformation(eqx):
    converted = eqx.filter_closure_convert(scaling_by(THREE), TWO)
    assert eqx.filter_jit(lambda function, x: function(x))(converted, TWO) == 6
    assert eqx.filter_grad(lambda function: function(TWO))(converted).consts == [2]


@both
def test_opens_the_closure_to_a_custom_derivative(eqx):
    @eqx.filter_custom_jvp
    def apply(function, x):
        return function(x)

    @apply.def_jvp
    def _(primals, tangents):
        return apply(*primals), 7 * tangents[0].consts[0]

    def loss(z):
        return apply(eqx.filter_closure_convert(scaling_by(z), TWO), TWO)

    assert jax.grad(loss)(THREE) == 7


# --- calls --------------------------------------------------------------------------------------


@both
def test_arguments_and_output_may_be_anything(eqx):
    factor = THREE

    def function(x, label, *, options):
        return {"x": factor * x * options["scale"], "label": label, "n": 1}

    converted = eqx.filter_closure_convert(function, TWO, "s", options={"scale": TWO})
    output = converted(THREE, "s", options={"scale": THREE})
    assert output == {"x": 27.0, "label": "s", "n": 1}


def test_the_function_is_traced_once_and_never_run():
    seen = []
    converted = filter_closure_convert(lambda x: seen.append(x) or x, TWO)
    assert (converted(TWO), converted(THREE)) == (2, 3)
    assert [isinstance(each, jax.core.Tracer) for each in seen] == [True]


def test_struct_stands_for_an_array():
    struct = jax.ShapeDtypeStruct((2,), jnp.float32)
    assert filter_closure_convert(scaling_by(THREE), struct)(jnp.ones(2)).tolist() == [3, 3]


@both
@pytest.mark.parametrize("x", [np.float32(2), np.array(2, np.float32)], ids=repr)
def test_numpy_arrays_are_arrays(eqx, x):
    assert eqx.filter_closure_convert(scaling_by(THREE), TWO)(x) == 6


@both
def test_may_be_differentiated_and_vmapped(eqx):
    converted = eqx.filter_closure_convert(lambda x: THREE * x**2, TWO)
    assert jax.vmap(jax.grad(converted))(jnp.arange(3.0)).tolist() == [0, 6, 12]


def test_derivatives_of_their_own_are_kept():
    @eqxlike.filter_custom_jvp
    def straight_through(x):
        return jnp.round(x)

    straight_through.def_jvp(lambda primals, tangents: (straight_through(*primals), tangents[0]))
    assert jax.grad(filter_closure_convert(straight_through, TWO))(TWO) == 1


# --- errors -------------------------------------------------------------------------------------


CALLS = {
    "shape": ((jnp.ones(2), 2), {"key": TWO}, r"call.args\[0\] is f32\[2\]"),
    "dtype": ((jnp.int32(1), 2), {"key": TWO}, r"call.args\[0\] is i32\[\]"),
    "number for array": ((1.0, 2), {"key": TWO}, r"call.args\[0\] is 1.0"),
    "None for array": ((None, 2), {"key": TWO}, r"call.args\[0\] is None"),
    "static": ((TWO, 3), {"key": TWO}, r"example.args\[1\] is 2, and call.args\[1\] is 3"),
    "array for static": ((TWO, jnp.int32(2)), {"key": TWO}, r"call.args\[1\] is i32\[\]"),
    "length": ((TWO,), {"key": TWO}, "call.args is a tuple of length 1"),
    "keys": ((TWO, 2), {"other": TWO}, r"call.kwargs is a dict with the keys \['other'\]"),
}


@pytest.mark.parametrize(("args", "kwargs", "message"), CALLS.values(), ids=CALLS)
@both
def test_call_unlike_the_example_is_an_error(eqx, args, kwargs, message):
    factor = THREE
    converted = eqx.filter_closure_convert(lambda x, n, key: factor * x * n * key, TWO, 2, key=TWO)
    with pytest.raises(ValueError, match=message if eqx is eqxlike else "different"):
        converted(*args, **kwargs)


def test_equal_static_values_of_another_type_are_an_error():
    converted = filter_closure_convert(lambda x, n: x * n, TWO, 1)
    with pytest.raises(ValueError, match=r"example.args\[1\] is 1, and call.args\[1\] is True"):
        converted(TWO, True)


def test_what_is_no_function_is_an_error():
    with pytest.raises(TypeError, match="`filter_closure_convert` expects a function"):
        filter_closure_convert(3, TWO)


# --- what is known of it ------------------------------------------------------------------------


def labelled(factor, label="label"):
    return lambda x, y: ({"sum": factor * x + y}, label)


@both
def test_in_struct_is_the_example_with_shapes_for_arrays(eqx):
    converted = eqx.filter_closure_convert(labelled(THREE), TWO, y=2.0)
    struct = jax.ShapeDtypeStruct((), jnp.float32)
    assert converted.in_struct == ((struct,), {"y": 2.0})


@both
def test_out_struct_is_what_is_returned_with_shapes_for_arrays(eqx):
    converted = eqx.filter_closure_convert(labelled(THREE), TWO, y=2.0)
    assert converted.out_struct == ({"sum": jax.ShapeDtypeStruct((), jnp.float32)}, "label")


@both
def test_the_jaxpr_is_a_leaf(eqx):
    converted = eqx.filter_closure_convert(scaling_by(THREE), TWO)
    assert jax.tree.leaves(converted) == [converted.jaxpr, THREE]


@both
@pytest.mark.parametrize(
    ("factor", "label", "y", "is_same"),
    [(TWO, "label", 2.0, True), (TWO, "other", 2.0, False), (TWO, "label", TWO, False)],
    ids=["same", "another-output", "another-example"],
)
def test_two_have_one_treedef_where_all_but_jaxpr_and_consts_is_equal(
    eqx, factor, label, y, is_same
):
    first = eqx.filter_closure_convert(labelled(THREE), TWO, y=2.0)
    second = eqx.filter_closure_convert(labelled(factor, label), TWO, y=y)
    treedefs = [jax.tree.structure(each) for each in (first, second)]
    assert (treedefs[0] == treedefs[1]) is is_same
    assert not is_same or hash(treedefs[0]) == hash(treedefs[1])
