"""Where a test takes `eqx`, the same program holds on Equinox, whose behaviour is the measure."""

import inspect
from typing import Any

import equinox
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.extend.core import jaxpr_as_fun

import eqxlike
from eqxlike import filter_eval_shape, filter_make_jaxpr
from tests.beside_equinox import both

MATRIX = jnp.ones((2, 3))

# NumPy makes an array of each shape without compiling anything.
DTYPES = st.sampled_from([np.float32, np.int32, np.bool_, jnp.bfloat16])
ARRAYS = st.builds(np.zeros, st.lists(st.integers(0, 3), max_size=3), DTYPES)
TREES = st.recursive(
    ARRAYS | st.sampled_from(["a", 1, 2.5, None, True]),
    lambda trees: st.lists(trees, max_size=3) | st.dictionaries(st.sampled_from("ab"), trees),
    max_leaves=6,
)


def to_struct(leaf):
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if eqxlike.is_array(leaf) else leaf


def describe(tree):
    """Structs as pairs: two are equal if shape and dtype are."""
    return jtu.tree_map(lambda x: (x.shape, x.dtype) if hasattr(x, "shape") else x, tree)


def test_has_the_parameters_of_equinox():
    def parameters(library):
        signature = inspect.signature(library.filter_eval_shape)
        return [(p.name, p.kind, p.default) for p in signature.parameters.values()]

    assert parameters(eqxlike) == parameters(equinox)


# --- laws ---------------------------------------------------------------------------------------


@given(TREES)
def test_of_the_identity_is_a_struct_for_each_array(tree):
    assert describe(filter_eval_shape(lambda tree: tree, tree)) == describe(tree)


@given(TREES)
def test_structs_may_stand_for_arrays(tree):
    structs = jtu.tree_map(to_struct, tree)
    assert describe(filter_eval_shape(lambda tree: tree, structs)) == describe(tree)


@given(ARRAYS)
def test_is_the_shape_of_the_output(x):
    def function(x):
        return {"total": x.max(initial=0), "parts": (x[None], x.T), "rank": x.ndim, "name": "n"}

    # On a NumPy array, the function gives NumPy arrays.
    assert describe(filter_eval_shape(function, x)) == describe(function(x))


@given(ARRAYS)
def test_agrees_with_jax_on_arrays(x):
    def function(x):
        return jnp.cumsum(x), x.T

    assert describe(filter_eval_shape(function, x)) == describe(jax.eval_shape(function, x))


# --- behaviour ----------------------------------------------------------------------------------


@both
def test_what_is_no_array_is_passed_and_returned_as_it_is(eqx):
    total, name, number = eqx.filter_eval_shape(lambda x, n: (x.sum(), n, 2.5), MATRIX, "n")
    assert (total.shape, name, number) == ((), "n", 2.5)


@both
def test_a_python_number_stays_one(eqx):
    assert eqx.filter_eval_shape(lambda x: x * 2, 2.0) == 4.0


@both
def test_a_function_is_returned_by_reference(eqx):
    assert eqx.filter_eval_shape(lambda x: jnp.sin, MATRIX) is jnp.sin


@both
def test_keyword_arguments_are_passed(eqx):
    struct = eqx.filter_eval_shape(
        lambda x, *, axis, y: (x + y).sum(axis), MATRIX, axis=0, y=MATRIX
    )
    assert struct.shape == (3,)


@both
def test_the_class_of_a_module_gives_a_module_of_structs(eqx):
    class Model(eqx.Module):
        weight: Any
        name: str = eqx.field(static=True)

        def __init__(self, size, key):
            self.weight = jax.random.normal(key, (size, 2))
            self.name = "n"

    model = eqx.filter_eval_shape(Model, 3, jax.random.key(0))
    assert (type(model), model.weight.shape, model.name) == (Model, (3, 2), "n")


@both
def test_a_module_of_arrays_may_be_the_function(eqx):
    class Model(eqx.Module):
        weight: Any

        def __call__(self, x):
            return self.weight @ x

    assert eqx.filter_eval_shape(Model(MATRIX), jnp.ones(3)).shape == (2,)


@both
def test_a_module_of_structs_may_be_an_argument(eqx):
    class Model(eqx.Module):
        weight: Any

        def __call__(self, x):
            return self.weight @ x

    model = Model(jax.ShapeDtypeStruct((2, 3), jnp.float32))
    assert eqx.filter_eval_shape(lambda model, x: model(x), model, jnp.ones(3)).shape == (2,)


