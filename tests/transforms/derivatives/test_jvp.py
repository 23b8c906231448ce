"""`filter_jvp`, `filter_vjp`, and the tangents and cotangents that they accept."""

import copy
from typing import Any

import equinox
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import eqxlike
from eqxlike import filter_jvp, filter_vjp
from eqxlike._transforms._derivatives._tangents import check_structure, leaves_beside, tangents_of

ONE, TWO, THREE = jnp.float32(1), jnp.float32(2), jnp.float32(3)


class Model(eqxlike.Module):
    weight: Any
    others: Any = ()
    size: int = eqxlike.field(static=True, default=1)


# --- tangents of any tree -----------------------------------------------------------------------


def beside(tree, tangents):
    return leaves_beside(jtu.tree_structure(tree), tangents, "tangents", "primals")


def checked(leaf, tangent):
    treedef = jtu.tree_structure({"a": 0})
    return tangents_of([leaf], treedef, {"a": tangent}, "tangents", "primals")[0]


def test_none_stands_for_all_that_is_below():
    tree = {"a": [1, (2, 3)], "b": Model(4, (5,)), "c": 6}
    for tangents, expected in [
        (None, [None] * 6),
        ({"a": None, "b": Model(40, (50,)), "c": 60}, [None, None, None, 40, 50, 60]),
        ({"a": [10, None], "b": Model(40, None), "c": None}, [10, None, None, 40, None, None]),
    ]:
        assert beside(tree, tangents) == expected


STRUCTURES = [
    ([1, (2, 3)], [1, (2,)], "primals[1] is a tuple of length 2, and tangents[1] is a tuple of le"),
    (Model(1, (2,)), Model(1, 2), "primals.others is a tuple of length 1, and tangents.others is"),
    ((Model(1),), (Model(1, size=2),), "primals[0] is a node of type Model with size=1, and tang"),
    ((Model(1),), (ONE,), "primals[0] is a node of type Model, and tangents[0] is an array of sh"),
    ((1, None), (1, 2), "primals[1] is None, and tangents[1] is a leaf of type int"),
]


def test_another_structure_is_an_error_that_names_the_path():
    for tree, tangents, message in STRUCTURES:
        with pytest.raises(
            ValueError, match="tangents must have the structure of primals"
        ) as caught:
            beside(tree, tangents)
        assert f": {message}" in str(caught.value)
    loop = []
    loop.append(loop)
    with pytest.raises(ValueError, match=r"tangents\[0\]"):
        beside([(1, 2)], loop)


def test_structure_without_none_is_required_where_it_is_checked():
    treedef = jtu.tree_structure([1, (2, 3)])
    check_structure(treedef, [1, (2, 3)], "new", "old")
    with pytest.raises(ValueError, match="new must have the structure of old, and has None in it"):
        check_structure(treedef, [1, None], "new", "old")


def test_tangent_like_its_primal_is_kept():
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


def test_python_number_takes_the_dtype_of_its_primal():
    for leaf, tangent in [(jnp.bfloat16(1), 2.0), (jnp.complex64(1), 2.0), (jnp.complex64(1), 2j)]:
        output = checked(leaf, tangent)
        assert (output.dtype, output) == (leaf.dtype, tangent)


UNLIKE = [
    (None, 2, TypeError, "must be None, since primals['a'] is not differentiable; it is a leaf"),
    (ONE, jnp.ones(2), ValueError, "must have the shape of primals['a'], which is (); it has "),
    (ONE, 2, TypeError, "must have the dtype of primals['a'], which is float32; it has dtype "),
    (ONE, 2j, TypeError, "must have the dtype of primals['a'], which is float32; it has dtype "),
    (ONE, jnp.bfloat16(1), TypeError, "which is float32; it has dtype bfloat16"),
    (ONE, "b", TypeError, "must be an array like primals['a'], or None; it is a leaf of "),
    (ONE, (ONE,), TypeError, "must be an array like primals['a'], or None; it is a tuple of "),
]


def test_tangent_unlike_its_primal_is_an_error_that_names_the_path():
    for leaf, tangent, error, message in UNLIKE:
        with pytest.raises(error) as caught:
            checked(leaf, tangent)
        assert str(caught.value).startswith("tangents['a'] must ")
        assert message in str(caught.value)


