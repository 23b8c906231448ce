"""`filter_eval_shape` and `filter_make_jaxpr`."""

from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from jax.extend.core import jaxpr_as_fun

import eqxlike
from eqxlike import filter_eval_shape, filter_make_jaxpr
from tests.examples import at_most

MATRIX = jnp.ones((2, 3))

# NumPy makes arrays without compiling a program for each shape.
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
    """Replaces structs by pairs of shape and dtype."""
    return jtu.tree_map(lambda x: (x.shape, x.dtype) if hasattr(x, "shape") else x, tree)


@at_most(15)
@given(TREES)
def test_shape_of_the_identity_has_a_struct_for_each_array_or_struct(tree):
    for each in (tree, jtu.tree_map(to_struct, tree)):
        assert describe(filter_eval_shape(lambda tree: tree, each)) == describe(tree)


def test_other_leaves_than_arrays_are_passed_and_nothing_is_computed():
    computed = []

    def function(x, n, *, axis, y):
        return jax.pure_callback(computed.append, x, x + y).sum(axis), n, 2.5

    total, name, number = filter_eval_shape(function, MATRIX, "n", axis=0, y=MATRIX)
    assert (type(total), total.shape, name, number) == (jax.ShapeDtypeStruct, (3,), "n", 2.5)
    assert computed == []
    assert filter_eval_shape(lambda x: x * 2, 2.0) == 4.0


def test_modules_are_constructed_called_and_passed():
    class Model(eqxlike.Module):
        weight: Any
        name: str = eqxlike.field(static=True)

        def __init__(self, rows, weight):
            self.weight = weight if rows is None else jax.random.normal(weight, (rows, 2))
            self.name = "n"

        def __call__(self, x):
            return self.weight @ x

    model = filter_eval_shape(Model, 3, jax.random.key(0))
    assert (type(model), model.weight.shape, model.name) == (Model, (3, 2), "n")
    assert filter_eval_shape(Model(None, MATRIX), jnp.ones(3)).shape == (2,)
    assert filter_eval_shape(lambda model, x: model(x), model, jnp.ones(2)).shape == (3,)


# --- filter_make_jaxpr --------------------------------------------------------------------------


def test_jaxpr_equals_the_jaxpr_of_jax_for_the_arrays():
    def function(tree, how):
        return {"out": jnp.sin(tree["x"]) @ tree["y"] if how == "product" else None, "how": how}

    vector = jnp.ones(3)
    jaxpr, _, _ = filter_make_jaxpr(function)({"x": MATRIX, "y": vector, "z": 1}, "product")
    assert str(jaxpr) == str(jax.make_jaxpr(lambda x, y: jnp.sin(x) @ y)(MATRIX, vector))


def test_jaxpr_is_evaluated_by_jax_and_has_the_output_structure():
    make_jaxpr = filter_make_jaxpr(lambda x, n, *, y: (n * x + y, [n, None]))
    jaxpr, structs, static = make_jaxpr(to_struct(MATRIX), 2.0, y=MATRIX)
    (tripled,) = jaxpr_as_fun(jaxpr)(MATRIX, MATRIX)
    assert (tripled.tolist(), static) == ((3 * MATRIX).tolist(), (None, [2.0, None]))
    assert describe(eqxlike.combine(structs, static)) == describe((MATRIX, [2.0, None]))


def test_jaxpr_of_a_method_has_the_instance_as_argument():
    class Model(eqxlike.Module):
        weight: Any

        @filter_make_jaxpr
        def scale(self, x):
            return self.weight * x

    jaxpr, struct, _ = Model(MATRIX).scale(jnp.ones((2, 3)))
    assert (len(jaxpr.in_avals), struct.shape) == (2, (2, 3))
