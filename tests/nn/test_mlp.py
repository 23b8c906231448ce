"""`Linear`, `MLP`, `GatedMLP`, `PReLU` and `Identity`, compared with Equinox and formulas."""

import equinox
import jax
import jax.experimental.sparse
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from eqxlike import Module, filter_eval_shape, filter_grad, filter_jit, nn, tree_at
from tests.nn.arrays import assert_close, filled, normal
from tests.nn.mistakes import each_mistake


class Slope(Module):
    """An activation with an array."""

    slope: jax.Array

    def __call__(self, x):
        assert x.shape == self.slope.shape == ()
        return jnp.where(x > 0, x, self.slope * x)


class EquinoxSlope(equinox.Module):
    slope: jax.Array

    def __call__(self, x):
        return jnp.where(x > 0, x, self.slope * x)


def shape(features):
    return () if features == "scalar" else (features,)


@filter_jit
def outputs(ours, theirs, x):
    return ours(x), theirs(x)


def arrays(model):
    return [leaf for leaf in jax.tree.leaves(model) if isinstance(leaf, jax.Array)]


# Tuples (layer, sizes, use of a bias, use of a final bias, scan). A Linear has the first three.
LAYERS = [
    (nn.Linear, ("scalar", "scalar"), True, False, False),
    (nn.Linear, (0, 2), True, False, False),
    (nn.Linear, (1, 0), False, False, False),
    (nn.Linear, (3, "scalar"), True, False, False),
    (nn.MLP, (2, 3, 5, 0), True, False, False),
    (nn.MLP, ("scalar", 3, 5, 1), False, True, True),
    (nn.MLP, (2, 3, 5, 2), True, True, False),
    (nn.MLP, (2, "scalar", 5, 2), True, False, True),
]


def test_same_key_gives_the_layers_of_equinox(getkey):
    x_key = getkey()

    def layers_and_outputs(cls, sizes, bias, final_bias, scan):
        options = {"use_bias": bias}
        if cls is nn.MLP:
            # At depth 0 Equinox applies no final activation, unlike its documentation.
            final = jnp.tanh if sizes[-1] > 0 else lambda x: x
            options |= {"activation": jax.nn.gelu, "final_activation": final, "scan": scan}
            options["use_final_bias"] = final_bias
        ours, theirs = (
            getattr(library, cls.__name__)(*sizes, **options, key=jr.key(0))
            for library in (nn, equinox.nn)
        )
        x = normal(x_key, shape(sizes[0]))
        return ours, theirs, ours(x), theirs(x)

    found = filter_jit(lambda: [layers_and_outputs(*each) for each in LAYERS])()
    for (cls, sizes, *_), (ours, theirs, out, expected) in zip(LAYERS, found, strict=True):
        for our, their in zip(arrays(ours), arrays(theirs), strict=True):
            np.testing.assert_array_equal(our, their)
        tolerance = 1e-6 if cls is nn.MLP else 0
        np.testing.assert_allclose(out, expected, rtol=tolerance, atol=tolerance)
        assert out.shape == shape(sizes[1])


def test_each_unit_has_its_own_copy_of_an_activation_with_arrays(getkey):
    x, slope = normal(getkey(), (2,)), jnp.array(0.1)
    ours, theirs = (
        filled(make, 2, 3, 5, 4, activation(slope), activation(slope), scan=True, key=jr.key(0))
        for make, activation in ((nn.MLP, Slope), (equinox.nn.MLP, EquinoxSlope))
    )
    assert ours.activation.slope.shape == theirs.activation.slope.shape == (4, 5)
    assert ours.final_activation.slope.shape == theirs.final_activation.slope.shape == (3,)
    np.testing.assert_allclose(*outputs(ours, theirs, x), rtol=1e-6, atol=1e-6)
    gradient = filter_eval_shape(filter_grad(lambda model: jnp.sum(model(x))), ours)
    assert gradient.activation.slope.shape == (4, 5)


def test_final_activation_of_a_scalar_output_is_not_copied(getkey):
    model = nn.MLP(2, "scalar", 5, 1, final_activation=Slope(jnp.array(0.1)), key=getkey())
    assert model.final_activation.slope.shape == ()
    assert filter_eval_shape(model, np.ones(2, np.float32)).shape == ()


def test_final_activation_is_applied_at_depth_zero(getkey):
    model = nn.MLP(2, 3, 5, 0, final_activation=jnp.tanh, key=getkey())
    x = jnp.ones(2)
    outputs = filter_jit(lambda model: (model(x), jnp.tanh(model.layers[0](x))))(model)
    np.testing.assert_allclose(*outputs, rtol=1e-6)


