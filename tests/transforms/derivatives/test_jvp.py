"""Where a test takes `eqx`, the same program holds on Equinox, whose behaviour is the measure."""

from typing import Any

import equinox
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import eqxlike
from eqxlike import filter_jvp
from tests.beside_equinox import both

TWO, THREE, ONE = jnp.float32(2), jnp.float32(3), jnp.float32(1)


# --- output ------------------------------------------------------------------------------------


@both
def test_returns_value_and_tangent_with_none_beside_what_is_no_array(eqx):
    output = eqx.filter_jvp(lambda x, y: (x * y, {"s": "s", "n": 2.5}), (TWO, THREE), (ONE, ONE))
    assert output == ((6.0, {"s": "s", "n": 2.5}), (5.0, {"s": None, "n": None}))


@both
def test_tangent_is_none_for_what_depends_on_nothing_with_a_tangent(eqx):
    def function(x, y, z):
        return x * y, y * z, jax.lax.stop_gradient(x), jnp.ones(2), x > y, x.astype(int)

    _, tangent = eqx.filter_jvp(function, (TWO, THREE, ONE), (ONE, None, None))
    assert tangent == (3.0, None, None, None, None, None)


@both
def test_tangent_is_an_array_where_it_happens_to_be_zero(eqx):
    assert eqx.filter_jvp(lambda x: x * 0, (TWO,), (ONE,)) == (0.0, 0.0)


@both
def test_agrees_with_jax(eqx):
    def function(x, y):
        return jnp.sin(x) * y, x / y

    primals, tangents = (TWO, THREE), (ONE, TWO)
    ours, theirs = eqx.filter_jvp(function, primals, tangents), jax.jvp(function, primals, tangents)
    assert eqxlike.tree_equal(ours, theirs)


def test_agrees_with_finite_differences():
    def function(x):
        return np.sin(x["a"]) * x["b"]

    def at(step):
        return function({"a": np.float64(0.5) + step, "b": np.float64(2) - 3 * step})

    primal = {"a": jnp.float32(0.5), "b": TWO}
    _, tangent = filter_jvp(
        lambda x: jnp.sin(x["a"]) * x["b"], (primal,), ({"a": ONE, "b": jnp.float32(-3)},)
    )
    np.testing.assert_allclose(tangent, (at(1e-6) - at(-1e-6)) / 2e-6, rtol=1e-5)


@both
def test_the_tangent_of_a_module_is_a_module(eqx):
    class Model(eqx.Module):
        weight: Any
        activation: Any
        power: int = eqx.field(static=True, default=2)

    model = Model(TWO, jnp.tanh)
    value, tangent = eqx.filter_jvp(
        lambda model, x: (model, model.weight**model.power * x),
        (model, THREE),
        (Model(ONE, None), None),
    )
    assert (value[0].weight, value[0].activation, value[1]) == (2.0, jnp.tanh, 12.0)
    assert (tangent[0].weight, tangent[0].activation, tangent[1]) == (1.0, None, 12.0)


@both
def test_numpy_arrays_in_the_output_stay_what_they_are(eqx):
    constant = np.ones(2)
    value, tangent = eqx.filter_jvp(lambda x: (constant, x), (TWO,), (ONE,))
    assert (value[0] is constant, tangent[0]) == (True, None)


@both
def test_of_complex_arrays(eqx):
    primal, tangent = jnp.complex64(2 + 1j), jnp.complex64(1j)
    assert eqx.filter_jvp(lambda z: z * z, (primal,), (tangent,)) == (3 + 4j, -2 + 4j)


@both
def test_keyword_arguments_are_passed_and_not_differentiated(eqx):
    output = eqx.filter_jvp(lambda x, *, y, s: (x * y, s), (TWO,), (ONE,), y=THREE, s="s")
    assert output == ((6.0, "s"), (3.0, None))


# --- what the function is given -----------------------------------------------------------------


@both
def test_without_tangents_the_function_is_called_with_what_was_given(eqx):
    seen = []
    primals = (TWO, 2.5, "s")
    output = eqx.filter_jvp(lambda *args: seen.extend(args) or (args[0], "t"), primals, (None,) * 3)
    assert all(left is right for left, right in zip(seen, primals, strict=True))
    assert output == ((2.0, "t"), (None, None))


