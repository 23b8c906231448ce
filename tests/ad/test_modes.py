"""Single modes: their arguments, and functions that only some modes differentiate."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxlike as eqx
from eqxlike import ad, nn
from tests.nn.arrays import filled

X = jnp.array([0.4, -1.2, 0.7])


def halvings(x):
    return jax.lax.while_loop(lambda x: x > 1, lambda x: x / 2, x)


def numpys_sine(x):
    return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


@jax.custom_vjp
def tripled_gradient(x):
    return x


tripled_gradient.defvjp(lambda x: (x, None), lambda _, cotangent: (3 * cotangent,))


# --- objects that are not modes -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        (ad.Forward, r"got <class .*Forward'>: call it, `Forward\(\)`"),
        ("forward", "expects a mode of eqxlike.ad as `mode`, such as `ad.Reverse\\(\\)`"),
    ],
)
def test_object_that_is_no_mode_is_an_error(mode, text):
    for transform in (
        lambda: eqx.filter_grad(jnp.sum, mode=mode),
        lambda: ad.jacobian(jnp.sum, mode),
        lambda: ad.hessian(jnp.sum, (ad.Reverse(), mode)),
        lambda: ad.differentiate_with(jnp.sum, mode),
        lambda: ad.value_and_grad_into(jnp.sum, mode=mode),
    ):
        with pytest.raises(TypeError, match=text):
            transform()


def test_hessian_takes_a_pair_of_modes():
    with pytest.raises(
        ValueError, match=r"one mode or a pair of modes, \(outer, inner\); got .* 3"
    ):
        ad.hessian(jnp.sum, (ad.Reverse(), ad.Reverse(), ad.Reverse()))


def test_invalid_settings_are_errors():
    for chunk in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="Forward: chunk must be an integer of at least 1"):
            ad.Forward(chunk)
    assert ad.Forward(1).chunk == 1
    with pytest.raises(ValueError, match="order must be 2 or 4, got 3"):
        ad.FiniteDifference(order=3)
    for step in (0.0, -1e-3, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="step must be positive and finite"):
            ad.FiniteDifference(step=step)
    with pytest.raises(TypeError, match="step must be a number"):
        ad.FiniteDifference(step="small")
    with pytest.raises(TypeError, match="policy must be one of"):
        ad.Checkpointed("dots_saveable")


# --- values that have no gradient ---------------------------------------------------------------

VALUES = {
    "a vector": (
        lambda x: x,
        "of shape \\(3,\\) .* sum or average it, or take `ad.jacobian`",
    ),
    "an integer": (lambda x: jnp.sum(x).astype(int), "dtype int32. .* have no derivative"),
    "a boolean": (lambda x: jnp.sum(x) > 0, "dtype bool. .* have no derivative"),
    "a complex": (lambda x: jax.lax.complex(x[0], x[1]), "dtype complex64. .*real part or modulus"),
    "a pair": (lambda x: (jnp.sum(x), x), "a tuple of length 2. .*`has_aux=True`"),
    "nothing": (lambda x: None, "None"),
}


def test_error_of_a_value_that_is_no_real_scalar_names_a_way_out():
    for function, text in VALUES.values():

        def objective(x, function=function):
            return function(x)

        message = f"the value of objective must be a real floating-point scalar, but is .*{text}"
        with pytest.raises(TypeError, match=message):
            jax.eval_shape(eqx.filter_grad(objective, mode=ad.Forward()), X)


def test_holomorphic_needs_complex_arrays():
    with pytest.raises(TypeError, match=r"must be complex; args\[0\]\['x'\] is an array of shape"):
        eqx.filter_grad(lambda p: p["x"], mode=ad.Forward(), holomorphic=True)({"x": jnp.ones(())})


# --- functions that a mode cannot differentiate -------------------------------------------------


CALLS = jax.new_ref(jnp.zeros(()))


def counted(x):
    CALLS[...] = CALLS[...] + 1
    return x**2


def looping(x):
    return halvings(jnp.sin(x)) + jnp.cos(x) * jnp.tan(x)


def of_batch(x):
    part = ad.differentiate_with(numpys_sine, ad.FiniteDifference())
    return jnp.sum(jax.vmap(part)(x))


DEFAULT, FORWARD, CHECKPOINTED = None, ad.Forward(), ad.Checkpointed()
NOT_DIFFERENTIABLE = [
    (halvings, 10.0, DEFAULT, ValueError, "while halvings was differentiated by reverse mode."),
    (halvings, 10.0, DEFAULT, ValueError, "`ad.Forward()`"),
    (halvings, 10.0, DEFAULT, ValueError, "eqxlike.loops"),
    (looping, 10.0, CHECKPOINTED, ValueError, "looping was differentiated by Checkpointed()"),
    (tripled_gradient, 0.4, FORWARD, TypeError, "`ad.differentiate_with(part, ad.Reverse())`"),
    (numpys_sine, 0.4, FORWARD, ValueError, "`ad.FiniteDifference()` differentiates any function"),
    (counted, 0.4, FORWARD, Exception, "Use `ad.Reverse()` or `ad.Checkpointed()`"),
    (of_batch, X, DEFAULT, NotImplementedError, 'A callback can, with `vmap_method="sequential"`'),
]


def test_function_that_a_mode_cannot_differentiate_is_an_error_with_a_way_out():
    for function, x, mode, kind, note in NOT_DIFFERENTIABLE:
        with pytest.raises(kind) as error:
            eqx.filter_grad(function, mode=mode)(jnp.asarray(x))
        assert note in " ".join(error.value.__notes__)


def test_jacobian_of_integers_says_how_to_return_them():
    def count(x):
        return {"n": jnp.arange(3), "x": x}

    with pytest.raises(TypeError, match=r"count returns .* dtype int32, .*`has_aux=True`"):
        ad.jacobian(count)(X)


def test_jacobian_of_complex_by_complex_needs_a_holomorphic_function():
    z = jax.lax.complex(X, X)
    with pytest.raises(TypeError, match="holomorphic"):
        ad.jacobian(lambda z: z**2)(z)
    found = jax.jit(ad.jacobian(lambda z: z**2, ad.Reverse(), holomorphic=True))(z)
    np.testing.assert_allclose(found, np.diag(2 * np.asarray(z)), rtol=1e-5)


def test_error_names_a_mode_that_returns_too_few_gradients():
    class Short(ad.Mode):
        def value_and_grad(self, function, arrays):
            value_and_aux, gradients = ad.Reverse().value_and_grad(function, arrays)
            return value_and_aux, gradients[:-1]

    with pytest.raises(ValueError, match=r"Short\(\) .* with respect to 2 arrays, but returned 1"):
        eqx.filter_grad(lambda pair: jnp.sum(pair[0] * pair[1]), mode=Short())((X, X))


def test_mode_that_returns_no_pair_is_an_error():
    class Nothing(ad.Mode):
        def value_and_grad(self, function, arrays):
            return None

    with pytest.raises(TypeError, match=r"Nothing\(\) must return .*; it returned None"):
        eqx.filter_grad(jnp.sum, mode=Nothing())(X)


@pytest.mark.parametrize("mode", [ad.Forward(chunk=1), ad.FiniteDifference()])
def test_writes_to_a_reference_are_refused_if_they_would_be_repeated(mode):
    count = jax.new_ref(jnp.zeros(()))

    def counted(x):
        count[...] += 1.0
        return jnp.sum(x**2)

    with pytest.raises(
        ValueError, match="this mode evaluates the function once for each direction"
    ):
        jax.jit(eqx.filter_grad(counted, mode=mode))(X)


# --- functions that a mode can differentiate ----------------------------------------------------


def test_callback_with_finite_differences_has_second_derivatives():
    with jax.enable_x64(True):
        part = ad.differentiate_with(numpys_sine, ad.FiniteDifference(4))
        found = jax.jit(jax.grad(jax.grad(lambda x: part(x) ** 2)))(jnp.array(0.3))
        np.testing.assert_allclose(found, 2 * np.cos(0.6), rtol=1e-4)


def test_part_in_reverse_mode_gives_a_custom_vjp_forward_derivatives():
    part = ad.differentiate_with(tripled_gradient, ad.Reverse())
    run = jax.jit(lambda x: (jax.jvp(part, (x,), (x,))[1], ad.jacobian(part, ad.Forward())(x)))
    tangent, jacobian = run(X)
    np.testing.assert_allclose(tangent, 3 * np.asarray(X), rtol=1e-6)
    np.testing.assert_allclose(jacobian, 3 * np.eye(3), rtol=1e-6)


def test_part_with_a_nonlinear_custom_rule_has_a_reverse_mode_in_a_batch():
    @jax.custom_vjp
    def clipped(x):
        return x

    clipped.defvjp(lambda x: (x, None), lambda _, cotangent: (jnp.clip(cotangent, -1, 1),))
    part = ad.differentiate_with(lambda scale, x: clipped(scale * x), ad.Reverse())
    objective = lambda scale: 3 * jnp.sum(jax.vmap(part, in_axes=(None, 0))(scale, X))
    np.testing.assert_allclose(jax.jit(jax.grad(objective))(X[0]), np.sum(X), rtol=1e-6)


def test_finite_differences_of_small_outputs_stay_accurate_next_to_large_ones():
    part = ad.differentiate_with(lambda x: x, ad.FiniteDifference())
    x = jnp.array([1e6, 1.0], jnp.float32)
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(part(x))))
    np.testing.assert_allclose(gradient(x), np.ones(2), rtol=1e-3)


@pytest.mark.parametrize("mode", [ad.Auto(), ad.FiniteDifference()])
def test_part_accepts_python_numbers_as_jax_does(mode):
    square = ad.differentiate_with(lambda x, y: y * x**2, mode)
    constant = ad.differentiate_with(lambda x: jnp.array(3.0), mode)

    @jax.jit
    def run(x):
        pushed = jax.jvp(square, (3.0, 2.0), (1.0, 0.0))
        return (*jax.grad(square, (0, 1))(3.0, 2.0), *pushed), eqx.filter_grad(constant)(x)

    numbers, zeros = run(X)
    np.testing.assert_allclose(numbers, (12.0, 9.0, 18.0, 12.0), rtol=1e-4)
    np.testing.assert_array_equal(zeros, np.zeros(3))


def test_devices_that_share_an_array_share_its_gradient():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, shared = jax.sharding.PartitionSpec("d"), jax.sharding.PartitionSpec()
    xs = jnp.stack([X, 2 * X])

    def gradient(w, xs):
        return eqx.filter_grad(lambda w: jnp.sum(jnp.tanh(xs @ w)), mode=ad.Forward(1))(w)

    in_shards = jax.shard_map(gradient, mesh=mesh, in_specs=(shared, rows), out_specs=shared)
    np.testing.assert_allclose(jax.jit(in_shards)(X, xs), jax.jit(gradient)(X, xs), rtol=1e-5)


def test_part_is_differentiated_only_by_varying_arrays():
    seen = []

    class Spy(ad.Mode):
        def value_and_grad(self, function, arrays):
            seen.append([each.shape for each in arrays])
            return ad.Reverse().value_and_grad(function, arrays)

    part = ad.differentiate_with(filled(nn.Linear, 3, 2, key=jax.random.key(0)), Spy())
    eqx.filter_eval_shape(eqx.filter_grad(lambda x: jnp.sum(part(x))), X)
    assert seen == [[(3,)]]


def test_differentiate_with_keeps_names_and_is_a_pytree():
    layer = filled(nn.Linear, 3, 2, key=jax.random.key(0))
    part = ad.differentiate_with(layer, ad.Forward())
    assert part.__wrapped__ is layer
    assert len(jax.tree.leaves(part)) == 2
    assert ad.differentiate_with(halvings, ad.Forward()).__name__ == "halvings"


# --- the steps of finite differences ------------------------------------------------------------


def test_step_that_rounding_loses_is_an_error_that_names_the_array():
    found = eqx.filter_grad(lambda x: x**2, mode=ad.FiniteDifference(step=0.5))(jnp.array(1.0))
    assert found == 2
    tree = {"a": jnp.ones(2), "b": [jnp.array(1e6)]}
    with pytest.raises(
        ValueError, match=r"args\[0\]\['b'\]\[0\] has a number that is too large for the step 0.01"
    ):
        eqx.filter_grad(lambda t: t["b"][0] ** 2, mode=ad.FiniteDifference(step=0.01))(tree)


def test_step_that_rounding_loses_is_an_error_in_a_compiled_program():
    gradient = eqx.filter_jit(eqx.filter_grad(lambda x: x**2, mode=ad.FiniteDifference(step=1e-9)))
    with pytest.raises(eqx.EqxlikeRuntimeError, match=r"array 0, of shape \(\), has a number"):
        gradient(jnp.array(1.0))
    assert abs(float(gradient(jnp.array(0.0)))) < 1e-6
    with pytest.raises(ValueError, match="too large for the step"):
        eqx.filter_grad(jnp.sum, mode=ad.FiniteDifference(step=1e-3))(jnp.ones(3, jnp.bfloat16))


def test_step_scales_with_the_number():
    with jax.enable_x64(True):
        x = np.array([1e-6, 1.0, 1e8])
        found = jax.jit(ad.jacobian(lambda x: x**2, ad.FiniteDifference()))(x)
        np.testing.assert_allclose(np.diag(found), 2 * x, rtol=1e-4, atol=1e-8)


def test_step_depends_on_the_precision_of_the_value():
    with jax.enable_x64(True):
        single = lambda x: jnp.sum(jnp.sin(x.astype(jnp.float32)))
        found = jax.jit(eqx.filter_grad(single, mode=ad.FiniteDifference(4)))(np.array([0.3, 1.0]))
        np.testing.assert_allclose(found, np.cos([0.3, 1.0]), atol=1e-3)


# --- Auto and Enzyme ----------------------------------------------------------------------------


def primitives(function, *args):
    return str(jax.make_jaxpr(function)(*args))


def test_auto_takes_forward_mode_for_tall_jacobians_and_reverse_for_wide_ones():
    tall, wide = (lambda x: x * jnp.ones(50)), (lambda x: jnp.sum(x))
    x, xs = jnp.ones(()), jnp.ones(50)
    for function, arg, mode in ((tall, x, ad.Forward()), (wide, xs, ad.Reverse())):
        auto = primitives(ad.jacobian(function, ad.Auto()), arg)
        assert auto == primitives(ad.jacobian(function, mode), arg)


if importlib.util.find_spec("enzyme_ad"):

    def test_enzyme_has_a_forward_mode_of_its_own():
        part = ad.differentiate_with(lambda x: jnp.tanh(x) ** 2, ad.Enzyme())
        found = jax.jit(lambda x, v: jax.jvp(part, (x,), (v,))[1])(X, X)
        tanh = np.tanh(X)
        np.testing.assert_allclose(found, 2 * tanh * (1 - tanh**2) * np.asarray(X), rtol=1e-5)

else:

    def test_enzyme_says_how_to_install_it():
        with pytest.raises(ImportError, match=r"pip install 'eqxlike\[enzyme\]'"):
            eqx.filter_grad(jnp.sum, mode=ad.Enzyme())(X)
