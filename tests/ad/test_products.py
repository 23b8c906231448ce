"""Products with Jacobians and Hessians, Taylor derivatives, sparse matrices, reused buffers."""

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
SLOPE = np.asarray(X) * np.sin(2 * np.asarray(X) ** 2)  # of sin(w x)^2 by w, at w = x

# --- hvp ----------------------------------------------------------------------------------------


def test_hvp_is_the_product_with_the_hessian():
    found = eqx.filter_jit(ad.hvp(scalar))(parameters(), DIRECTION, X)
    angle = 2 * np.asarray(X) ** 2  # The sum of sin(w x)^4, at w = x.
    np.testing.assert_allclose(
        found["w"], angle * (np.cos(angle) - np.cos(2 * angle)) * np.asarray(V), rtol=1e-4
    )
    assert found["power"] is None


def test_hvp_takes_none_for_zero_and_hands_aux_on():
    product, aux = ad.hvp(lambda p: (jnp.sum(p["a"] * p["b"]), "aux"), has_aux=True)(
        {"a": X, "b": X}, {"a": V, "b": None}
    )
    assert aux == "aux"
    np.testing.assert_allclose(product["b"], V)
    np.testing.assert_allclose(product["a"], np.zeros(3))


def test_hvp_names_the_path_of_a_vector_that_does_not_fit():
    with pytest.raises(ValueError, match=r"vector\['w'\] must have the shape of x\['w'\]"):
        ad.hvp(scalar)(parameters(), DIRECTION | {"w": jnp.ones(2)}, X)


def test_hvp_of_a_vector_says_the_way_out():
    with pytest.raises(TypeError, match=r"must be a real floating-point scalar, and is .* average"):
        ad.hvp(jnp.sin)(X, V)


# --- both products ------------------------------------------------------------------------------


def test_both_products_are_jaxs():
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


def test_both_products_hand_aux_on():
    _, _, _, aux = ad.jvp_and_vjp(lambda x: (x**2, ("aux", x)), X, has_aux=True)
    assert aux[0] == "aux"
    np.testing.assert_array_equal(aux[1], X)


def test_products_name_the_path_of_what_does_not_fit():
    _, jvp, vjp = ad.jvp_and_vjp(function, parameters(), X)
    with pytest.raises(ValueError, match=r"tangents\[0\]\['w'\] must have the shape"):
        jvp(DIRECTION | {"w": jnp.ones(2)}, None)
    with pytest.raises(TypeError, match=r"cotangent\['y'\] must have the dtype"):
        vjp({"y": jnp.ones(3, jnp.float16), "label": None})


# --- Taylor -------------------------------------------------------------------------------------

W = np.linspace(-1, 1, 9).reshape(3, 3)

SERIES = {
    "exp": jnp.exp,
    "network": lambda x: jnp.tanh(jnp.array(W) @ x),
    "relu": jax.nn.relu,  # no rule in jet, nor for those below
    "loop": lambda x: jax.lax.fori_loop(0, 3, lambda _, x: jnp.sin(x), x),
    "power": lambda x: x ** jnp.array([2.0, 3.0, 1.5]),  # a wrong rule in jet, as those below
    "remainder": lambda x: jax.lax.rem(x, jnp.full(3, 0.5)),
    "rounded": lambda x: (4 * x).astype(int).astype(x.dtype) * x,
    "angle": lambda x: jnp.arctan2(jnp.ones(3), x - jnp.array([0.4, 0.0, 0.0])),
    "filled": lambda x: jnp.take(x**2, jnp.array([0, 5]), mode="fill", fill_value=3.0) ** 2,
    "clamped": lambda x: jax.lax.clamp(-1.2, x**2 - 2.64, 0.7),
    "asinh": lambda x: jnp.arcsinh(1e9 * x),
}


def test_taylor_is_nested_products():
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


def test_taylor_takes_trees_and_compiles():
    derivatives = eqx.filter_jit(ad.taylor(function, 2))(parameters(), DIRECTION, X)
    assert [each["label"] for each in derivatives] == ["sine", None, None]
    np.testing.assert_allclose(derivatives[1]["y"], SLOPE * V, rtol=1e-5)


def test_taylor_hands_aux_on():
    taylor = jax.jit(ad.taylor(lambda x: (x**3, {"aux": x}), 1, has_aux=True))
    (value, first), aux = taylor(X, V)
    x, v = map(np.asarray, (X, V))
    np.testing.assert_allclose(value, x**3, rtol=1e-6)
    np.testing.assert_allclose(first, 3 * x**2 * v, rtol=1e-5)
    np.testing.assert_array_equal(aux["aux"], X)


def test_taylor_checks_its_arguments():
    with pytest.raises(ValueError, match="order must be an integer of at least 1, got 0"):
        ad.taylor(jnp.sin, 0)
    with pytest.raises(ValueError, match=r"direction must have the shape of x"):
        ad.taylor(jnp.sin, 2)(X, jnp.ones(2))


# --- sparse -------------------------------------------------------------------------------------

try:
    import asdex