@both
def test_a_numpy_array_gives_a_struct(eqx):
    struct = eqx.filter_eval_shape(lambda x: x, np.ones(2, np.float32))
    assert (type(struct), struct.shape) == (jax.ShapeDtypeStruct, (2,))


@both
def test_a_typed_key_gives_a_struct_of_its_dtype(eqx):
    key = jax.random.key(0)
    assert eqx.filter_eval_shape(lambda key: key, key).dtype == key.dtype


@both
@pytest.mark.parametrize("x", [jnp.array(1.0), jnp.ones(())], ids=["weak", "strong"])
def test_weak_types_are_kept(eqx, x):
    struct = eqx.filter_eval_shape(lambda x: 2 * x, x)
    assert struct.weak_type is x.weak_type


@both
def test_nothing_is_computed(eqx):
    computed = []

    def function(x):
        return jax.pure_callback(lambda x: computed.append(x), x, x)

    assert eqx.filter_eval_shape(function, MATRIX).shape == (2, 3)
    assert computed == []


@both
def test_works_under_jit(eqx):
    ones = jax.jit(lambda x: jnp.ones(eqx.filter_eval_shape(jnp.transpose, x).shape))
    assert ones(MATRIX).shape == (3, 2)


@both
def test_works_under_grad_and_vmap(eqx):
    def scaled(x):
        return x.sum() * eqx.filter_eval_shape(lambda x: x, x).shape[0]

    assert jax.vmap(jax.grad(scaled))(MATRIX).tolist() == [[3, 3, 3]] * 2


@both
def test_leaks_no_tracers(eqx):
    with jax.checking_leaks():
        struct = eqx.filter_eval_shape(lambda x: {"double": 2 * x, "name": "n"}, MATRIX)
    assert struct["double"].shape == (2, 3)


# --- errors -------------------------------------------------------------------------------------


@both
def test_shapes_that_do_not_fit_are_the_error_of_jax(eqx):
    with pytest.raises(TypeError, match=r"got \(3,\) and \(2,\)"):
        eqx.filter_eval_shape(lambda x: x @ x, MATRIX)


@both
def test_what_is_no_function_is_an_error(eqx):
    with pytest.raises(TypeError, match="'int' object is not callable"):
        eqx.filter_eval_shape(3)


@both
def test_what_the_function_raises_passes_through(eqx):
    def function():
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        eqx.filter_eval_shape(function)


@both
def test_reading_a_value_is_the_error_of_jax(eqx):
    with pytest.raises(jax.errors.ConcretizationTypeError):
        eqx.filter_eval_shape(lambda x: float(x.sum()), MATRIX)


# --- filter_make_jaxpr --------------------------------------------------------------------------


def test_make_jaxpr_has_the_parameters_of_equinox():
    one, other = (inspect.signature(eqx.filter_make_jaxpr) for eqx in (eqxlike, equinox))
    assert list(one.parameters) == list(other.parameters)


def test_jaxpr_is_that_of_jax_for_the_arrays_alone():
    def function(tree, how):
        return {"out": jnp.sin(tree["x"]) @ tree["y"] if how == "product" else None, "how": how}

    def flat(x, y):
        return jnp.sin(x) @ y

    vector = jnp.ones(3)
    jaxpr, _, _ = filter_make_jaxpr(function)({"x": MATRIX, "y": vector, "z": 1}, "product")
    assert str(jaxpr) == str(jax.make_jaxpr(flat)(MATRIX, vector))


def test_jaxpr_is_evaluated_by_jax():
    jaxpr, _, static = filter_make_jaxpr(lambda x, n: (n * x, n))(MATRIX, 2.0)
    (doubled,) = jaxpr_as_fun(jaxpr)(MATRIX)
    assert (doubled.tolist(), static) == ((2 * MATRIX).tolist(), (None, 2.0))


def test_structs_and_statics_make_the_output():
    def function(x):
        return {"x": x, "n": [3, None]}

    _, structs, static = filter_make_jaxpr(function)(MATRIX)
    assert describe(eqxlike.combine(structs, static)) == describe(function(MATRIX))


def test_method_is_bound_before_its_jaxpr_is_made():
    class Model(eqxlike.Module):
        weight: Any

        @filter_make_jaxpr
        def scale(self, x):
            return self.weight * x

    jaxpr, struct, _ = Model(MATRIX).scale(jnp.ones((2, 3)))
    assert (len(jaxpr.in_avals), struct.shape) == (2, (2, 3))


def test_jaxpr_of_what_is_no_function_is_an_error():
    with pytest.raises(TypeError, match="3 is not a callable object"):
        filter_make_jaxpr(3)
