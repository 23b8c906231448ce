"""Where a test takes `eqx`, the same program holds on Equinox, whose behaviour is the measure."""

from typing import Any

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxlike
from tests.beside_equinox import both

TWO, THREE, ONE = jnp.float32(2), jnp.float32(3), jnp.float32(1)


def custom_vjp(eqx, function, forward=None, backward=None):
    """By default the residuals are `None`, and the gradient is the cotangent."""
    custom = eqx.filter_custom_vjp(function)
    custom.def_fwd(
        forward or (lambda perturbed, *args, **kwargs: (function(*args, **kwargs), None))
    )
    custom.def_bwd(backward or (lambda residuals, cotangent, *args, **kwargs: cotangent))
    return custom


# --- what forward and backward are given --------------------------------------------------------


@both
def test_perturbed_says_which_leaves_are_differentiated(eqx):
    class Model(eqx.Module):
        weight: Any
        bias: Any
        activation: Any
        count: int = eqx.field(static=True, default=2)

    seen = []

    def forward(perturbed, model_and_x):
        seen.append(perturbed)
        return model_and_x[0].weight, None

    def backward(residuals, cotangent, perturbed, model_and_x):
        seen.append(perturbed)
        return Model(7 * cotangent, None, None), None

    custom = custom_vjp(eqx, lambda model_and_x: model_and_x[0].weight, forward, backward)
    model = Model(TWO, jnp.int32(1), jnp.tanh)
    assert eqx.filter_grad(lambda model: custom((model, THREE)))(model).weight == 7
    expected = (Model(True, False, False), False)
    assert [eqx.tree_equal(each, expected) for each in seen] == [True, True]


@both
def test_all_arguments_are_passed_to_both(eqx):
    seen = []

    def forward(perturbed, *args, **kwargs):
        seen.append((args, kwargs))
        return args[0], None

    def backward(residuals, cotangent, perturbed, *args, **kwargs):
        seen.append((args, kwargs))
        return cotangent

    custom = custom_vjp(eqx, lambda x, *args, **kwargs: x, forward, backward)
    jax.grad(lambda x: custom(x, THREE, "s", y=TWO, function=jnp.sin))(TWO)
    assert seen == [((TWO, THREE, "s"), {"y": TWO, "function": jnp.sin})] * 2


@both
def test_residuals_may_be_any_tree(eqx):
    seen = []

    def forward(perturbed, x):
        return x, {"x": x, "s": "s", "n": 3, "function": jnp.sin, "array": jnp.int32(1)}

    def backward(residuals, cotangent, perturbed, x):
        seen.append(residuals)
        return cotangent

    jax.grad(custom_vjp(eqx, lambda x: x, forward, backward))(TWO)
    assert seen == [{"x": 2.0, "s": "s", "n": 3, "function": jnp.sin, "array": 1}]


@both
def test_cotangent_is_none_for_what_has_none(eqx):
    seen = []

    def function(x):
        return {"x": x, "unused": 2 * x, "n": jnp.int32(1), "s": "s", "f": 2.5, "np": np.ones(1)}

    def backward(residuals, cotangent, perturbed, x):
        seen.append(cotangent)
        return cotangent["x"]

    custom = custom_vjp(eqx, function, None, backward)
    jax.grad(lambda x: custom(x)["x"])(TWO)
    assert seen == [{"x": 1.0, "unused": None, "n": None, "s": None, "f": None, "np": None}]


@both
def test_without_differentiation_the_output_may_be_anything(eqx):
    def function(x, label):
        return {"x": x, "label": label, "f": 2.5, "function": jnp.sin}

    assert custom_vjp(eqx, function)(TWO, "s") == function(TWO, "s")


@both
def test_value_is_that_of_the_forward_pass(eqx):
    custom = custom_vjp(eqx, lambda x: x, lambda perturbed, x: (10 * x, None))
    assert eqx.filter_value_and_grad(custom)(TWO) == (20.0, 1.0)


@both
@pytest.mark.parametrize("x", [np.float32(2), np.array(2, np.float32)], ids=repr)
def test_numpy_arrays_are_differentiated(eqx, x):
    assert eqx.filter_grad(custom_vjp(eqx, lambda x: x * x))(x) == 1


# --- the gradient -------------------------------------------------------------------------------


@both
def test_gradient_none_is_zero(eqx):
    custom = custom_vjp(eqx, lambda x: x, None, lambda *args: None)
    assert jax.grad(custom)(TWO) == 0


@both
def test_gradient_may_be_a_python_number(eqx):
    custom = custom_vjp(eqx, lambda x: x, None, lambda *args: 7.0)
    assert jax.grad(custom)(TWO) == 7


@both
def test_gradient_of_what_is_not_perturbed_is_not_used(eqx):
    custom = custom_vjp(
        eqx,
        lambda tree: tree["a"],
        None,
        lambda residuals, cotangent, perturbed, tree: {"a": cotangent, "b": ONE, "c": 3, "d": ONE},
    )
    assert jax.grad(lambda a: custom({"a": a, "b": TWO, "c": "s", "d": jnp.int32(1)}))(TWO) == 1


