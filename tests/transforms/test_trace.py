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
from tests.examples import at_most

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


# --- laws ---------------------------------------------------------------------------------------


@at_most(15)
@given(TREES)
def test_of_the_identity_is_a_struct_for_each_array_or_struct(tree):
    for each in (tree, jtu.tree_map(to_struct, tree)):
        assert describe(filter_eval_shape(lambda tree: tree, each)) == describe(tree)


@at_most(15)
@given(ARRAYS)
def test_is_the_shape_of_the_output_and_agrees_with_jax(x):
    def function(x):
        return {"total": x.max(initial=0), "parts": (x[None], x.T), "rank": x.ndim, "name": "n"}

    # On a NumPy array, the function gives NumPy arrays.
    assert describe(filter_eval_shape(function, x)) == describe(function(x))
    assert describe(filter_eval_shape(jnp.cumsum, x)) == describe(jax.eval_shape(jnp.cumsum, x))


# --- behaviour ----------------------------------------------------------------------------------


def test_has_the_parameters_of_equinox():
    def parameters(library):
        signature = inspect.signature(library.filter_eval_shape)
        return [(p.name, p.kind, p.default) for p in signature.parameters.values()]

    assert parameters(eqxlike) == parameters(equinox)
    one, other = (inspect.signature(eqx.filter_make_jaxpr) for eqx in (eqxlike, equinox))
    assert list(one.parameters) == list(other.parameters)
    wrapped = filter_make_jaxpr(describe)
    assert (wrapped.__name__, wrapped.__wrapped__) == ("describe", describe)


@both
def test_what_is_no_array_is_passed_and_returned_as_it_is(eqx):
    total, name, number = eqx.filter_eval_shape(lambda x, n: (x.sum(), n, 2.5), MATRIX, "n")
    assert (total.shape, name, number) == ((), "n", 2.5)
    assert eqx.filter_eval_shape(lambda x: x * 2, 2.0) == 4.0
    assert eqx.filter_eval_shape(lambda x: jnp.sin, MATRIX) is jnp.sin


def test_keyword_arguments_are_passed():
    struct = filter_eval_shape(lambda x, *, axis, y: (x + y).sum(axis), MATRIX, axis=0, y=MATRIX)
    assert struct.shape == (3,)


@both
def test_modules_are_made_called_and_passed(eqx):
    class Model(eqx.Module):
        weight: Any
        name: str = eqx.field(static=True)

        def __init__(self, rows, weight):
            self.weight = weight if rows is None else jax.random.normal(weight, (rows, 2))
            self.name = "n"

        def __call__(self, x):
            return self.weight @ x

    model = eqx.filter_eval_shape(Model, 3, jax.random.key(0))
    assert (type(model), model.weight.shape, model.name) == (Model, (3, 2), "n")
    assert eqx.filter_eval_shape(Model(None, MATRIX), jnp.ones(3)).shape == (2,)
    assert eqx.filter_eval_shape(lambda model, x: model(x), model, jnp.ones(2)).shape == (3,)


@both
def test_arrays_of_numpy_typed_keys_and_weak_types_give_their_structs(eqx):
    struct = eqx.filter_eval_shape(lambda x: x, np.ones(2, np.float32))
    assert (type(struct), struct.shape) == (jax.ShapeDtypeStruct, (2,))
    key = jax.random.key(0)
    assert eqx.filter_eval_shape(lambda key: key, key).dtype == key.dtype
    for x, is_weak in ((jnp.array(1.0), True), (jnp.ones(()), False)):
        assert eqx.filter_eval_shape(lambda x: 2 * x, x).weak_type is x.weak_type is is_weak


def test_nothing_is_computed_and_no_tracer_leaks():
    computed = []

    def function(x):
        return jax.pure_callback(lambda x: computed.append(x), x, x)

    assert filter_eval_shape(function, MATRIX).shape == (2, 3)
    assert computed == []
    with jax.checking_leaks():
        struct = filter_eval_shape(lambda x: {"double": 2 * x, "name": "n"}, MATRIX)
    assert struct["double"].shape == (2, 3)


def test_works_under_other_transformations():
    def scaled(x):
        return x.sum() * filter_eval_shape(lambda x: x, x).shape[0]

    assert jax.jit(jax.vmap(jax.grad(scaled)))(MATRIX).tolist() == [[3, 3, 3]] * 2


def test_errors_of_the_function_and_of_jax_pass_through():
    def fail():
        raise ZeroDivisionError("mine")

    for function, args, error, message in (
        (lambda x: x @ x, (MATRIX,), TypeError, r"got \(3,\) and \(2,\)"),
        (3, (), TypeError, "'int' object is not callable"),
        (fail, (), ZeroDivisionError, "mine"),
        (lambda x: float(x.sum()), (MATRIX,), jax.errors.ConcretizationTypeError, "float"),
    ):
        with pytest.raises(error, match=message):
            filter_eval_shape(function, *args)


# --- filter_make_jaxpr --------------------------------------------------------------------------


def test_jaxpr_is_that_of_jax_for_the_arrays_alone():
    def function(tree, how):
        return {"out": jnp.sin(tree["x"]) @ tree["y"] if how == "product" else None, "how": how}

    def flat(x, y):
        return jnp.sin(x) @ y

    vector = jnp.ones(3)
    jaxpr, _, _ = filter_make_jaxpr(function)({"x": MATRIX, "y": vector, "z": 1}, "product")
    assert str(jaxpr) == str(jax.make_jaxpr(flat)(MATRIX, vector))


def test_jaxpr_is_evaluated_by_jax_and_structs_and_statics_make_the_output():
    jaxpr, structs, static = filter_make_jaxpr(lambda x, n: (n * x, [n, None]))(MATRIX, 2.0)
    (doubled,) = jaxpr_as_fun(jaxpr)(MATRIX)
    assert (doubled.tolist(), static) == ((2 * MATRIX).tolist(), (None, [2.0, None]))
    assert describe(eqxlike.combine(structs, static)) == describe((MATRIX, [2.0, None]))


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
