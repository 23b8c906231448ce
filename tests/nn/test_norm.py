import equinox
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from eqxlike import nn

LAYERS = {
    "LayerNorm": ((4,), (4,)),
    "RMSNorm": (((2, 4),), (2, 4)),
    "GroupNorm": ((2, 4), (4, 3, 2)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_output_and_fields_are_those_of_equinox(name, getkey):
    arguments, shape = LAYERS[name]
    ours, theirs = getattr(nn, name)(*arguments), getattr(equinox.nn, name)(*arguments)
    assert list(vars(ours)) == list(vars(theirs))
    x = 3 * jr.normal(getkey(), shape) + 2
    np.testing.assert_allclose(ours(x), theirs(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", LAYERS)
def test_state_comes_back_as_it_went_in(name):
    arguments, shape = LAYERS[name]
    layer, state = getattr(nn, name)(*arguments), object()
    out, same = layer(jnp.ones(shape), state)
    assert same is state
    np.testing.assert_array_equal(out, layer(jnp.ones(shape)))


@pytest.mark.parametrize("name", LAYERS)
def test_squares_past_the_range_of_float16_are_no_trouble(name, getkey):
    arguments, shape = LAYERS[name]
    x = (1000 * jr.normal(getkey(), shape)).astype(jnp.float16)
    out = getattr(nn, name)(*arguments, dtype=jnp.float16)(x)
    expected = getattr(nn, name)(*arguments)(x.astype(jnp.float32))
    assert out.dtype == jnp.float16
    np.testing.assert_allclose(out.astype(jnp.float32), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", LAYERS)
def test_initializers_draw_weight_and_bias(name, getkey):
    arguments, _ = LAYERS[name]
    initializers = jax.nn.initializers
    layer = getattr(nn, name)(
        *arguments, weight_init=initializers.normal(), bias_init=initializers.ones, key=getkey()
    )
    assert len(np.unique(layer.weight)) == layer.weight.size
    assert bool(jnp.all(layer.bias == 1))


@pytest.mark.parametrize("name", LAYERS)
def test_wrong_shape_says_expected_and_got(name):
    arguments, _ = LAYERS[name]
    with pytest.raises(ValueError, match=rf"{name} expected x of shape \(.*4.*\), got shape \(5,"):
        getattr(nn, name)(*arguments)(jnp.ones((5, 7)))


def test_elementwise_affine_is_the_old_name_of_both_flags():
    with pytest.warns(UserWarning, match="the old name"):
        layer = nn.LayerNorm(4, elementwise_affine=False)
    assert layer.weight is None
    assert layer.bias is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((2, 5), "must divide the number of channels: got groups=2 and channels=5"),
        ((2,), "needs `channels`"),
        ((0, 4), "groups must be an integer of at least 1, got 0"),
    ],
)
def test_unfit_groups_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        nn.GroupNorm(*arguments)


def test_input_that_the_groups_do_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"groups=2 divides, got shape \(5, 2\)"):
        nn.GroupNorm(2, channelwise_affine=False)(jnp.ones((5, 2)))