def test_gradient_none_is_zero_for_a_whole_subtree():
    def gradients(eqx):
        custom = custom_vjp(
            eqx, lambda tree: tree["a"][0], None, lambda *args: {"a": None, "b": None}
        )
        return jax.grad(custom)({"a": (TWO, TWO), "b": TWO})

    assert gradients(eqxlike) == {"a": (0.0, 0.0), "b": 0.0}
    with pytest.raises(RuntimeError, match="must have the same structure"):
        gradients(equinox)


@both
def test_gradients_flow_on_to_what_the_argument_was_made_of(eqx):
    custom = custom_vjp(eqx, lambda x: x)
    assert jax.grad(lambda x: custom(x**2) * 3)(TWO) == 12


# --- the older form -----------------------------------------------------------------------------


@both
def test_defvjp_takes_functions_without_perturbed_and_passes_zeros(eqx):
    seen = []

    def backward(residuals, cotangent, tree, label):
        seen.append((residuals, cotangent, label))
        return (cotangent[0], None, None)

    custom = eqx.filter_custom_vjp(lambda tree, label: tree)
    with pytest.warns(match="filter_custom_vjp.defvjp` is deprecated"):
        custom.defvjp(lambda tree, label: (tree, "residual"), backward)
    assert jax.grad(lambda x: custom((x, THREE, jnp.int32(1)), "s")[0])(TWO) == 1
    assert seen == [("residual", (1.0, 0.0, None), "s")]


# --- errors -------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("given", [(), ("def_fwd",), ("def_bwd",)], ids=repr)
def test_without_a_derivative_a_call_is_an_error(eqx, given):
    custom = eqx.filter_custom_vjp(lambda x: x)
    for define in given:
        getattr(custom, define)(len)
    with pytest.raises(RuntimeError, match=r"def_fwd` .* `.*def_bwd`"):
        custom(TWO)


@both
def test_the_first_argument_by_keyword_is_an_error(eqx):
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'vjp_arg'"):
        custom_vjp(eqx, lambda x: x)(x=TWO)


@both
@pytest.mark.parametrize(
    ("loss", "path"),
    [
        (lambda custom: lambda y: custom(TWO, (y, "s")), r"args\[0\]\[0\]"),
        (lambda custom: lambda y: custom(TWO, None, y=y), r"kwargs\['y'\]"),
    ],
    ids=["args", "kwargs"],
)
def test_differentiating_another_argument_is_an_error(eqx, loss, path):
    def scale(x, *args, **kwargs):
        return x

    message = f"scale was differentiated in {path}" if eqx is eqxlike else "Unexpected tangent"
    with pytest.raises(RuntimeError, match=message):
        jax.grad(loss(custom_vjp(eqx, scale)))(THREE)


@both
def test_forward_mode_is_refused_as_by_jax(eqx):
    with pytest.raises(TypeError, match="can't apply forward-mode autodiff"):
        jax.jvp(custom_vjp(eqx, lambda x: x), (TWO,), (ONE,))


@pytest.mark.parametrize(
    ("gradient", "error", "message"),
    [
        (
            lambda x: {"b": x},
            ValueError,
            r"vjp_arg is a dict with the keys \['a'\], and gradient is a dict with the keys ",
        ),
        (
            lambda x: {"a": jnp.ones(2)},
            ValueError,
            r"gradient\['a'\] must have the shape of vjp_arg",
        ),
        (
            lambda x: {"a": jnp.int32(1)},
            TypeError,
            r"gradient\['a'\] must have the dtype of vjp_arg",
        ),
        (lambda x: {"a": (x,)}, TypeError, r"gradient\['a'\] must be an array like vjp_arg\['a'\]"),
    ],
    ids=["structure", "shape", "dtype", "subtree"],
)
def test_gradient_unlike_the_argument_is_an_error(gradient, error, message):
    custom = custom_vjp(eqxlike, lambda tree: tree["a"], None, lambda *args: gradient(ONE))
    with pytest.raises(error, match=message):
        jax.grad(custom)({"a": TWO})


def test_gradient_of_another_dtype_passes_through_equinox():
    custom = custom_vjp(equinox, lambda x: x, None, lambda *args: jnp.int32(1))
    assert jax.grad(custom)(TWO).dtype == jnp.int32


def test_forward_pass_without_a_pair_is_an_error():
    def scale(x):
        return x

    message = r"The forward pass of scale must return a pair \(value, residuals\); it returned an "
    with pytest.raises(TypeError, match=message):
        jax.grad(custom_vjp(eqxlike, scale, lambda perturbed, x: x))(TWO)


def test_value_of_another_form_than_that_of_the_function_is_an_error():
    custom = custom_vjp(eqxlike, lambda x: {"a": x}, lambda perturbed, x: ({"b": x}, None))
    message = r"value is a dict with the keys \['a'\], and value of the forward pass is a dict "
    with pytest.raises(ValueError, match=message):
        jax.grad(jax.jit(lambda x: custom(x)["a"]))(TWO)
