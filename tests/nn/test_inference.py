from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

from eqxlike import Module, nn


class Outer(Module):
    inference: bool
    inner: Module
    others: dict


class Named(NamedTuple):
    inference: bool
    other: int


class Foreign:
    inference = False


def test_sets_every_flag_at_every_depth(getkey):
    model = Outer(
        False,
        nn.Sequential([nn.Dropout(), nn.Linear(2, 2, key=getkey())]),
        {"a": [Outer(False, nn.BayesianLinear(2, 2, key=getkey()), {})], "b": nn.Dropout()},
    )
    switched = nn.inference_mode(model)
    flags = [
        switched.inference,
        switched.inner[0].inference,
        switched.others["a"][0].inference,
        switched.others["a"][0].inner.inference,
        switched.others["b"].inference,
    ]
    assert flags == [True] * 5
    assert model.inner[0].inference is False
    assert switched.inner[1] == model.inner[1]


def test_there_and_back_is_the_same_model(getkey):
    model = nn.Sequential(
        [nn.Dropout(), nn.Lambda(jnp.tanh), nn.BayesianLinear(2, 2, key=getkey())]
    )
    assert nn.inference_mode(nn.inference_mode(model), value=False) == model


def test_any_pytree_node_with_the_attribute_counts():
    assert nn.inference_mode([Named(False, 1)]) == [Named(True, 1)]


@pytest.mark.parametrize("leaf", [Foreign(), Foreign, 3, None])
def test_leaves_stay_as_they_are(leaf):
    tree = [leaf, nn.Dropout()]
    switched = nn.inference_mode(tree)
    assert switched[0] is leaf
    assert switched[1].inference


def test_tree_without_flags_comes_back(getkey):
    model = nn.Linear(2, 2, key=getkey())
    assert nn.inference_mode(model) is model


def test_flag_switches_what_the_model_does(getkey):
    model = nn.Sequential([nn.Dropout(0.5), nn.BayesianLinear(3, 2, key=getkey())])
    call = jax.jit(lambda x: nn.inference_mode(model)(x))
    assert call(jnp.ones(3)).shape == (2,)
    with pytest.raises(RuntimeError, match="needs a key"):
        model(jnp.ones(3))