except ImportError:  # asdex 0.5.2 imports what jax 0.12.0.1 no longer has.
    asdex = None

if asdex:

    def dense(matrix):
        """`matrix.todense()` by NumPy, which compiles nothing."""
        found = np.zeros(matrix.shape, matrix.dtype)
        np.add.at(found, tuple(np.asarray(matrix.indices).T), np.asarray(matrix.data))
        return found

    def differences(p, x):
        return {"d": (p["u"][1:] - p["u"][:-1]) ** p["power"] * x, "label": "text"}

    def test_sparse_jacobian_compiles_and_takes_traced_arguments():
        p = {"u": jnp.arange(5.0), "power": 3}
        found = eqx.filter_jit(ad.sparse_jacobian(differences))(p, jnp.array(2.0))
        np.testing.assert_allclose(dense(found), np.diff(np.eye(5), axis=0) * 6)
        assert found.nse == 8

    def test_sparse_jacobian_beside_traced_indices():
        take = lambda x, index: x[index] ** 2
        index = jnp.array([2, 0, 1])
        found = eqx.filter_jit(ad.sparse_jacobian(take))(X, index)
        expected = np.eye(3)[[2, 0, 1]] * 2 * np.asarray(X)[[2, 0, 1], None]
        np.testing.assert_allclose(dense(found), expected, rtol=1e-6)

    def test_sparse_jacobian_of_what_closes_over_traced_arrays():
        def scaled(scale, index):
            return ad.sparse_jacobian(lambda x: x[index] * scale)(X)

        found = jax.jit(lambda *args: scaled(*args).todense())(V, jnp.array([2, 0, 1]))
        np.testing.assert_allclose(found, np.eye(3)[[2, 0, 1]] * np.asarray(V)[:, None])

    def test_sparse_hessian_is_the_hessian():
        energy = lambda x, k: k * jnp.sum((x[1:] - x[:-1]) ** 3)
        found = eqx.filter_jit(ad.sparse_hessian(energy))(jnp.arange(6.0) ** 2, jnp.array(2.0))
        steps, apart = np.diff(np.arange(6.0) ** 2), np.diff(np.eye(6), axis=0)
        expected = apart.T @ np.diag(12 * steps) @ apart
        np.testing.assert_allclose(dense(found), expected, rtol=1e-6)
        assert found.nse == 16

    def test_sparse_matrices_hand_aux_on():
        found, aux = ad.sparse_jacobian(lambda x: (x**2, "aux"), has_aux=True)(X)
        np.testing.assert_allclose(dense(found), np.diag(2 * np.asarray(X)), rtol=1e-6)
        assert aux == "aux"
        found, aux = ad.sparse_hessian(lambda x: (jnp.sum(x**3), x), has_aux=True)(X)
        np.testing.assert_allclose(dense(found), np.diag(6 * np.asarray(X)), rtol=1e-6)
        np.testing.assert_array_equal(aux, X)

    def test_sparse_hessian_is_of_a_scalar():
        with pytest.raises(
            TypeError, match="must be a real floating-point scalar, and is an array of shape"
        ):
            ad.sparse_hessian(lambda x: x)(X)

    def test_an_operation_that_asdex_does_not_know_names_the_dense_jacobian():
        with pytest.raises(NotImplementedError, match="No handler for primitive 'fft'") as error:
            ad.sparse_jacobian(lambda x: jnp.fft.fft(x).real)(X)
        assert "`ad.jacobian` does without one" in error.value.__notes__[0]

    def test_sparse_jacobian_says_what_it_takes():
        with pytest.raises(TypeError, match="needs real arrays of one dtype"):
            ad.sparse_jacobian(lambda x: x)(jax.lax.complex(X, X))
        with pytest.raises(ValueError, match="found no floating-point array"):
            ad.sparse_jacobian(lambda x: x)(3)

else:

    def test_asdex_that_does_not_run_is_named():
        with pytest.raises(ImportError, match="in a version that runs with jax"):
            ad.sparse_jacobian(lambda x: x)


# --- buffers ------------------------------------------------------------------------------------


def test_gradient_is_written_over_the_buffers():
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


def test_buffers_of_another_structure_are_named():
    into = ad.value_and_grad_into(scalar)
    with pytest.raises(
        ValueError, match=r"gradient\['w'\] is .* \(3,\).*buffers\['w'\] is .*\(2,\)"
    ):
        into({"w": jnp.ones(2), "power": None, "label": None}, parameters(), X)


def test_gradient_of_a_vector_says_the_way_out():
    with pytest.raises(TypeError, match=r"must be a real floating-point scalar, and is .* average"):
        ad.value_and_grad_into(jnp.sin)(X, X)


def test_a_parameter_of_that_name_is_refused():
    with pytest.raises(ValueError, match="duplicate parameter name: 'buffers'"):
        ad.value_and_grad_into(lambda x, buffers: x)


def test_donate_names_a_parameter():
    with pytest.raises(
        ValueError, match=r"donate=.* no parameter named 'all'; it has 'buffers', 'x', 'y'"
    ):
        ad.value_and_grad_into(lambda x, y: x, donate="all")
