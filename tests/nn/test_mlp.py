import equinox
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqxlike
from eqxlike import Module, filter_eval_shape, filter_grad, filter_jit, nn


class Slope(Module):
    """An activation with an array of its own."""

    slope: jax.Array

    def __call__(self, x):
        assert x.shape == self.slope.shape == ()
        return jnp.where(x > 0, x, self.slope * x)


class EquinoxSlope(equinox.Module):
    slope: jax.Array

    def __call__(self, x):
        return jnp.where(x > 0, x, self.slope * x)


def arrays(model):
    return [leaf for leaf in jax.tree.leaves(model) if isinstance(leaf, jax.Array)]


@pytest.mark.parametrize(("in_size", "out_size"), [(2, 3), ("scalar", 3), (2, "scalar")])
@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize(
    ("bias", "scan"), [((True, True), False), ((True, False), True), ((False, True), False)]
)
def test_same_key_gives_equinox_network(in_size, out_size, depth, bias, scan):
    options = {
        "width_size": 5,
        "depth": depth,
        "activation": jax.nn.gelu,
        # Equinox forgets it at depth 0, against its documentation.
        "final_activation": jnp.tanh if depth > 0 else lambda x: x,
        "use_bias": bias[0],
        "use_final_bias": bias[1],
        "scan": scan,
    }
    ours = nn.MLP(in_size, out_size, **options, key=jr.key(depth))
    theirs = equinox.nn.MLP(in_size, out_size, **options, key=jr.key(depth))
    assert len(arrays(ours)) == len(arrays(theirs))
    for our, their in zip(arrays(ours), arrays(theirs), strict=True):
        np.testing.assert_array_equal(our, their)
    x = jr.normal(jr.key(1), () if in_size == "scalar" else (in_size,))
    out = filter_jit(ours)(x)
    np.testing.assert_allclose(out, equinox.filter_jit(theirs)(x), rtol=1e-6, atol=1e-6)
    assert out.shape == (() if out_size == "scalar" else (out_size,))


def test_gradient_is_that_of_equinox(getkey):
    key, x = getkey(), jr.normal(getkey(), (2,))
    ours = nn.MLP(2, 3, 5, 3, activation=jnp.tanh, key=key)
    theirs = equinox.nn.MLP(2, 3, 5, 3, activation=jnp.tanh, key=jr.clone(key))
    our_gradient, their_gradient = (
        library.filter_jit(library.filter_grad(lambda model: jnp.sum(model(x) ** 2)))(model)
        for library, model in ((eqxlike, ours), (equinox, theirs))
    )
    for our, their in zip(arrays(our_gradient), arrays(their_gradient), strict=True):
        np.testing.assert_allclose(our, their, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("scan", [False, True])
def test_activation_with_arrays_is_owned_by_each_unit(scan, getkey):
    key, x, slope = getkey(), jr.normal(getkey(), (2,)), jnp.array(0.1)
    ours = nn.MLP(2, 3, 5, 4, Slope(slope), Slope(slope), scan=scan, key=key)
    theirs = equinox.nn.MLP(
        2, 3, 5, 4, EquinoxSlope(slope), EquinoxSlope(slope), scan=scan, key=jr.clone(key)
    )
    assert ours.activation.slope.shape == theirs.activation.slope.shape == (4, 5)
    assert ours.final_activation.slope.shape == theirs.final_activation.slope.shape == (3,)
    np.testing.assert_allclose(
        filter_jit(ours)(x), equinox.filter_jit(theirs)(x), rtol=1e-6, atol=1e-6
    )
    gradient = filter_eval_shape(filter_grad(lambda model: jnp.sum(model(x))), ours)
    assert gradient.activation.slope.shape == (4, 5)


def test_activation_of_a_scalar_output_is_left_as_it_is(getkey):
    model = nn.MLP(2, "scalar", 5, 1, final_activation=Slope(jnp.array(0.1)), key=getkey())
    assert model.final_activation.slope.shape == ()
    assert model(jnp.ones(2)).shape == ()


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_scan_computes_what_the_loop_does(depth, getkey):
    key, x = getkey(), jr.normal(getkey(), (2,))
    looped = nn.MLP(2, 3, 5, depth, key=key)
    scanned = nn.MLP(2, 3, 5, depth, scan=True, key=jr.clone(key))
    np.testing.assert_allclose(filter_jit(looped)(x), filter_jit(scanned)(x), rtol=1e-6, atol=1e-6)


def test_final_activation_is_applied_at_depth_zero(getkey):
    model = nn.MLP(2, 3, 5, 0, final_activation=jnp.tanh, key=getkey())
    x = jnp.ones(2)
    np.testing.assert_allclose(model(x), jnp.tanh(model.layers[0](x)), rtol=1e-6)


def test_scan_keeps_the_program_as_small_at_any_depth(getkey):
    def num_equations(depth):
        model = nn.MLP(2, 3, 5, depth, scan=True, key=getkey())
        return len(jax.make_jaxpr(lambda x: model(x))(jnp.ones(2)).eqns)

    assert num_equations(4) == num_equations(32)


@pytest.mark.parametrize("bad", [-1, 1.0, True])
def test_wrong_depth_is_refused(bad, getkey):
    with pytest.raises(ValueError, match="depth must be an integer of at least 0"):
        nn.MLP(2, 2, 2, bad, key=getkey())


def test_wrong_shape_says_expected_and_got(getkey):
    model = filter_jit(nn.MLP(3, 2, 4, 1, key=getkey()))
    with pytest.raises(ValueError, match=r"expected x of shape \(3,\), got shape \(5, 3\)"):
        model(jnp.ones((5, 3)))
