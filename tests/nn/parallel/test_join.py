import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqxlike as eqx
from eqxlike import nn
from tests.nn.arrays import normal
from tests.nn.parallel.branches import Scale, X, assert_close, call, linear, linears, one_by_one


def test_sum_of_linear_layers_is_the_layer_of_summed_weights(getkey):
    branches = linears(getkey())
    weight = sum(np.asarray(branch.weight) for branch in branches)
    bias = sum(np.asarray(branch.bias) for branch in branches)
    assert_close(nn.Parallel(branches)(X), weight @ X + bias)


def test_function_gets_the_outputs_in_the_order_of_the_branches(getkey):
    first, last, other = *linears(getkey(), 2), nn.Identity()
    outputs = nn.Parallel([first, other, last], join=lambda outputs: outputs)(X)
    for output, expected in zip(outputs, [first(X), X, last(X)], strict=True):
        assert_close(output, expected)


def test_mixed_branches_are_concatenated_in_their_order(getkey):
    (first, last), other = linears(getkey(), 2), linear(getkey(), 2)
    model = nn.Parallel([first, other, last], "concatenate")
    assert model.places == ((0, 2), (1,))
    assert_close(call(model, X), np.concatenate(one_by_one([first, other, last], X)))


@pytest.mark.parametrize(("axis", "num_mixed"), [(None, 0), (2, 1), (-3, 1)])
def test_outputs_are_concatenated_along_any_axis(axis, num_mixed, getkey):
    sizes = [(1, 3)] * 2 + [(2, 4)] * num_mixed
    branches = [nn.Conv2d(1, 2, size[1], padding="SAME", key=getkey()) for size in sizes]
    image = normal(getkey(), (1, 5, 6))
    expected = np.concatenate(one_by_one(branches, image), 0 if axis is None else axis)
    model = nn.Parallel(branches, "concatenate", axis=axis)
    assert_close(call(model, image), expected)


def test_outputs_that_are_trees_are_joined_leaf_by_leaf(getkey):
    cells = [nn.LSTMCell(3, 2, key=key) for key in jr.split(getkey(), 2)]
    carry = jnp.ones(2), jnp.zeros(2)
    branches = [nn.Lambda(functools.partial(cell, X)) for cell in cells]
    (h, c), (other_h, other_c) = jax.device_get(one_by_one(branches, carry))
    for join, expected in (
        ("sum", (h + other_h, c + other_c)),
        ("concatenate", (np.append(h, other_h), np.append(c, other_c))),
    ):
        model = nn.Parallel(branches, join)
        for output, each in zip(call(model, carry), expected, strict=True):
            assert_close(output, each)


@pytest.mark.parametrize("dtype", ["int8", "bool"])
def test_sum_has_the_dtype_of_the_outputs(dtype):
    branches = [Scale(jnp.ones((), dtype)), Scale(jnp.ones((), dtype))]
    x = jnp.ones(2, dtype)
    total = nn.Parallel(branches)(x)
    assert (total.dtype, total.tolist()) == (x.dtype, (x + x).tolist())


def test_numbers_are_summed():
    assert nn.Parallel([Scale(2), Scale(2), Scale(3)])(10) == 70


class Weigh(eqx.Module):
    weights: jax.Array

    def __call__(self, outputs):
        return self.weights @ jnp.stack(outputs)


def test_module_that_joins_is_trained(getkey):
    branches = linears(getkey())
    model = nn.Parallel(branches, Weigh(jnp.arange(3.0)))
    gradient = eqx.filter_jit(eqx.filter_grad(lambda model: jnp.sum(model(X))))(model)
    assert_close(gradient.function.weights, np.sum(one_by_one(branches, X), axis=1))