@pytest.mark.parametrize("activation", [jax.nn.silu, jax.nn.gelu])
def test_gated_mlp_equals_its_formula(activation, getkey):
    x = normal(getkey(), (3,))
    model = filled(nn.GatedMLP, 3, 5, 4, activation, True, key=getkey())
    gate, up, down = (
        (each.weight, each.bias)
        for each in jax.tree.leaves(model, is_leaf=lambda node: isinstance(node, nn.Linear))[:3]
    )
    hidden = activation(gate[0] @ x + gate[1]) * (up[0] @ x + up[1])
    np.testing.assert_allclose(model(x), down[0] @ hidden + down[1], rtol=1e-6)


def test_gated_mlp_has_its_input_size_no_bias_and_a_key_for_each_layer(getkey):
    model = nn.GatedMLP(3, 5, dtype=jnp.bfloat16, key=getkey())
    shapes = [(leaf.shape, leaf.dtype) for leaf in arrays(model)]
    assert shapes == [(shape, jnp.bfloat16) for shape in ((5, 3), (5, 3), (3, 5))]
    bayesian = nn.to_bayesian(nn.GatedMLP(3, 5, key=getkey()))
    key, x = getkey(), normal(getkey(), (3,))
    gate_key, up_key, down_key = jr.split(jr.clone(key), 3)
    hidden = jax.nn.silu(bayesian.gate_proj(x, key=gate_key)) * bayesian.up_proj(x, key=up_key)
    expected = bayesian.down_proj(hidden, key=down_key)
    assert_close(bayesian(x, key=key), expected)


def test_default_dtype_is_float64_in_64_bit_mode(getkey):
    with jax.enable_x64(True):
        assert nn.Linear(2, 2, key=getkey()).weight.dtype == jnp.float64


def linear(in_size=3, out_size=2):
    return nn.Linear(in_size, out_size, key=jr.key(0))


MISTAKES = {
    ValueError: {
        r"\(3,\), got shape \(4,\)\.$": lambda: linear()(jnp.ones(4)),
        r"\(3,\), got shape \(\)\.$": lambda: linear()(jnp.ones(())),
        r"(?s)\(3,\), .* \(5, 3\)\. .*jax.vmap": lambda: linear()(jnp.ones((5, 3))),
        r"(?s)\(\), .* \(1,\)\. .*jax.vmap": lambda: linear("scalar")(jnp.ones(1)),
        r"expected x of shape \(3,\), got shape \(5, 3\)": (
            lambda: filter_jit(nn.MLP(3, 2, 4, 1, key=jr.key(0)))(jnp.ones((5, 3)))
        ),
        r"\(\.\.\., 3\), got shape \(4,\)": lambda: nn.PReLU(jnp.ones(3))(jnp.ones(4)),
        "out_features must be .* got -1": lambda: linear(2, -1),
        "out_features must be .* got 'vector'": lambda: linear(2, "vector"),
        "depth must be an integer of at least 0": lambda: nn.MLP(2, 2, 2, -1, key=jr.key(0)),
        "a number or an array": lambda: nn.PReLU(None),
    },
    TypeError: {
        "floating or complex dtype, got int32": (
            lambda: nn.Linear(2, 2, dtype=jnp.int32, key=jr.key(0))
        ),
        r"GatedMLP: activation expected a layer, .*got 'silu'": (
            lambda: nn.GatedMLP(3, 5, activation="silu", key=jr.key(0))
        ),
    },
}


@each_mistake(MISTAKES)
def test_mistakes_are_refused(error, words, call):
    with pytest.raises(error, match=words):
        call()


def test_identity_accepts_any_arguments_and_returns_its_input(getkey):
    x = object()
    assert nn.Identity(3, use_bias=False)(x, key=getkey()) is x


def test_prelu_equals_prelu_of_equinox(getkey):
    x = normal(getkey(), (2, 3))
    for slope in (1, jnp.array([0.1, 0.2, 0.3]), jnp.full((2, 3), 0.5)):
        found, expected = outputs(nn.PReLU(slope), equinox.nn.PReLU(slope), x)
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    for x in (2.0, -2, np.arange(-2, 2)):
        found, expected = nn.PReLU()(x), equinox.nn.PReLU()(x)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


def test_sparse_weight_computes_its_own_product(getkey):
    linear = nn.Linear(3, 2, key=getkey())
    sparse = jax.experimental.sparse.BCOO.fromdense(linear.weight)
    replaced = tree_at(lambda linear: linear.weight, linear, sparse)
    np.testing.assert_allclose(replaced(jnp.ones(3)), linear(jnp.ones(3)), rtol=1e-6)
