"""Custom derivatives: `filter_custom_jvp` and `filter_custom_vjp`."""

import copy
import inspect
import pickle
from typing import Any

import equinox
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

import eqxlike
from eqxlike import filter_custom_jvp, filter_custom_vjp, filter_grad, filter_jvp
from tests.transforms.derivatives.models import custom_jvp, custom_vjp
from tests.transforms.models import MESH, ROWS, WHOLE, Scale

each = pytest.mark.parametrize("name", ["filter_custom_jvp", "filter_custom_vjp"])
ONE, TWO, THREE = jnp.float32(1), jnp.float32(2), jnp.float32(3)


def with_derivative(name, function):
    """`function(x, *args)` with a custom derivative: the tangent or cotangent of `x` times 7."""
    if name == "filter_custom_jvp":
        return custom_jvp(function, lambda primals, tangents: (function(*primals), 7 * tangents[0]))
    return custom_vjp(function, None, lambda residuals, cotangent, *args: 7 * cotangent)


@filter_custom_jvp
def of_this_module(x, y: int = 2, *, key=None):
    """Doubles."""
    return x * y


@each
def test_custom_function_is_a_leaf_with_the_metadata_of_the_function(name):
    def loss(x, y: int = 3, *, key=None):
        """A loss."""

    custom = getattr(eqxlike, name)(loss)
    assert (custom.__name__, custom.__doc__, custom.__module__) == ("loss", "A loss.", __name__)
    assert custom.__wrapped__ is loss
    assert inspect.signature(custom) == inspect.signature(loss)
    assert jtu.tree_leaves(custom) == [custom]
    assert repr(getattr(eqxlike, name)(len)) == f"{name}(<built-in function len>)"


def test_derivative_that_is_set_after_a_call_does_not_change_the_call():
    custom = custom_vjp(lambda x: x, None, lambda *args: TWO)
    _, pullback = jax.vjp(custom, ONE)
    custom.def_bwd(lambda *args: THREE)
    assert pullback(ONE) == (TWO,)
    assert jax.grad(custom)(ONE) == THREE
    custom = custom_jvp(lambda x: x, lambda primals, tangents: (primals[0], TWO))
    program = jaxpr_as_fun(jax.make_jaxpr(custom)(ONE))
    custom.def_jvp(lambda primals, tangents: (primals[0], THREE))
    assert jax.jvp(program, (ONE,), (ONE,))[1] == [TWO]


def test_custom_function_is_pickled_by_name_and_copied_like_a_function():
    assert pickle.loads(pickle.dumps(of_this_module)) is of_this_module
    nameless = filter_custom_jvp(jnp.sin)
    with pytest.raises(pickle.PicklingError):
        pickle.dumps(nameless)
    custom = with_derivative("filter_custom_jvp", Scale(TWO))
    assert (custom(THREE), jax.grad(custom)(THREE)) == (6, 7)
    for function in (nameless, custom):
        assert copy.copy(function) is function
        assert copy.deepcopy([function])[0] is function


def test_custom_function_in_a_class_body_is_a_method():
    def model_of(eqx):
        class Model(eqx.Module):
            weight: Any

            @eqx.filter_custom_jvp
            def scale(self, x):
                """Scales."""
                return self.weight * x

            @scale.def_jvp
            def scale_jvp(primals, tangents):
                self, x = primals
                return self.weight * x, 7 * tangents[0].weight

        return Model(TWO)

    model = model_of(eqxlike)
    shown = model.scale(THREE), model.scale.__name__, model.scale.__doc__
    assert shown == (6, "scale", "Scales.")
    assert filter_grad(lambda model: model.scale(THREE))(model).weight == 7
    assert type(model).scale(model, THREE) == 6
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        model_of(equinox).scale(THREE)


# --- under transformations ----------------------------------------------------------------------


@each
def test_rule_is_used_only_under_differentiation(name):
    custom = with_derivative(name, lambda x, *others: (x, others))
    assert custom(TWO, 2.5, "s", None) == (2.0, (2.5, "s", None))
    product = with_derivative(name, lambda x, y, label: x * y)
    with jax.checking_leaks():
        assert jax.grad(lambda x: product(x, THREE, "label"))(TWO) == 7
    assert jax.grad(jax.jit(lambda x: product(x, THREE, "label")))(TWO) == 7


def test_one_traced_call_is_differentiated_with_respect_to_different_arguments():
    def rule(primals, tangents):
        of_x = [10 * t if i else t for i, t in enumerate(tangents[0]) if t is not None]
        return primals[0][0], sum(of_x)

    def backward(residuals, cotangent, perturbed, x):
        return tuple(
            cotangent * (10 * i or 1) if is_perturbed else None
            for i, is_perturbed in enumerate(perturbed)
        )

    product = lambda x: x[0] * x[1]
    for custom in (custom_jvp(product, rule), custom_vjp(product, None, backward)):
        jitted = jax.jit(lambda x, y: custom((x, y)))  # noqa: B023
        assert jax.grad(jitted, argnums=0)(TWO, THREE) == 1
        assert jax.grad(jitted, argnums=1)(TWO, THREE) == 10
        assert jax.grad(jitted, argnums=(0, 1))(TWO, THREE) == (1, 10)