@both
@pytest.mark.parametrize(
    "primal", [TWO, np.float32(2), np.full(1, 2, np.float32), 2.0, 2 + 0j], ids=repr
)
def test_what_has_a_tangent_is_traced(eqx, primal):
    seen = []
    tangent = jnp.ones_like(jnp.asarray(primal))
    eqx.filter_jvp(lambda x: seen.append(x) or x, (primal,), (tangent,))
    assert isinstance(seen[0], jax.core.Tracer)


@both
@pytest.mark.parametrize("primal", [TWO, jnp.int32(2), jax.random.key(0), 2.0, 2, True, "s", len])
def test_what_has_no_tangent_is_passed_as_it_is(eqx, primal):
    seen = []
    eqx.filter_jvp(lambda x, y: seen.append(x) or y, (primal, TWO), (None, ONE))
    assert seen[0] is primal


@both
def test_python_number_may_have_a_tangent(eqx):
    value, tangent = eqx.filter_jvp(lambda x: 3 * x, (2.0,), (1.0,))
    assert (value, tangent) == (6.0, 3.0)


def test_output_of_a_python_number_is_an_array():
    value, _ = filter_jvp(lambda x: x, (2.0,), (1.0,))
    assert isinstance(value, jax.Array)
    assert isinstance(equinox.filter_jvp(lambda x: x, (2.0,), (1.0,))[0], float)


@both
def test_zero_of_jax_is_accepted_beside_integers(eqx):
    zero = np.zeros((), jax.dtypes.float0)
    output = eqx.filter_jvp(lambda n, x: (n, 4 * x), (jnp.int32(2), TWO), (zero, ONE))
    assert output == ((2, 8.0), (None, 4.0))


@both
def test_primals_may_be_a_list(eqx):
    assert eqx.filter_jvp(lambda x, y: x * y, [TWO, THREE], [None, ONE]) == (6.0, 2.0)


def test_none_stands_for_a_subtree_of_zeros():
    primals, tangents = ({"a": TWO}, THREE), (None, ONE)
    assert filter_jvp(lambda x, y: x["a"] * y, primals, tangents) == (6.0, 2.0)
    with pytest.raises(ValueError, match="same pytree structure"):
        equinox.filter_jvp(lambda x, y: x["a"] * y, primals, tangents)


# --- composition --------------------------------------------------------------------------------


def scaled(eqx):
    """A function of `x` whose output has each sort of leaf."""
    return lambda x: eqx.filter_jvp(
        lambda x, y: (x**2, y * 2, x > 0, "s", 1.5)[:3], (x, THREE), (ONE, None)
    )


@both
@pytest.mark.parametrize(
    "transform",
    [jax.jit, jax.vmap, jax.checkpoint, lambda f: lambda x: jax.jvp(f, (x,), (x,))[0]],
    ids=["jit", "vmap", "checkpoint", "jvp"],
)
def test_under_a_transformation(eqx, transform):
    x = jnp.arange(3.0)
    function = transform(scaled(eqx))
    (square, six, positive), tangent = function(x) if transform is jax.vmap else function(x[2])
    last = [leaf[-1] if jnp.ndim(leaf) else leaf for leaf in (square, six, positive, tangent[0])]
    assert (last, tangent[1:]) == ([4.0, 6.0, True, 4.0], (None, None))


@both
def test_of_a_filter_jitted_function(eqx):
    function = eqx.filter_jit(lambda x, y: (x * y, y, "s"))
    output = eqx.filter_jvp(function, (TWO, THREE), (ONE, None))
    assert output == ((6.0, 3.0, "s"), (3.0, None, None))


@both
def test_under_filter_jit(eqx):
    function = eqx.filter_jit(lambda x: eqx.filter_jvp(lambda x: (x**2, "s", x > 0), (x,), (x,)))
    assert function(TWO) == ((4.0, "s", True), (8.0, None, None))


