import copy
import pickle

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqxlike as eqx
from eqxlike import nn
from tests.nn.arrays import normal
from tests.nn.parallel.branches import (
    Counter,
    Noise,
    X,
    assert_close,
    call,
    linear,
    linears,
    one_by_one,
)


def test_gradient_is_that_of_the_branches_one_by_one(getkey):
    branches = [*linears(getkey()), nn.MLP(3, 4, 5, 1, key=getkey())]
    batch = normal(getkey(), (5, 3))

    @eqx.filter_value_and_grad
    def parallel(model):
        return jnp.sum(eqx.filter_vmap(model)(batch) ** 2)

    @eqx.filter_value_and_grad
    def separate(branches):
        return jnp.sum(sum(jax.vmap(branch)(batch) for branch in branches) ** 2)

    @eqx.filter_jit
    def both(model, branches):
        value, gradient = parallel(model)
        return (value, [*gradient]), separate(branches)

    (value, gradient), (expected, gradients) = both(nn.Parallel(branches), branches)
    assert_close(value, expected)
    for pair in zip(gradient, gradients, strict=True):
        for one, other in zip(*map(jax.tree.leaves, pair), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_keys_of_a_batch_are_of_each_example_and_branch(getkey):
    branches = [Noise(jnp.array(1.0)), nn.Dropout(0.5), Noise(jnp.array(2.0))]
    model, batch, keys = nn.Parallel(branches), jnp.ones((2, 3)), jr.split(getkey(), 2)

    @eqx.filter_jit
    def found_and_expected(batch, keys):
        expected = [
            sum(one_by_one(branches, batch[index], key=jr.clone(keys)[index])) for index in range(2)
        ]
        return eqx.filter_vmap(lambda x, key: model(x, key=key))(batch, keys), jnp.stack(expected)

    assert_close(*found_and_expected(batch, keys))


def nested_counters():
    return nn.Parallel([nn.Parallel([Counter(1), Counter(2)], tuple) for _ in range(2)], tuple)


def test_parallel_branches_within_parallel_branches():
    model, state = nn.make_with_state(nested_counters)()
    assert model.places == model.groups[0].places == ((0, 1),)
    outputs, state = model(0, state)
    assert jax.tree.map(int, outputs) == ((2, 3), (2, 3))


@pytest.mark.parametrize("copied", [lambda m: pickle.loads(pickle.dumps(m)), copy.deepcopy])
def test_copies_are_equal_and_compute_the_same(copied, getkey):
    model = nn.Parallel([*linears(getkey()), nn.Linear(3, 4, False, key=getkey())])
    assert eqx.tree_equal(copied(model), model)
    assert_close(call(copied(model), X), call(model, X))


def test_tree_at_reaches_the_stacked_weights(getkey):
    model = nn.Parallel(linears(getkey()))
    zero = eqx.tree_at(lambda m: m.groups[0].weight, model, replace_fn=jnp.zeros_like)
    assert_close(call(zero, X), np.asarray(model.groups[0].bias).sum(0))
    assert not np.any(zero[1].weight)


def test_branches_frozen_beforehand_are_not_trained(getkey):
    first, second, third = linears(getkey())
    model = nn.Parallel([first, nn.freeze(second), third])
    assert model.places == ((0, 2), (1,))
    gradient = eqx.filter_grad(lambda model: jnp.sum(model(X)))(model)
    assert gradient.groups[0].weight.shape == (2, 4, 3)
    assert gradient.groups[1].weight is None


def test_stack_is_frozen_as_any_layer(getkey):
    model = nn.freeze(nn.Parallel(linears(getkey())), lambda m: m.groups[0].bias)
    gradient = eqx.filter_grad(lambda model: jnp.sum(model(X)))(model)
    assert gradient.groups[0].bias is None
    assert gradient.groups[0].weight.shape == model.groups[0].weight.shape


def test_branches_go_into_inference_mode():
    model = nn.Parallel([nn.Dropout(0.5), nn.Dropout(0.5), nn.Sequential([nn.Dropout(0.1)])])
    assert_close(nn.tree_inference(model)(X), 3 * X)


def test_layers_in_branches_are_replaced(getkey):
    model = nn.Parallel([*linears(getkey(), 2), nn.LayerNorm(3)], tuple)
    adapted = nn.replace_layers(
        model, nn.Linear, lambda layer, key: nn.LoRALinear(layer, rank=2, key=key), key=getkey()
    )
    assert [type(branch).__name__ for branch in adapted] == ["LoRALinear"] * 2 + ["LayerNorm"]
    for output, expected in zip(call(adapted, X), call(model, X), strict=True):
        assert_close(output, expected)


def test_whole_stack_is_replaced_by_what_has_no_arrays(getkey):
    model = nn.Parallel(linears(getkey()))
    assert_close(nn.replace_layers(model, nn.Linear, lambda _: nn.Identity())(X), 3 * X)


def test_summary_counts_what_is_stacked_once(getkey):
    summary = nn.summary(nn.Parallel(linears(getkey())), X)
    row = summary.rows[1]
    assert (row.path, row.type_name, row.num_calls) == (".groups[0]", "Linear", 1)
    assert row.num_parameters == 3 * (4 * 3 + 4)
    assert row.flops == 3 * nn.summary(linear(getkey()), X).flops


def test_posterior_of_each_branch_is_its_own(getkey):
    branches, key = linears(getkey()), getkey()
    model = nn.to_bayesian(nn.Parallel(branches, jnp.stack))
    expected = one_by_one([*map(nn.to_bayesian, branches)], X, key=jr.clone(key))
    assert_close(call(model, X, key=key), expected)
