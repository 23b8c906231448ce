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
    assert model((), key=key) == tuple(jr.key_data(jr.split(jr.clone(key), 2)).tolist())
    assert model(()) == (None, None)


def test_empty_returns_its_input():
    assert nn.Sequential([])(3) == 3


def test_lambda_over_a_module_is_trained(getkey):
    layer = nn.Lambda(nn.Linear(2, "scalar", key=getkey()))
    gradient = filter_grad(lambda layer: layer(jnp.ones(2)))(layer)
    assert gradient.fn.weight.tolist() == [[1, 1]]


def test_lambda_ignores_its_key(getkey):
    assert nn.Lambda(jax.nn.relu)(jnp.array(-1.0), key=getkey()) == 0


class Count(nn.StatefulLayer):
    """Adds how often it was called, and shows which key it got."""

    index: nn.StateIndex

    def __init__(self):
        self.index = nn.StateIndex(jnp.array(0))

    def __call__(self, x, state, *, key=None):
        count = state.get(self.index) + 1
        return x + count, state.set(self.index, count)


def make_counting():
    inner = nn.Sequential([Count(), Add(100)])
    return nn.make_with_state(lambda: nn.Sequential([Count(), Add(10), inner]))()


def test_state_passes_through_the_layers_that_have_one():
    model, state = make_counting()
    assert model.is_stateful()
    x, state = model(0, state)
    assert x == 112
    x, state = model(0, state=state)
    assert x == 114
    assert [leaf.tolist() for leaf in jax.tree.leaves(state)] == [2, 2]


def test_sequential_without_stateful_layers_returns_the_state_that_it_got():
    model = nn.Sequential([Add(1), nn.Sequential([Add(2)])])
    assert not model.is_stateful()
    state = object()
    assert model(0, state) == (3, state)
    assert model(0) == 3


def test_layer_can_say_that_it_is_not_stateful():
    class Sometimes(Count):
        def is_stateful(self):
            return False

        def __call__(self, x, *, key=None):
            return x

    assert nn.Sequential([Sometimes()])(3) == 3


def test_missing_state_is_an_error_that_names_the_layer():
    model, _ = make_counting()
    with pytest.raises(TypeError, match=r"Sequential needs the state, since layers\[0\].* Count"):
        model(0)
    outer = nn.Sequential([nn.Lambda(model[1:])])
    with pytest.raises(TypeError, match=r"Sequential at .*layers\[0\].fn needs .* layers\[1\]"):
        outer(0)
