import equinox
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqxlike as eqx
from eqxlike import nn


def language_model(library):
    """Embedding and readout with one weight."""

    class LanguageModel(library.Module):
        shared: library.nn.Shared

        def __init__(self):
            pair = (
                library.nn.Embedding(5, 3, key=jr.key(0)),
                library.nn.Linear(3, 5, key=jr.key(1)),
            )
            self.shared = library.nn.Shared(
                pair, where=lambda pair: pair[1].weight, get=lambda pair: pair[0].weight
            )

        def __call__(self, token):
            embedding, linear = self.shared()
            return linear(embedding(token))

    return LanguageModel()


def test_output_and_gradient_are_those_of_equinox():
    results = []
    for library in (eqx, equinox):
        model = language_model(library)

        def loss(model):
            return jnp.sum(jnp.sin(model(jnp.array(2))))

        def compute(model, library=library, loss=loss):
            return model(jnp.array(2)), library.filter_grad(loss)(model)

        results.append(jax.tree.leaves(library.filter_jit(compute)(model)))
    assert len(results[0]) == 3
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_shared_array_is_stored_once():
    model = language_model(eqx)
    assert [leaf.shape for leaf in jax.tree.leaves(eqx.filter(model, eqx.is_array))] == [
        (5, 3),
        (5,),
    ]


def test_training_keeps_the_array_shared():
    model = language_model(eqx)

    @eqx.filter_jit
    def step(model):
        gradient = eqx.filter_grad(lambda model: jnp.sum(model(jnp.array(2)) ** 2))(model)
        return eqx.apply_updates(model, jax.tree.map(jnp.negative, gradient))

    embedding, linear = step(model).shared()
    np.testing.assert_array_equal(embedding.weight, linear.weight)
    assert not np.array_equal(embedding.weight, model.shared()[0].weight)


def test_several_nodes_and_what_is_computed_from_one():
    pair = {"a": jnp.ones((2, 3)), "b": jnp.zeros((3, 2)), "c": jnp.zeros((3, 2))}
    shared = nn.Shared(
        pair, where=lambda t: (t["b"], t["c"]), get=lambda t: (t["a"].T, 2 * t["a"].T)
    )
    whole = shared()
    np.testing.assert_array_equal(whole["b"], np.ones((3, 2)))
    np.testing.assert_array_equal(whole["c"], 2 * np.ones((3, 2)))


def test_whole_layer_can_be_shared():
    layers = [nn.Linear(2, 2, key=jr.key(seed)) for seed in range(2)]
    first, second = nn.Shared(layers, where=lambda t: t[1], get=lambda t: t[0])()
    assert eqx.tree_equal(first, second)


def test_shared_comes_through_jit_and_vmap():
    shared = language_model(eqx).shared
    traces = []

    @eqx.filter_jit
    def total(shared):
        traces.append(None)
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(eqx.filter(shared(), eqx.is_array)))

    np.testing.assert_allclose(total(shared), total(jax.tree.map(lambda x: x, shared)))
    assert len(traces) == 1


@pytest.mark.parametrize(
    ("tree", "where", "get", "message"),
    [
        (
            (jnp.ones(3), jnp.ones(2)),
            lambda t: t[0],
            lambda t: t[1],
            r"where\(pytree\) is .* shape \(3,\) .*, and get\(pytree\) is .* shape \(2,\)",
        ),
        (
            (jnp.ones(3), jnp.ones(3, int)),
            lambda t: t[0],
            lambda t: t[1],
            r"where\(pytree\) is .* float32, and get\(pytree\) is .* int32\.",
        ),
        (
            (jnp.ones(3), [jnp.ones(3)]),
            lambda t: t[0],
            lambda t: t[1],
            r"where\(pytree\) is an array .*, and get\(pytree\) is a list of length 1\.",
        ),
        ((jnp.ones(3), 1), lambda t: t[0], lambda t: t[0], "a node that `where` takes out"),
    ],
)
def test_nodes_that_cannot_be_shared_are_refused(tree, where, get, message):
    with pytest.raises(ValueError, match=message):
        nn.Shared(tree, where, get)