@each
def test_error_of_a_closure_names_the_fix(name):
    def scale(x, function):
        return function(x)

    def loss(z):
        return with_derivative(name, scale)(TWO, lambda x: x * z)

    with pytest.raises(jax.errors.UnexpectedTracerError) as caught:
        jax.grad(loss)(THREE)
    notes = "".join(caught.value.__notes__)
    assert "This was while scale was called" in notes
    assert "filter_closure_convert" in notes


# --- the rule of forward mode -------------------------------------------------------------------


def test_rule_gets_none_as_the_tangent_of_other_arguments():
    seen = []

    def rule(primals, tangents):
        seen.append((primals, tangents))
        return primals[0], tangents[0]

    custom = custom_jvp(lambda x, other: x, rule)
    others = [THREE, np.float32(3), jnp.int32(3), jax.random.key(0), 2.5, 2, True, "s", None, len]
    for other in others:
        filter_jvp(custom, (TWO, other), (ONE, None))
        (x, passed), tangents = seen.pop()
        assert (x, tangents) == (2.0, (1.0, None))
        assert passed is other or passed == other


def test_value_comes_from_the_rule_and_may_hold_any_leaves():
    none = {"s": None, "n": None, "function": None}

    def function(x):
        return {"x": x, "f": 2.5, "s": "s", "n": 3, "function": jnp.sin}

    def rule(primals, tangents):
        return {**function(10 * primals[0])}, {"x": tangents[0], "f": 7 * tangents[0], **none}

    custom = custom_jvp(function, rule)
    assert custom(TWO) == eqxlike.filter_jit(custom)(TWO) == function(TWO)
    tangent = {"x": 1.0, "f": 7.0, **none}
    assert filter_jvp(custom, (TWO,), (ONE,)) == (function(jnp.float32(20)), tangent)


def test_tangent_none_means_a_subtree_of_zeros():
    custom = custom_jvp(
        lambda x: {"a": (x, x), "b": x}, lambda p, t: (custom(*p), {"a": None, "b": t[0]})
    )
    assert filter_jvp(custom, (TWO,), (ONE,))[1] == {"a": (None, None), "b": 1.0}
    assert jax.grad(lambda x: sum(custom(x)["a"]) + custom(x)["b"])(TWO) == 1


def test_deprecated_defjvp_passes_zeros():
    seen = []
    custom = filter_custom_jvp(lambda x, y, n, s, *, z: x)
    with pytest.warns(match="filter_custom_jvp.defjvp` is deprecated") as caught:
        rule = custom.defjvp(lambda p, t, *, z: (seen.append(t) or p[0], t[0]))
    assert (callable(rule), caught[0].filename) == (True, __file__)
    assert jax.grad(lambda x: custom(x, THREE, jnp.int32(1), "s", z=TWO))(TWO) == 1
    assert seen[0][1:] == (0.0, None, None)
    assert isinstance(seen[0][1], jax.Array)


# --- the passes of reverse mode -----------------------------------------------------------------


def test_gradient_may_be_a_number_or_none_and_is_ignored_for_other_leaves():
    for returned, expected in [(None, 0), (7.0, 7)]:
        custom = custom_vjp(lambda x: x, None, lambda *args, it=returned: it)
        assert jax.grad(custom)(TWO) == expected
    custom = custom_vjp(
        lambda tree: tree["a"],
        None,
        lambda residuals, cotangent, *args: {"a": cotangent, "b": ONE, "c": 3, "d": ONE},
    )
    assert jax.grad(lambda a: custom({"a": a, "b": TWO, "c": "s", "d": jnp.int32(1)}))(TWO) == 1


def test_gradient_none_means_a_subtree_of_zeros():
    def gradients(eqx):
        none = {"a": None, "b": None}
        custom = custom_vjp(lambda tree: tree["a"][0], None, lambda *args: none, eqx)
        return jax.grad(custom)({"a": (TWO, TWO), "b": TWO})

    assert gradients(eqxlike) == {"a": (0.0, 0.0), "b": 0.0}
    with pytest.raises(RuntimeError, match="must have the same structure"):
        gradients(equinox)


def test_deprecated_defvjp_takes_functions_without_perturbed():
    seen = []

    def backward(residuals, cotangent, tree, label):
        seen.append((residuals, cotangent, label))
        return (cotangent[0], None, None)

    custom = filter_custom_vjp(lambda tree, label: tree)
    with pytest.warns(match="filter_custom_vjp.defvjp` is deprecated") as caught:
        custom.defvjp(lambda tree, label: (tree, "residual"), backward)
    assert caught[0].filename == __file__
    assert jax.grad(lambda x: custom((x, THREE, jnp.int32(1)), "s")[0])(TWO) == 1
    assert seen == [("residual", (1.0, 0.0, None), "s")]


