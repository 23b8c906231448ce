"""`filter_jvp`, `filter_vjp`, and their tangents and cotangents."""

import copy

import equinox
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import eqxlike
from eqxlike import filter_jvp, filter_vjp
from tests.transforms.derivatives.models import beside, checked
from tests.transforms.models import Node

ONE, TWO, THREE = jnp.float32(1), jnp.float32(2), jnp.float32(3)


# --- tangents ---


def test_none_may_replace_a_subtree_of_tangents():
    tree = {"a": [1, (2, 3)], "b": Node(4, (5,)), "c": 6}
    for tangents, expected in [
        (None, [None] * 6),
        ({"a": None, "b": Node(40, (50,)), "c": 60}, [None, None, None, 40, 50, 60]),
        ({"a": [10, None], "b": Node(40, None), "c": None}, [10, None, None, 40, None, None]),
    ]:
        assert beside(tree, tangents) == expected


def test_tangent_like_its_primal_is_kept_and_a_python_number_takes_the_dtype_of_its_primal():
    for leaf, tangent in [
        (ONE, TWO),
        (ONE, np.float32(2)),
        (np.float64(1), TWO),
        (1.0, TWO),
        (1j, jnp.complex64(2)),
        (jax.ShapeDtypeStruct((2,), jnp.float32), jnp.ones(2)),
    ]:
        assert checked(leaf, tangent) is tangent
    assert checked(None, np.zeros(3, jax.dtypes.float0)) is None
    for leaf, tangent in [(jnp.bfloat16(1), 2.0), (jnp.complex64(1), 2.0), (jnp.complex64(1), 2j)]:
        output = checked(leaf, tangent)
        assert (output.dtype, output) == (leaf.dtype, tangent)


# --- filter_jvp ---------------------------------------------------------------------------------


def test_tangent_is_none_for_outputs_that_depend_on_no_tangent():
    def function(x, y, z):
        return x * y, y * z, jax.lax.stop_gradient(x), jnp.ones(2), x > y, x.astype(int), "s", 2.5

    value, tangent = filter_jvp(function, (TWO, THREE, ONE), (ONE, None, None))
    assert [*value[:3], *value[4:]] == [6.0, 3.0, 2.0, False, 2, "s", 2.5]
    assert tangent == (3.0, *(None,) * 7)
    # A tangent that is zero by chance is an array. A constant output stays the same object.
    assert filter_jvp(lambda x: x * 0, (TWO,), (ONE,)) == (0.0, 0.0)
    constant = np.ones(2)
    value, tangent = filter_jvp(lambda x: (constant, x), (TWO,), (ONE,))
    assert (value[0] is constant, tangent[0]) == (True, None)
    value, tangent = filter_jvp(lambda x: [x, (1, None), {"a": "b"}], (TWO,), (ONE,))
    assert jtu.tree_structure(value).flatten_up_to(tangent) == [1.0, None, None]


def test_only_arguments_with_a_tangent_are_traced():
    for primal in (TWO, np.float32(2), np.full(1, 2, np.float32), 2.0, 2 + 0j):
        seen = []
        filter_jvp(seen.append, (primal,), (jnp.ones_like(jnp.asarray(primal)),))
        assert isinstance(seen[0], jax.core.Tracer)
    for primal in (TWO, jnp.int32(2), jax.random.key(0), 2.0, 2, True, "s", len):
        for tangent in (ONE, None):
            seen = []
            function = lambda x, y, *, z: (seen.append((x, z)) or y, "t")  # noqa: B023
            output = filter_jvp(function, (primal, TWO), (None, tangent), z=THREE)
            assert output == ((2.0, "t"), (tangent, None))
            assert seen == [(primal, THREE)]
            assert seen[0][0] is primal
    # The output of a Python number is an array.
    value, tangent = filter_jvp(lambda x: x, (2.0,), (1.0,))
    assert (isinstance(value, jax.Array), value, tangent) == (True, 2.0, 1.0)
    assert isinstance(equinox.filter_jvp(lambda x: x, (2.0,), (1.0,))[0], float)


