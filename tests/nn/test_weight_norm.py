import equinox
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqxlike as eqx
from eqxlike import nn


@pytest.mark.parametrize("axis", [0, 1, None])
def test_output_and_gradient_are_those_of_equinox(axis, getkey):
    key, x = getkey(), jr.normal(getkey(), (3,))
    results = []
    for library in (eqx, equinox):
        norm = library.nn.WeightNorm(library.nn.Linear(3, 4, key=jr.clone(key)), axis=axis)
        norm = eqx.tree_at(lambda norm: norm.g, norm, replace_fn=lambda g: 2 * g + 1)

        def loss(norm):
            out = norm(x)
            return jnp.sum(jnp.sin(out)), out

        gradient, out = library.filter_jit(library.filter_grad(loss, has_aux=True))(norm)
        results.append([out, gradient.g, gradient.layer.weight, gradient.layer.bias])
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("axis", [0, 1, -1, 2, None])
def test_layer_computes_at_first_what_it_did(axis, getkey):
    conv = nn.Conv2d(2, 3, 2, key=getkey())
    x = jr.normal(getkey(), (2, 4, 4))
    norm = eqx.filter_jit(nn.WeightNorm(conv, axis=axis))
    np.testing.assert_allclose(norm(x), conv(x), rtol=1e-4, atol=1e-6)


def test_length_of_the_weight_changes_nothing(getkey):
    norm = nn.WeightNorm(nn.Linear(3, 4, key=getkey()))
    scaled = eqx.tree_at(lambda norm: norm.layer.weight, norm, 3 * norm.layer.weight)
    x = jr.normal(getkey(), (3,))
    np.testing.assert_allclose(scaled(x), norm(x), rtol=1e-5)


def test_norm_past_the_range_of_float16_is_no_trouble(getkey):
    linear = nn.Linear(300, 2, use_bias=False, dtype=jnp.float16, key=getkey())
    linear = eqx.tree_at(lambda linear: linear.weight, linear, jnp.full((2, 300), 100, jnp.float16))
    norm = eqx.filter_jit(nn.WeightNorm(linear))
    np.testing.assert_allclose(norm(jnp.full(300, 0.01, jnp.float16)), [300, 300], rtol=2e-3)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"weight_name": "use_bias"}, ValueError, "Linear.use_bias to be an array, got bool"),
        ({"weight_name": "kernel"}, AttributeError, "kernel"),
        ({"axis": 2}, ValueError, r"axis of Linear.weight, which has shape \(4, 3\); got 2"),
    ],
)
def test_errors_name_what_was_expected_and_what_came(options, error, message, getkey):
    with pytest.raises(error, match=message):
        nn.WeightNorm(nn.Linear(3, 4, key=getkey()), **options)


def test_vmapped_layers_are_normalised_each_by_itself(getkey):
    norms = eqx.filter_vmap(lambda key: nn.WeightNorm(nn.Linear(3, 4, key=key)))(
        jr.split(getkey(), 2)
    )
    x = jr.normal(getkey(), (3,))
    call = eqx.filter_jit(eqx.filter_vmap(lambda layer: layer(x)))
    out, expected = call(norms), call(norms.layer)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-6)