def test_differentiated_python_number_is_perturbed():
    scaled = custom_vjp(
        lambda v, x: jnp.sin(v) * x,
        lambda perturbed, v, x: (jnp.sin(v) * x, jnp.cos(v) if perturbed else None),
        lambda residuals, cotangent, perturbed, v, x: cotangent * residuals * x,
    )
    found = jax.grad(lambda v: scaled(v, 3.0))(2.0)
    np.testing.assert_allclose(found, 3 * np.cos(2.0), rtol=1e-6)


def test_batch_axis_may_differ_between_function_and_rule():
    # In a scan, the batch axis comes after the axis of steps. In the rule, it comes before.
    # `jax.custom_jvp` and `jax.custom_vjp` give wrong results here.
    def squares(xs):
        return jax.lax.scan(lambda carry, x: (carry, x * x), 0.0, xs)[1]

    with_jvp, with_vjp = filter_custom_jvp(squares), filter_custom_vjp(squares)
    with_jvp.def_jvp(lambda primals, tangents: (primals[0] ** 2, 2 * primals[0] * tangents[0]))
    with_vjp.def_fwd(lambda perturbed, xs: (xs**2, xs))
    with_vjp.def_bwd(lambda xs, cotangent, perturbed, _: 2 * xs * cotangent)
    x = jnp.arange(4.0).reshape(2, 2)
    for function in (with_jvp, with_vjp):
        value, pull_back = jax.vjp(jax.jit(jax.vmap(function)), x)
        np.testing.assert_array_equal(value, x**2)
        np.testing.assert_array_equal(pull_back(x)[0], 2 * x**2)


# --- inside jax.shard_map -------------------------------------------------------------------------


def scaled_square(name):
    """`weight * x**2`, with rules that return constants and partial sums of each device."""

    def rule(primals, tangents):
        ((weight, x), label), ((weight_dot, x_dot), _) = primals, tangents
        out_dot = jnp.zeros(x.shape)
        out_dot += 0 if x_dot is None else 2 * weight * x * x_dot
        out_dot += 0 if weight_dot is None else weight_dot * x**2
        return function((weight, x), label), out_dot

    def backward(residuals, cotangent, perturbed, pair, label):
        weight, x = pair
        shared = (cotangent * x**2).sum(0, keepdims=True) if perturbed[0] else None
        return shared, 2 * weight * x * cotangent if perturbed[1] else None

    function = lambda pair, label: pair[0] * pair[1] ** 2
    if name == "filter_custom_jvp":
        return custom_jvp(function, rule)
    return custom_vjp(function, None, backward)


@each
@pytest.mark.parametrize("check_vma", [True, False])
def test_derivatives_inside_shard_map_equal_derivatives_outside(name, check_vma):
    weight, x = jnp.array([[1.0, 3.0]]), jnp.arange(8.0).reshape(4, 2)
    function = scaled_square(name)

    def gradients(weight, x):
        """The gradients with respect to both arguments, and with respect to the weight only."""
        both = jax.grad(lambda pair: function(pair, "squares").sum())((weight, x))
        return both, jax.grad(lambda weight: function((weight, x), "squares").sum())(weight)

    def summed(weight, x):
        # With `check_vma` JAX sums the gradients of arrays that the devices share.
        (of_weight, of_x), alone = gradients(weight, x)
        total = (lambda each: each) if check_vma else (lambda each: jax.lax.psum(each, "data"))
        return (total(of_weight), of_x), total(alone)

    sharded = jax.shard_map(
        summed,
        mesh=MESH,
        in_specs=(WHOLE, ROWS),
        out_specs=((WHOLE, ROWS), WHOLE),
        check_vma=check_vma,
    )
    found = jax.jit(sharded)(weight, x)
    jax.tree.map(np.testing.assert_allclose, found, gradients(weight, x))


def test_constant_rules_inside_shard_map():
    custom = custom_jvp(lambda x: 2 * x, lambda primals, tangents: (jnp.zeros(2), tangents[0]))
    ones = custom_vjp(lambda x: x, backward=lambda *args: jnp.ones(2))

    def derivatives(x):
        value, pullback = eqxlike.filter_vjp(lambda x: {"x": 3 * x, "zero": x}, x)
        (pulled,) = pullback({"x": jnp.ones(value["x"].shape), "zero": None})
        return *jax.jvp(custom, (x,), (x,)), jax.grad(lambda x: ones(x).sum())(x), pulled

    x = jnp.arange(4.0)
    found = jax.jit(jax.shard_map(derivatives, mesh=MESH, in_specs=ROWS, out_specs=ROWS))(x)
    for one, expected in zip(found, (0 * x, x, jnp.ones(4), 3 * jnp.ones(4)), strict=True):
        np.testing.assert_array_equal(one, expected)