# --- filter_jvp ---------------------------------------------------------------------------------


def test_returns_value_and_tangent_with_none_for_what_depends_on_nothing_with_a_tangent():
    def function(x, y, z):
        return x * y, y * z, jax.lax.stop_gradient(x), jnp.ones(2), x > y, x.astype(int), "s", 2.5

    value, tangent = filter_jvp(function, (TWO, THREE, ONE), (ONE, None, None))
    assert [*value[:3], *value[4:]] == [6.0, 3.0, 2.0, False, 2, "s", 2.5]
    assert tangent == (3.0, *(None,) * 7)
    # An array where it happens to be zero, and what depends on nothing stays what it is.
    assert filter_jvp(lambda x: x * 0, (TWO,), (ONE,)) == (0.0, 0.0)
    constant = np.ones(2)
    value, tangent = filter_jvp(lambda x: (constant, x), (TWO,), (ONE,))
    assert (value[0] is constant, tangent[0]) == (True, None)
    value, tangent = filter_jvp(lambda x: [x, (1, None), {"a": "b"}], (TWO,), (ONE,))
    assert jtu.tree_structure(value).flatten_up_to(tangent) == [1.0, None, None]


def test_without_tangents_the_function_is_called_with_its_arguments_and_nothing_is_traced():
    seen = []
    primals = (TWO, 2.5, "s")
    output = filter_jvp(lambda *args: seen.extend(args) or (args[0], "t"), primals, (None,) * 3)
    assert all(left is right for left, right in zip(seen, primals, strict=True))
    assert output == ((2.0, "t"), (None, None))


def test_keyword_arguments_are_passed_and_not_differentiated():
    for tangent, expected in ((1.0, (6.0, 3.0)), (None, (6.0, None))):
        assert filter_jvp(lambda x, *, y: x * y, (TWO,), (tangent,), y=THREE) == expected


def test_only_what_has_a_tangent_is_traced():
    for primal in (TWO, np.float32(2), np.full(1, 2, np.float32), 2.0, 2 + 0j):
        seen = []
        filter_jvp(seen.append, (primal,), (jnp.ones_like(jnp.asarray(primal)),))
        assert isinstance(seen[0], jax.core.Tracer)
    for primal in (TWO, jnp.int32(2), jax.random.key(0), 2.0, 2, True, "s", len):
        seen = []
        filter_jvp(lambda x, y: seen.append(x) or y, (primal, TWO), (None, ONE))  # noqa: B023
        assert seen[0] is primal


def test_output_of_a_python_number_is_an_array():
    value, tangent = filter_jvp(lambda x: x, (2.0,), (1.0,))
    assert (isinstance(value, jax.Array), value, tangent) == (True, 2.0, 1.0)
    assert isinstance(equinox.filter_jvp(lambda x: x, (2.0,), (1.0,))[0], float)


def test_zero_of_jax_is_accepted_beside_integers():
    zero = np.zeros((), jax.dtypes.float0)
    output = filter_jvp(lambda n, x: (n, 4 * x), (jnp.int32(2), TWO), (zero, ONE))
    assert output == ((2, 8.0), (None, 4.0))
    _, pullback = filter_vjp(lambda n, x: (n, x), jnp.int32(2), THREE)
    assert pullback((zero, ONE)) == pullback((None, ONE)) == (None, 1.0)


def test_none_stands_for_a_subtree_of_zeros():
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


def test_adds_nothing_to_the_jaxpr_and_leaks_no_tracers():
    def function(x):
        value, tangent = filter_jvp(lambda x, y: (x * y, y, "s"), (x, THREE), (ONE, None))
        return value[:2], tangent[0]

    with jax.checking_leaks():
        equations = jax.make_jaxpr(function)(TWO).eqns
    assert [each.primitive.name for each in equations] == ["mul", "mul"]


def test_what_is_no_function_is_an_error():
    with pytest.raises(TypeError, match="3 is not a callable object: `filter_jvp` expects"):
        filter_jvp(3, (TWO,), (ONE,))
    with pytest.raises(TypeError, match="3 is not a callable object: `filter_vjp` expects"):
        filter_vjp(3, TWO)