@both
def test_of_itself(eqx):
    def derivative(x):
        return eqx.filter_jvp(lambda x: x**3, (x,), (ONE,))[1]

    assert eqx.filter_jvp(derivative, (TWO,), (ONE,)) == (12.0, 12.0)


@both
def test_gradient_of_a_tangent(eqx):
    assert jax.grad(lambda x: eqx.filter_jvp(lambda x: x**3, (x,), (ONE,))[1])(TWO) == 12


@both
def test_gradient_reaches_a_closed_over_array(eqx):
    assert jax.grad(lambda w: eqx.filter_jvp(lambda x: w * x * x, (TWO,), (ONE,))[1])(THREE) == 4


@both
def test_scan_keeps_what_has_no_tangent_apart(eqx):
    def function(x, y):
        return jax.lax.scan(lambda c, _: ((c[0] * 2, c[1] * 3), None), (x, y), None, length=2)[0]

    assert eqx.filter_jvp(function, (TWO, ONE), (ONE, None)) == ((8.0, 9.0), (4.0, None))


@both
def test_adds_nothing_to_the_jaxpr(eqx):
    def function(x):
        value, tangent = eqx.filter_jvp(lambda x, y: (x * y, y, "s"), (x, THREE), (ONE, None))
        return value[:2], tangent[0]

    equations = jax.make_jaxpr(function)(TWO).eqns
    assert [each.primitive.name for each in equations] == ["mul", "mul"]


def test_leaks_no_tracers():
    with jax.checking_leaks():
        value, tangent = filter_jvp(lambda x, y: (x * y, y, "s"), (TWO, THREE), (ONE, None))
    assert (value, tangent) == ((6.0, 3.0, "s"), (3.0, None, None))


def test_in_double_precision():
    with jax.enable_x64(True):
        value, tangent = filter_jvp(jnp.sin, (np.float64(0.5),), (1.0,))
        assert value.dtype == tangent.dtype == jnp.float64
        np.testing.assert_allclose(tangent, np.cos(0.5), rtol=1e-12)


# --- errors -------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize(
    ("primals", "tangents", "error"),
    [
        ((TWO,), (ONE, ONE), ValueError),
        (({"a": TWO},), ({"b": ONE},), ValueError),
        ((TWO,), (jnp.ones(2),), ValueError),
        ((TWO,), (jnp.bfloat16(1),), TypeError),
        ((TWO,), (1,), TypeError),
        ((2, TWO), (1, ONE), TypeError),
        ((jnp.int32(2), TWO), (jnp.int32(1), ONE), TypeError),
        (("s", TWO), ("s", ONE), TypeError),
        (TWO, TWO, TypeError),
    ],
    ids=["length", "keys", "shape", "dtype", "int", "of int", "of int array", "of str", "array"],
)
def test_tangents_unlike_the_primals_are_an_error(eqx, primals, tangents, error):
    with pytest.raises(error):
        eqx.filter_jvp(lambda *args: args[-1], primals, tangents)


def test_the_error_names_the_path():
    class Model(eqxlike.Module):
        weight: Any
        activation: Any

    model = Model(TWO, jnp.tanh)
    with pytest.raises(TypeError, match=r"tangents\[0\].activation must be None"):
        filter_jvp(lambda model: model.weight, (model,), (model,))


def test_primals_that_are_no_sequence_are_an_error():
    with pytest.raises(TypeError, match="`primals` must be a tuple or list with an element for "):
        filter_jvp(lambda x: x, jnp.ones(2), (ONE,))


def test_what_is_no_function_is_an_error():
    with pytest.raises(TypeError, match="3 is not a callable object: `filter_jvp` expects"):
        filter_jvp(3, (TWO,), (ONE,))


@both
def test_what_the_function_raises_passes_through(eqx):
    def function(x):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        eqx.filter_jvp(function, (TWO,), (ONE,))


def test_tree_of_the_tangent_is_that_of_the_value():
    value, tangent = filter_jvp(lambda x: [x, (1, None), {"a": "b"}], (TWO,), (ONE,))
    assert jtu.tree_structure(value).flatten_up_to(tangent) == [1.0, None, None]
