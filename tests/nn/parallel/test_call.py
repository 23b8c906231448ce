"""What `nn.Parallel` hands to its branches, and how what they return is joined."""

import functools

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
    Scale,
    X,
    assert_close,
    call,
    linear,
    linears,
    one_by_one,
)


def test_sum_of_linear_layers_is_the_layer_of_summed_weights(getkey):
    branches = linears(getkey())
    weight = sum(np.asarray(branch.weight) for branch in branches)
    bias = sum(np.asarray(branch.bias) for branch in branches)
    assert_close(call(nn.Parallel(branches), X), weight @ np.asarray(X) + bias)


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


@pytest.mark.parametrize(("axis", "num_mixed"), [(None, 0), (-1, 0), (2, 1), (-3, 1)])
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


def test_each_branch_gets_the_key_that_it_gets_one_by_one(getkey):
    branches = [Noise(jnp.array(1.0)), nn.Dropout(0.5), Noise(jnp.array(2.0)), nn.Dropout(0.5)]
    model, key = nn.Parallel(branches, jnp.stack), getkey()
    assert model.places == ((0, 2), (1, 3))
    assert_close(call(model, X, key=key), one_by_one(branches, X, key=jr.clone(key)))


def test_branches_get_no_key_without_one():
    assert_close(nn.Parallel([Noise(jnp.array(1.0)), Noise(jnp.array(2.0))])(X), 2 * X)


def test_further_arguments_go_to_every_branch():
    class Masked(eqx.Module):
        scale: jax.Array

        def __call__(self, x, mask, *, key=None):
            return jnp.where(mask, self.scale * x, 0)

    branches = [Masked(jnp.array(value)) for value in (2.0, 3.0)]
    mask = jnp.array([True, False, True])
    assert_close(call(nn.Parallel(branches), X, mask), 5 * X * mask.astype(X.dtype))


def test_stateful_branches_begin_with_values_of_their_own_and_keep_them():
    first, last = (Counter(0, init=jnp.array(value)) for value in (5, 7))
    model, state = nn.make_with_state(
        lambda: nn.Parallel([first, nn.Lambda(jnp.negative), last], tuple)
    )()
    assert model.places == ((0, 2), (1,))
    assert state.get(model.groups[0].index).tolist() == [5, 7]
    for expected in ([7, -1, 9], [8, -1, 10]):
        outputs, state = model(jnp.array(1), state)
        assert [*map(int, outputs)] == expected
    assert state.get(model.groups[0].index).tolist() == [7, 9]


def test_state_comes_back_beside_the_output():
    model, state = nn.make_with_state(lambda: nn.Parallel([Counter(1), nn.Identity()]))()
    assert model.is_stateful()
    x, state = model(0, state)
    assert (x, state.get(model.groups[0].index)) == (2, 1)
    x, state = model(0, state=state)
    assert (x, state.get(model.groups[0].index)) == (3, 2)


def test_layer_that_stands_in_a_state_already_keeps_its_place():
    counter, state = nn.make_with_state(Counter)(0)
    model = nn.Parallel([counter, counter], tuple)
    assert model.places == ((0,), (1,))
    outputs, state = model(0, state)
    assert [*map(int, outputs)] == [1, 2]


def test_model_without_stateful_branches_returns_the_state_that_it_got():
    model, state = nn.Parallel([nn.Identity(), nn.Identity()]), object()
    assert not model.is_stateful()
    assert model(1, state=state) == (2, state)
    _, some_state = nn.make_with_state(Counter)(0)
    assert model(1, some_state) == (2, some_state)


def test_missing_state_is_an_error_that_names_the_branch():
    model, _ = nn.make_with_state(
        lambda: nn.Sequential([nn.Lambda(nn.Parallel([nn.Identity(), Counter(0)]))])
    )()
    message = (
        r"Parallel at Sequential.layers\[0\].fn needs the state, since branches\[1\], of type "
        r"Counter, is stateful: write `y, state = model\(x, state\)`"
    )
    with pytest.raises(TypeError, match=message):
        model(0)


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


def test_whole_stack_is_replaced_by_what_has_no_arrays(getkey):
    model = nn.Parallel(linears(getkey()))
    assert_close(nn.replace_layers(model, nn.Linear, lambda _: nn.Identity())(X), 3 * X)
