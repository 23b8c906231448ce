import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eqxlike import Module, filter_grad, nn


class Add(Module):
    amount: int

    def __call__(self, x, *, key=None):
        return x + self.amount


class Record(Module):
    """Shows which key it got."""

    def __call__(self, x, *, key=None):
        return (*x, None if key is None else jr.key_data(key).tolist())


INDEX = st.integers(-4, 4)
SLICES = st.builds(slice, *[st.none() | INDEX] * 2, st.none() | INDEX.filter(bool))


@given(SLICES)
def test_slices_like_a_tuple(index):
    layers = tuple(map(Add, range(3)))
    sliced = nn.Sequential(layers)[index]
    assert isinstance(sliced, nn.Sequential)
    assert sliced.layers == layers[index]


def test_indexes_iterates_and_measures_like_a_tuple():
    layers = tuple(map(Add, range(3)))
    model = nn.Sequential(list(layers))
    assert (model[0], model[-1]) == (layers[0], layers[-1])
    assert tuple(model) == layers
    assert len(model) == 3
    with pytest.raises(IndexError):
        model[3]


def test_other_index_is_refused():
    with pytest.raises(TypeError, match="an integer or a slice, got str"):
        nn.Sequential([])["a"]


def test_layers_are_applied_in_order(getkey):
    linear = nn.Linear(2, 2, key=getkey())
    model = nn.Sequential([linear, nn.Lambda(jnp.tanh), linear])
    x = jnp.ones(2)
    np.testing.assert_array_equal(model(x), linear(jnp.tanh(linear(x))))


def test_every_layer_gets_a_key_of_its_own(getkey):
    key = getkey()
    model = nn.Sequential([Record(), Record()])
    assert model((), key=key) == tuple(jr.key_data(jr.split(key, 2)).tolist())
    assert model(()) == (None, None)


def test_empty_returns_its_input():
    assert nn.Sequential([])(3) == 3


def test_lambda_over_a_module_is_trained(getkey):
    layer = nn.Lambda(nn.Linear(2, "scalar", key=getkey()))
    gradient = filter_grad(lambda layer: layer(jnp.ones(2)))(layer)
    assert gradient.fn.weight.tolist() == [[1, 1]]


def test_lambda_ignores_its_key(getkey):
    assert nn.Lambda(jax.nn.relu)(jnp.array(-1.0), key=getkey()) == 0