def test_primals_and_tangents_are_a_tuple_or_list_each():
    for primals, tangents, name in [(ONE, (ONE,), "primals"), ((ONE,), ONE, "tangents")]:
        with pytest.raises(TypeError, match=f"`{name}` must be a tuple or list with an element"):
            filter_jvp(lambda x: x, primals, tangents)
    with pytest.raises(TypeError, match=r"tangents\[0\].others must be None"):
        filter_jvp(lambda model: model.weight, (Model(TWO, "s"),), (Model(ONE, "s"),))


# --- filter_vjp ---------------------------------------------------------------------------------


def test_returns_the_value_and_a_function_from_cotangent_to_gradients():
    function = lambda x, y, s: ((x * y, s, 3, 2.5), {"y": y, "s": s})
    value, pullback, aux = filter_vjp(function, TWO, THREE, "s", has_aux=True)
    assert (value, aux) == ((6.0, "s", 3, 2.5), {"y": 3.0, "s": "s"})
    assert pullback((ONE, None, None, None)) == (3.0, 2.0, None)
    assert pullback((2.0, None, None, None)) == (6.0, 4.0, None)
    value, pullback = filter_vjp(lambda: TWO)
    assert (value, pullback(ONE)) == (2.0, ())


def test_gradients_have_none_for_what_is_no_inexact_array():
    leaves = [TWO, np.float32(2), jnp.complex64(2), jnp.int32(2), jax.random.key(0), 2.0, "s", None]
    value, pullback = filter_vjp(lambda model, x: (model.weight[0] * x, "s"), Model(leaves), THREE)
    gradient, of_x = pullback((ONE, None))
    assert (value, of_x) == ((6.0, "s"), 2.0)
    assert (type(gradient), gradient.weight) == (Model, [3.0, 0.0, 0.0, *(None,) * 5])


def test_aux_needs_a_pair_and_the_error_names_the_function_and_what_came():
    def loss(x):
        return {"loss": x}

    with pytest.raises(TypeError, match=r"loss must return a pair \(value, aux\); .* type dict"):
        filter_vjp(loss, TWO, has_aux=True)


def test_cotangent_none_stands_for_zero():
    def function(x, y):
        return {"product": x * y, "y": [y, y]}

    _, pullback = filter_vjp(function, TWO, THREE)
    assert pullback({"product": ONE, "y": None}) == (3.0, 2.0)
    assert pullback(None) == (0.0, 0.0)
    with pytest.raises(ValueError, match="unexpected tree structure"):
        equinox.filter_vjp(function, TWO, THREE)[1]({"product": ONE, "y": None})


def test_errors_of_cotangents_name_the_path():
    _, pullback = filter_vjp(lambda x: (x, "s"), TWO)
    for cotangent, error, message in [
        ({"a": ONE}, ValueError, r"output is a tuple of length 2, and cotangent is a dict"),
        ((jnp.ones(2), None), ValueError, r"cotangent\[0\] must have the shape of output\[0\], wh"),
        ((ONE, 1.0), TypeError, r"cotangent\[1\] must be None, since output\[1\] is not diff"),
    ]:
        with pytest.raises(error, match=message):
            pullback(cotangent)
    with pytest.raises(TypeError):
        pullback(ONE, ONE)


def test_cotangent_of_a_numpy_array_of_a_dtype_that_jax_lacks():
    _, pullback = filter_vjp(lambda x: (np.ones(2), x), TWO)
    assert pullback((None, ONE)) == pullback((jnp.ones(2), ONE)) == (1.0,)


def test_pullback_is_a_pytree_of_arrays_that_may_be_copied_vmapped_and_called_again():
    _, pullback = filter_vjp(lambda x: x**2, TWO)
    leaves, treedef = jtu.tree_flatten(pullback)
    assert all(map(eqxlike.is_array, leaves))
    for each in (pullback, treedef.unflatten(leaves), copy.copy(pullback)):
        assert each(ONE) == (4.0,)
    assert jax.vmap(lambda ct: pullback(ct)[0])(jnp.arange(3.0)).tolist() == [0, 4, 8]
