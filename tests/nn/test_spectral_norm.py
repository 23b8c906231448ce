import dataclasses
import operator

import equinox
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqxlike as eqx
from eqxlike import nn


def make(library, layer, **options):
    return library.nn.make_with_state(library.nn.SpectralNorm)(
        layer(library), "weight", **options, key=jr.key(1)
    )


LAYERS = {
    "Linear": (lambda library: library.nn.Linear(3, 4, key=jr.key(0)), (3,), {}),
    "Conv2d": (
        lambda library: library.nn.Conv2d(2, 3, 2, key=jr.key(0)),
        (2, 3, 3),
        {"num_power_iterations": 3},
    ),
}


@pytest.mark.parametrize(("layer", "shape", "options"), LAYERS.values(), ids=LAYERS)
def test_same_key_computes_what_it_does_in_equinox(layer, shape, options, getkey):
    x = jr.normal(getkey(), shape)
    results = []
    for library in (eqx, equinox):
        norm, state = make(library, layer, **options)
        outputs = []
        for _ in range(2):
            y, state = norm(x, state)
            outputs.append(y)
        results.append([*outputs, norm(x, state, inference=True)[0], *jax.tree.leaves(state)])
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_fields_are_those_of_equinox():
    ours, theirs = (
        [field.name for field in dataclasses.fields(library.nn.SpectralNorm)]
        for library in (eqx, equinox)
    )
    assert ours == theirs


def test_weight_is_divided_by_its_largest_singular_value(getkey):
    linear = nn.Linear(5, 4, use_bias=False, key=getkey())
    norm, state = nn.make_with_state(nn.SpectralNorm)(
        linear, "weight", num_power_iterations=100, key=getkey()
    )
    x = jr.normal(getkey(), (5,))
    expected = linear(x) / np.linalg.norm(linear.weight, 2)
    np.testing.assert_allclose(norm(x, state)[0], expected, rtol=1e-4)


def test_gradient_takes_the_singular_vectors_as_constants(getkey):
    linear = nn.Linear(5, 4, use_bias=False, key=getkey())
    norm, state = nn.make_with_state(nn.SpectralNorm)(linear, "weight", key=getkey())
    norm = nn.inference_mode(norm)
    x = jr.normal(getkey(), (5,))
    u, v = state.get(norm.uv_index)

    def by_hand(weight):
        return jnp.sum((weight / (u @ weight @ v)) @ x)

    gradient = eqx.filter_grad(lambda norm: jnp.sum(norm(x, state)[0]))(norm)
    np.testing.assert_allclose(
        gradient.layer.weight, jax.grad(by_hand)(linear.weight), rtol=1e-4, atol=1e-6
    )


def test_inference_leaves_the_state_alone(getkey):
    norm, state = make(eqx, LAYERS["Linear"][0], inference=True)
    before = jax.tree.leaves(state)
    _, state = norm(jnp.ones(3), state)
    assert all(map(operator.is_, jax.tree.leaves(state), before))


def test_weight_of_zeros_leaves_the_state_finite(getkey):
    linear = eqx.tree_at(
        lambda linear: linear.weight, nn.Linear(3, 4, key=getkey()), jnp.zeros((4, 3))
    )
    _, state = nn.make_with_state(nn.SpectralNorm)(linear, "weight", key=getkey())
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(state))


def test_sequential_passes_the_state_through(getkey):
    def make_model():
        return nn.Sequential(
            [
                nn.SpectralNorm(nn.Linear(3, 4, key=jr.key(0)), "weight", key=jr.key(1)),
                nn.Lambda(jnp.tanh),
                nn.SpectralNorm(nn.Linear(4, 2, key=jr.key(2)), "weight", key=jr.key(3)),
            ]
        )

    model, state = nn.make_with_state(make_model)()
    y, state = eqx.filter_jit(model)(jnp.ones(3), state)
    assert y.shape == (2,)
    assert len(jax.tree.leaves(state)) == 4


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda linear: nn.SpectralNorm(linear, "bias", key=jr.key(0)),
            ValueError,
            r"Linear.bias to be an array of at least two axes, got shape \(4,\)",
        ),
        (
            lambda linear: nn.SpectralNorm(linear, "use_bias", key=jr.key(0)),
            ValueError,
            "Linear.use_bias .* got bool",
        ),
        (
            lambda linear: nn.SpectralNorm(linear, "kernel", key=jr.key(0)),
            AttributeError,
            "kernel",
        ),
        (
            lambda linear: nn.SpectralNorm(linear, "weight", -1, key=jr.key(0)),
            ValueError,
            "num_power_iterations .*-1",
        ),
    ],
)
def test_errors_name_what_was_expected_and_what_came(make, error, message, getkey):
    with pytest.raises(error, match=message):
        make(nn.Linear(3, 4, key=getkey()))