def test_float0_is_accepted_as_the_tangent_of_an_integer():
    zero = np.zeros((), jax.dtypes.float0)
    output = filter_jvp(lambda n, x: (n, 4 * x), (jnp.int32(2), TWO), (zero, ONE))
    assert output == ((2, 8.0), (None, 4.0))
    _, pullback = filter_vjp(lambda n, x: (n, x), jnp.int32(2), THREE)
    assert pullback((zero, ONE)) == pullback((None, ONE)) == (None, 1.0)


def test_none_means_a_subtree_of_zeros():
    primals, tangents = [{"a": TWO}, THREE], [None, ONE]
    assert filter_jvp(lambda x, y: x["a"] * y, primals, tangents) == (6.0, 2.0)
    with pytest.raises(ValueError, match="same pytree structure"):
        equinox.filter_jvp(lambda x, y: x["a"] * y, primals, tangents)


def test_tangents_of_tangents_and_of_closed_over_arrays():
    def derivative(x):
        return filter_jvp(lambda x: x**3, (x,), (ONE,))[1]

    assert filter_jvp(derivative, (TWO,), (ONE,)) == (12.0, 12.0)
    assert jax.grad(derivative)(TWO) == 12
    assert jax.grad(lambda w: filter_jvp(lambda x: w * x * x, (TWO,), (ONE,))[1])(THREE) == 4


def test_jvp_adds_nothing_to_the_jaxpr_and_leaks_no_tracers():
    def function(x):
        value, tangent = filter_jvp(lambda x, y: (x * y, y, "s"), (x, THREE), (ONE, None))
        return value[:2], tangent[0]

    with jax.checking_leaks():
        equations = jax.make_jaxpr(function)(TWO).eqns
    assert [each.primitive.name for each in equations] == ["mul", "mul"]


# --- filter_vjp ---------------------------------------------------------------------------------


def test_vjp_returns_the_value_and_a_function_from_cotangent_to_gradients():
    function = lambda x, y, s: ((x * y, s, 3, 2.5), {"y": y, "s": s})
    value, pullback, aux = filter_vjp(function, TWO, THREE, "s", has_aux=True)
    assert (value, aux) == ((6.0, "s", 3, 2.5), {"y": 3.0, "s": "s"})
    assert pullback((ONE, None, None, None)) == (3.0, 2.0, None)
    assert pullback((2.0, None, None, None)) == (6.0, 4.0, None)
    value, pullback = filter_vjp(lambda: TWO)
    assert (value, pullback(ONE)) == (2.0, ())


def test_vjp_gradient_is_none_for_other_leaves_than_inexact_arrays():
    leaves = [TWO, np.float32(2), jnp.complex64(2), jnp.int32(2), jax.random.key(0), 2.0, "s", None]
    value, pullback = filter_vjp(lambda model, x: (model.weight[0] * x, "s"), Node(leaves), THREE)
    gradient, of_x = pullback((ONE, None))
    assert (value, of_x) == ((6.0, "s"), 2.0)
    assert (type(gradient), gradient.weight) == (Node, [3.0, 0.0, 0.0, *(None,) * 5])


def test_cotangent_none_means_zero():
    def function(x, y):
        return {"product": x * y, "y": [y, y]}

    _, pullback = filter_vjp(function, TWO, THREE)
    assert pullback({"product": ONE, "y": None}) == (3.0, 2.0)
    assert pullback(None) == (0.0, 0.0)
    # A constant output may have a dtype that JAX does not support.
    _, pullback = filter_vjp(lambda x: (np.ones(2), x), TWO)
    assert pullback((None, ONE)) == pullback((jnp.ones(2), ONE)) == (1.0,)
    with pytest.raises(ValueError, match="unexpected tree structure"):
        equinox.filter_vjp(function, TWO, THREE)[1]({"product": ONE, "y": None})


def test_pullback_is_a_pytree_that_is_copied_vmapped_and_called_again():
    _, pullback = filter_vjp(lambda x: x**2, TWO)
    leaves, treedef = jtu.tree_flatten(pullback)
    assert all(map(eqxlike.is_array, leaves))
    for each in (pullback, treedef.unflatten(leaves), copy.copy(pullback)):
        assert each(ONE) == (4.0,)
    assert jax.vmap(lambda ct: pullback(ct)[0])(jnp.arange(3.0)).tolist() == [0, 4, 8]
