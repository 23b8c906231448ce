"""Products with Jacobians and Hessians, Taylor derivatives, reused buffers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxlike as eqx
from eqxlike import ad

X = jnp.array([0.4, -1.2, 0.7])
V = jnp.array([1.0, 0.5, -2.0])


def function(p, x):
    return {"y": jnp.sin(p["w"] * x) ** p["power"], "label": p["label"]}


def parameters():
    return {"w": X, "power": 2, "label": "sine"}


def scalar(p, x):
    return jnp.sum(function(p, x)["y"] ** 2)


DIRECTION = {"w": V, "power": None, "label": None}
SLOPE = np.asarray(X) * np.sin(2 * np.asarray(X) ** 2)  # d/dw of sin(w x)^2, at w = x

# --- hvp ----------------------------------------------------------------------------------------


def test_hvp_is_the_product_with_the_hessian():
    found = eqx.filter_jit(ad.hvp(scalar))(parameters(), DIRECTION, X)
    angle = 2 * np.asarray(X) ** 2  # `scalar` is the sum of sin(w x)^4, here at w = x.
    np.testing.assert_allclose(
        found["w"], angle * (np.cos(angle) - np.cos(2 * angle)) * np.asarray(V), rtol=1e-4
    )
    assert found["power"] is None


def test_hvp_accepts_none_for_zero_and_returns_aux():
    product, aux = ad.hvp(lambda p: (jnp.sum(p["a"] * p["b"]), "aux"), has_aux=True)(
        {"a": X, "b": X}, {"a": V, "b": None}
    )
    assert aux == "aux"
    np.testing.assert_allclose(product["b"], V)
    np.testing.assert_allclose(product["a"], np.zeros(3))


# --- both products ------------------------------------------------------------------------------


def test_both_products_equal_their_closed_form():
    value, jvp, vjp = ad.jvp_and_vjp(function, parameters(), X)
    assert value["label"] == "sine"
    tangent = jvp(DIRECTION, None)
    np.testing.assert_allclose(tangent["y"], SLOPE * V, rtol=1e-5)
    assert tangent["label"] is None
    gradient, _ = vjp({"y": V, "label": None})
    np.testing.assert_allclose(gradient["w"], SLOPE * V, rtol=1e-5)


def test_both_products_pass_through_jit():
    jvp, vjp = jax.jit(lambda x: ad.jvp_and_vjp(jnp.sin, x)[1:])(X)
    (found,) = jax.jit(lambda jvp, vjp: vjp(jvp(V)))(jvp, vjp)
    np.testing.assert_allclose(found, np.cos(X) ** 2 * V, rtol=1e-5)


def test_both_products_return_aux():
    _, _, _, aux = ad.jvp_and_vjp(lambda x: (x**2, ("aux", x)), X, has_aux=True)
    assert aux[0] == "aux"
    np.testing.assert_array_equal(aux[1], X)


# --- Taylor -------------------------------------------------------------------------------------

W = np.linspace(-1, 1, 9).reshape(3, 3)

SERIES = {
    "exp": jnp.exp,
    "network": lambda x: jnp.tanh(jnp.array(W) @ x),
    "relu": jax.nn.relu,  # jet has no rule for this and the next function
    "loop": lambda x: jax.lax.fori_loop(0, 3, lambda _, x: jnp.sin(x), x),
    "power": lambda x: x ** jnp.array([2.0, 3.0, 1.5]),  # jet has wrong rules from here on
    "remainder": lambda x: jax.lax.rem(x, jnp.full(3, 0.5)),
    "rounded": lambda x: (4 * x).astype(int).astype(x.dtype) * x,
    "angle": lambda x: jnp.arctan2(jnp.ones(3), x - jnp.array([0.4, 0.0, 0.0])),
    "filled": lambda x: jnp.take(x**2, jnp.array([0, 5]), mode="fill", fill_value=3.0) ** 2,
    "clamped": lambda x: jax.lax.clamp(-1.2, x**2 - 2.64, 0.7),
    "asinh": lambda x: jnp.arcsinh(1e9 * x),
}


def test_taylor_equals_nested_jvps():
    run = jax.jit(lambda x, v: [both_series(function, x, v) for function in SERIES.values()])
    with jax.enable_x64(True):
        for found, nested in run(np.array([0.4, -1.2, 0.7]), np.array([1.0, 0.5, -2.0])):
            for one, other in zip(found, nested, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-8, atol=1e-10)


def both_series(function, x, v):
    nested, path = [], lambda t: function(x + t * v)
    for _ in range(4):
        nested.append(path(0.0))
        path = lambda t, path=path: jax.jvp(path, (t,), (1.0,))[1]
    return ad.taylor(function, 3)(x, v), nested


def test_taylor_accepts_trees_and_compiles():
    derivatives = eqx.filter_jit(ad.taylor(function, 2))(parameters(), DIRECTION, X)
    assert [each["label"] for each in derivatives] == ["sine", None, None]
    np.testing.assert_allclose(derivatives[1]["y"], SLOPE * V, rtol=1e-5)


def test_taylor_returns_aux():
    taylor = jax.jit(ad.taylor(lambda x: (x**3, {"aux": x}), 1, has_aux=True))
    (value, first), aux = taylor(X, V)
    x, v = map(np.asarray, (X, V))
    np.testing.assert_allclose(value, x**3, rtol=1e-6)
    np.testing.assert_allclose(first, 3 * x**2 * v, rtol=1e-5)
    np.testing.assert_array_equal(aux["aux"], X)


# --- buffers ------------------------------------------------------------------------------------


def test_gradient_is_written_to_the_buffers():
    into = ad.value_and_grad_into(scalar)
    buffers = ad.gradient_buffers(parameters())
    pointer = buffers["w"].unsafe_buffer_pointer()
    value, gradient = into(buffers, parameters(), X)
    assert buffers["w"].is_deleted()
    assert gradient["w"].unsafe_buffer_pointer() == pointer
    expected_value, expected = eqx.filter_value_and_grad(scalar)(parameters(), X)
    np.testing.assert_allclose(gradient["w"], expected["w"], rtol=1e-6)
    np.testing.assert_allclose(value, expected_value, rtol=1e-6)


def test_further_arguments_are_donated_by_name():
    into = ad.value_and_grad_into(lambda x, y: (jnp.sum(x * y), y + 1), has_aux=True, donate="y")
    y = jnp.arange(3.0)
    (_, aux), _ = into(ad.gradient_buffers(X), X, y)
    assert y.is_deleted()
    np.testing.assert_array_equal(aux, [1.0, 2.0, 3.0])


# --- bad input ----------------------------------------------------------------------------------


def pushed(tangent):
    return ad.jvp_and_vjp(function, parameters(), X)[1](tangent, None)


def pulled(cotangent):
    return ad.jvp_and_vjp(function, parameters(), X)[2](cotangent)


TOO_SHORT = DIRECTION | {"w": jnp.ones(2)}
HALF = {"y": jnp.ones(3, jnp.float16), "label": None}
BUFFERS = {"w": jnp.ones(2), "power": None, "label": None}
WRONG_VALUES = [
    (
        lambda: ad.hvp(scalar)(parameters(), TOO_SHORT, X),
        r"vector\['w'\] must .* shape of x\['w'\]",
    ),
    (lambda: pushed(TOO_SHORT), r"tangents\[0\]\['w'\] must have the shape"),
    (lambda: ad.taylor(jnp.sin, 0), "order must be an integer of at least 1, got 0"),
    (lambda: ad.taylor(jnp.sin, 2)(X, jnp.ones(2)), "direction must have the shape of x"),
    (
        lambda: ad.value_and_grad_into(scalar)(BUFFERS, parameters(), X),
        r"gradient\['w'\] is .* \(3,\).*buffers\['w'\] is .*\(2,\)",
    ),
    (
        lambda: ad.value_and_grad_into(lambda x, buffers: x),
        "duplicate parameter name: 'buffers'",
    ),
    (
        lambda: ad.value_and_grad_into(lambda x, y: x, donate="all"),
        "donate=.* no parameter named 'all'; it has 'buffers', 'x', 'y'",
    ),
]
NO_SCALAR = "must be a real floating-point scalar, but is .* average"
WRONG_TYPES = [
    (lambda: ad.hvp(jnp.sin)(X, V), NO_SCALAR),
    (lambda: ad.value_and_grad_into(jnp.sin)(X, X), NO_SCALAR),
    (lambda: pulled(HALF), r"cotangent\['y'\] must have the dtype"),
]


@pytest.mark.parametrize(("error", "cases"), [(ValueError, WRONG_VALUES), (TypeError, WRONG_TYPES)])
def test_bad_input_is_an_error_that_names_it(error, cases):
    for call, words in cases:
        with pytest.raises(error, match=words):
            call()
