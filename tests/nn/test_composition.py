"""Layers one after another, and nodes that several places share."""

from typing import Any

import equinox
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqxlike as eqx
from eqxlike import Module, nn
from tests.nn.arrays import assert_close
from tests.nn.cases import Counter


class Add(Module):
    amount: int

    def __call__(self, x, *, key=None):
        return x + self.amount


class Record(Module):
    """Shows which key it got."""

    def __call__(self, x, *, key=None):
        return (*x, None if key is None else jr.key_data(key).tolist())


def test_indexes_slices_iterates_and_measures_like_a_tuple():
    layers = tuple(map(Add, range(3)))
    model = nn.Sequential(list(layers))
    assert (model[0], model[-1]) == (layers[0], layers[-1])
    assert isinstance(model[2:0:-1], nn.Sequential)
    assert model[2:0:-1].layers == layers[2:0:-1]
    assert tuple(model) == layers
    assert len(model) == 3
    with pytest.raises(IndexError):
        model[3]
    for index in ("a", True):
        with pytest.raises(TypeError, match="indexed by an integer or a slice, got"):
            model[index]


def test_every_layer_gets_its_own_key(getkey):
    key = getkey()
    model = nn.Sequential([Record(), Record()])
    assert model((), key=key) == tuple(jr.key_data(jr.split(jr.clone(key), 2)).tolist())
    assert model(()) == (None, None)


def make_counting():
    inner = nn.Sequential([Counter(), Add(100)])
    return nn.make_with_state(lambda: nn.Sequential([Counter(), Add(10), inner]))()


def test_state_passes_through_the_stateful_layers():
    model, state = make_counting()
    assert model.is_stateful()
    x, state = model(0, state)
    assert x == 112
    x, state = model(0, state=state)
    assert x == 114
    assert [leaf.tolist() for leaf in jax.tree.leaves(state)] == [2, 2]
    model, state = nn.Sequential([Add(1), nn.Sequential([Add(2)])]), object()
    assert not model.is_stateful()
    assert model(0, state) == (3, state)
    assert model(0) == nn.Sequential([])(3) == 3


def test_layer_may_declare_that_it_is_not_stateful():
    class Sometimes(Counter):
        def is_stateful(self):
            return False

        def __call__(self, x, *, key=None):
            return x

    assert nn.Sequential([Sometimes()])(3) == 3


def test_missing_state_is_an_error_that_names_the_layer():
    model, _ = make_counting()
    with pytest.raises(TypeError, match=r"Sequential needs the state, since layers\[0\].* Counter"):
        model(0)
    outer = nn.Sequential([nn.Lambda(model[1:])])
    with pytest.raises(TypeError, match=r"Sequential at .*layers\[0\].fn needs .* layers\[1\]"):
        outer(0)


def language_model(library):
    """Embedding and readout with one weight."""

    class LanguageModel(library.Module):
        shared: library.nn.Shared

        def __init__(self):
            embedding = library.nn.Embedding(5, 3, key=jr.key(0))
            pair = embedding, library.nn.Linear(3, 5, key=jr.key(1))
            self.shared = library.nn.Shared(pair, lambda p: p[1].weight, lambda p: p[0].weight)

        def __call__(self, token):
            embedding, linear = self.shared()
            return linear(embedding(token))

    return LanguageModel()


def arrays_of(model):
    return jax.tree.leaves(eqx.filter(model, eqx.is_array))


def test_shared_weight_has_the_output_and_gradient_of_equinox():
    results = []
    for library in (eqx, equinox):
        model = language_model(library)
        # The weight is stored once.
        assert [each.shape for each in arrays_of(model)] == [(5, 3), (5,)]

        def loss(model):
            out = model(jnp.array(2))
            return jnp.sum(jnp.sin(out)), out

        gradient = library.filter_jit(library.filter_grad(loss, has_aux=True))(model)
        results.append(jax.tree.leaves(gradient))
    assert len(results[0]) == 3
    assert_close(*results)


def test_several_nodes_may_be_computed_from_one():
    zeros = jnp.zeros((3, 2))
    pair = {"a": jnp.ones((2, 3)), "b": zeros, "c": zeros + 0}
    get = lambda t: (t["a"].T, 2 * t["a"].T)
    whole = nn.Shared(pair, where=lambda t: (t["b"], t["c"]), get=get)()
    np.testing.assert_array_equal(whole["b"], np.ones((3, 2)))
    np.testing.assert_array_equal(whole["c"], 2 * np.ones((3, 2)))
    message = r"where\(pytree\) is .* shape \(3,\) .*, and get\(pytree\) is .* shape \(2,\)"
    with pytest.raises(ValueError, match=message):
        nn.Shared((jnp.ones(3), jnp.ones(2)), lambda t: t[0], lambda t: t[1])
    with pytest.raises(ValueError, match="a node that `where` removes"):
        nn.Shared((jnp.ones(3), 1), lambda t: t[0], lambda t: t[0])


def test_layer_gets_a_key_if_the_call_has_one_or_the_layer_takes_one():
    class Double(eqx.Module):
        bias: Any

        def __call__(self, x):
            return 2 * x + self.bias

    class Needs(Double):
        def __call__(self, x, *, key):
            return super().__call__(x) if key is None else -x

    def of_layers(make):
        mlp = nn.MLP(2, 2, 2, 2, activation=lambda x: x, key=jr.key(0))
        mlp = eqx.tree_at(lambda mlp: mlp.layers, mlp, tuple(make() for _ in mlp.layers))
        sequential = nn.Sequential([make(), make(), make()])
        return mlp, sequential, nn.ScanStack(lambda key: make(), 3, key=jr.key(0))

    x = np.array([1.0, 2.0], np.float32)
    doubling, needing = (
        of_layers(lambda make=make: make(np.zeros(2, "f"))) for make in (Double, Needs)
    )
    branches = nn.Parallel([Double(np.zeros(2, "f")), Double(np.ones(2, "f"))], "sum")

    @eqx.filter_jit
    def outputs(key):
        by_key = [each(x, key=jr.clone(key)) for each in needing]
        return [each(x) for each in doubling + needing], by_key, branches(x)

    without_key, by_key, of_branches = outputs(jr.key(0))
    for each in doubling:
        assert "Double" in str(nn.summary(each, x))  # which calls layers by its own class
    for out in without_key:
        np.testing.assert_allclose(out, 8 * x)
    for out in by_key:
        np.testing.assert_allclose(out, -x)
    np.testing.assert_allclose(of_branches, 4 * x + 1)
    np.testing.assert_allclose(nn.Sequential([jnp.tanh, abs])(-x), np.tanh(x), rtol=1e-6)
    with pytest.raises(TypeError, match="unexpected keyword argument 'key'"):
        nn.Sequential([Double(0.0)])(x, key=jr.key(0))
