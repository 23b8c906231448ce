"""Normalisation of activations and of weights, compared with Equinox and formulas."""

import dataclasses

import equinox
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqxlike as eqx
from eqxlike import filter_jit, nn
from tests.nn.arrays import assert_close, filled, normal
from tests.nn.mistakes import each_mistake

LAYERS = {
    "LayerNorm": ((4,), (4,)),
    "RMSNorm": (((2, 4),), (2, 4)),
    "GroupNorm": ((2, 4), (4, 3, 2)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_norms_have_the_outputs_and_fields_of_equinox_and_return_the_state(name, getkey):
    arguments, shape = LAYERS[name]
    flags = ["channelwise_affine"] if name == "GroupNorm" else ["use_weight", "use_bias"]
    ours, theirs = (
        [getattr(library, name)(*arguments, **dict.fromkeys(flags, flag)) for flag in (True, False)]
        for library in (nn, equinox.nn)
    )
    assert list(vars(ours[0])) == list(vars(theirs[0]))
    x = 3 * np.asarray(normal(getkey(), shape)) + 2
    state = object()

    @filter_jit
    def outputs(ours, theirs, x):
        out, same = ours[0](x, state)
        assert same is state
        return [out, *(each(x) for each in ours)], [theirs[0](x), *(each(x) for each in theirs)]

    assert_close(*outputs(ours, theirs, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", LAYERS)
def test_squares_may_exceed_the_range_of_float16(name, getkey):
    arguments, shape = LAYERS[name]
    x = (1000 * np.asarray(normal(getkey(), shape))).astype(np.float16)

    @filter_jit
    def outputs(x):
        half = getattr(nn, name)(*arguments, dtype=jnp.float16)
        return half(x), getattr(nn, name)(*arguments)(x.astype(jnp.float32))

    out, expected = outputs(x)
    assert out.dtype == jnp.float16
    np.testing.assert_allclose(np.asarray(out, np.float32), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", [*LAYERS, "BatchNorm"])
def test_initializers_draw_weight_and_bias(name, getkey):
    arguments, _ = LAYERS.get(name, ((8, "batch"), None))
    initializers, mode = jax.nn.initializers, {"mode": "batch"} if name == "BatchNorm" else {}
    options = {"weight_init": initializers.normal(), "bias_init": initializers.ones, **mode}
    layer = getattr(nn, name)(*arguments, **options, key=getkey())
    assert len(np.unique(layer.weight)) == layer.weight.size
    assert np.all(np.asarray(layer.bias) == 1)


def test_elementwise_affine_sets_both_flags_and_warns():
    with pytest.warns(UserWarning, match="deprecated"):
        layer = nn.LayerNorm(4, elementwise_affine=False)
    assert layer.weight is None
    assert layer.bias is None


def test_weight_norm_and_its_gradient_equal_equinox(getkey):
    x = normal(getkey(), (3,))
    results = []
    for library in (eqx, equinox):

        def loss(norms):
            outputs = [norm(x) for norm in norms]
            return jnp.sum(jnp.sin(jnp.stack(outputs))), outputs

        def compute(linear, library=library, loss=loss):
            norms = [library.nn.WeightNorm(linear, axis=axis) for axis in (1, None)]
            changed = [eqx.tree_at(lambda norm: norm.g, each, 2 * each.g + 1) for each in norms]
            gradients, outputs = library.filter_grad(loss, has_aux=True)(changed)
            return outputs, [[each.g, each.layer.weight, each.layer.bias] for each in gradients]

        linear = filled(library.nn.Linear, 3, 4, key=jr.key(0))
        results.append(jax.tree.leaves(library.filter_jit(compute)(linear)))
    assert_close(*results, rtol=1e-4, atol=1e-5)


def test_new_weight_norm_computes_the_output_of_its_layer(getkey):
    conv, x = nn.Conv2d(2, 3, 2, key=getkey()), normal(getkey(), (2, 4, 4))

    @eqx.filter_jit
    def outputs(conv):
        return conv(x), [nn.WeightNorm(conv, axis=axis)(x) for axis in (0, -1, 2, None)]

    expected, others = outputs(conv)
    assert_close(others, [expected] * 4, rtol=1e-4, atol=1e-6)


def test_norm_of_weights_may_exceed_the_range_of_float16(getkey):
    linear = nn.Linear(300, 2, use_bias=False, dtype=jnp.float16, key=getkey())
    linear = eqx.tree_at(lambda linear: linear.weight, linear, jnp.full((2, 300), 100, jnp.float16))
    norm = eqx.filter_jit(nn.WeightNorm(linear))
    np.testing.assert_allclose(norm(jnp.full(300, 0.01, jnp.float16)), [300, 300], rtol=2e-3)


def test_spectral_norm_and_its_gradient_equal_equinox(getkey):
    ours, theirs = map(dataclasses.fields, (nn.SpectralNorm, equinox.nn.SpectralNorm))
    assert [each.name for each in ours] == [each.name for each in theirs]
    x = normal(getkey(), (2, 3, 3))
    results = []
    for library in (eqx, equinox):
        conv = library.nn.Conv2d(2, 3, 2, key=jr.key(0))
        norm, state = library.nn.make_with_state(library.nn.SpectralNorm)(
            conv, "weight", num_power_iterations=3, key=jr.key(1)
        )
        # The singular vectors of the new weight need more than three iterations.
        norm = eqx.tree_at(lambda norm: norm.layer.weight, norm, replace_fn=jnp.flip)

        def steps(norm, x, state):
            outputs = []
            for inference in (False, False, True):
                y, state = norm(x, state, inference=inference)
                outputs.append(y)
            return jnp.sum(jnp.sin(jnp.stack(outputs))), (outputs, state)

        step = library.filter_jit(library.filter_grad(steps, has_aux=True))
        gradient, outputs_and_state = step(norm, x, state)
        results.append([gradient.layer.weight, *jax.tree.leaves(outputs_and_state)])
    assert_close(*results, rtol=1e-4, atol=1e-5)


def test_zero_weight_leaves_the_state_finite(getkey):
    zeros = jnp.zeros((4, 3))
    linear = eqx.tree_at(lambda linear: linear.weight, nn.Linear(3, 4, key=getkey()), zeros)
    _, state = nn.make_with_state(nn.SpectralNorm)(linear, "weight", key=getkey())
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))


def spectral(*args):
    return lambda linear: nn.SpectralNorm(linear, *args, key=jr.key(1))


MISTAKES = {
    ValueError: {
        "number of channels: got groups=2 and channels=5": lambda _: nn.GroupNorm(2, 5),
        "needs `channels`": lambda _: nn.GroupNorm(2),
        "groups must be an integer of at least 1, got 0": lambda _: nn.GroupNorm(0, 4),
        r"divisible by groups=2, got shape \(5, 2\)": (
            lambda _: nn.GroupNorm(2, channelwise_affine=False)(jnp.ones((5, 2)))
        ),
        r"LayerNorm .* \(.*4.*\), got shape \(5,": lambda _: nn.LayerNorm(4)(jnp.ones((5, 7))),
        r"GroupNorm .* \(.*4.*\), got shape \(5,": lambda _: nn.GroupNorm(2, 4)(jnp.ones((5, 7))),
        "Linear.use_bias to be an array, got bool": lambda layer: nn.WeightNorm(layer, "use_bias"),
        r"axis of Linear.weight, which has shape \(4, 3\); got 2": (
            lambda linear: nn.WeightNorm(linear, axis=2)
        ),
        r"Linear.bias to be an array of at least two axes, got shape \(4,\)": spectral("bias"),
        "Linear.use_bias .* got bool": spectral("use_bias"),
        "num_power_iterations .*-1": spectral("weight", -1),
    }
}


@each_mistake(MISTAKES)
def test_mistakes_are_refused(error, words, call, getkey):
    with pytest.raises(error, match=words):
        call(nn.Linear(3, 4, key=getkey()))


def test_gradient_of_residual_blocks_computes_each_sum_once(getkey):
    norm, weight = nn.LayerNorm(4), jr.normal(getkey(), (4, 4))

    def num_negated(depth):
        def loss(x):
            for _ in range(depth):
                x = x + jnp.tanh(jax.vmap(norm)(x) @ weight)
            return jnp.sum(x)

        text = jax.jit(jax.grad(loss)).lower(jnp.ones((512, 4))).compile().as_text()
        assert text is not None
        return text.count(" negate(")

    assert num_negated(8) <= 2 * num_negated(4) + 1
