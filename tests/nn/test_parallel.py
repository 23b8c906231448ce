"""`nn.Parallel` hands keys and states to its branches, and joins their outputs."""

import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqxlike as eqx
from eqxlike import nn
from tests.nn.arrays import assert_close
from tests.nn.cases import Counter
from tests.nn.mistakes import each_mistake

X = jnp.array([0.5, -1.0, 2.0])


def linears(key, *sizes):
    keys = jr.split(key, len(sizes))
    return [nn.Linear(3, size, key=each) for size, each in zip(sizes, keys, strict=True)]


@eqx.filter_jit
def call(model, *args, key=None):
    """The output of a model, and of its branches by themselves."""
    keys = [None] * len(model) if key is None else jr.split(jr.clone(key), len(model))
    branches = [model[index] for index in range(len(model))]
    alone = [branch(*args, key=each) for branch, each in zip(branches, keys, strict=True)]
    return model(*args, key=key), alone


JOINS = [
    ("sum", (4, 4, 4), sum),
    ("concatenate", (4, 2, 3), np.concatenate),
    (jnp.stack, (4, 4), np.stack),
    (tuple, (4, 4), tuple),
]


@pytest.mark.parametrize(("join", "sizes", "expected"), JOINS)
def test_output_is_the_joined_outputs_of_the_branches(join, sizes, expected, getkey):
    output, alone = call(nn.Parallel(linears(getkey(), *sizes), join), X)
    assert_close(output, expected(jax.device_get(alone)))


def test_outputs_that_are_trees_are_joined_leaf_by_leaf(getkey):
    cells = [nn.LSTMCell(3, 2, key=key) for key in jr.split(getkey(), 2)]
    branches = [nn.Lambda(functools.partial(cell, X)) for cell in cells]
    for join, merge in (("sum", sum), ("concatenate", np.concatenate)):
        output, alone = call(nn.Parallel(branches, join), (jnp.ones(2), jnp.zeros(2)))
        assert_close(output, tuple(map(merge, zip(*jax.device_get(alone), strict=True))))


class Noise(eqx.Module):
    scale: float

    def __call__(self, x, mask=True, *, key=None):
        x = jnp.where(mask, x, 0)
        return x if key is None else x + self.scale * jr.normal(key, x.shape)


def test_each_branch_gets_its_own_key_and_further_arguments(getkey):
    model = nn.Parallel([Noise(1.0), nn.Parallel([Noise(2.0)]), Noise(3.0)], jnp.stack)
    mask = jnp.array([True, False, True])
    for key in (None, getkey()):
        output, alone = call(model, X, mask, key=key)
        assert_close(output, jnp.stack(alone))
    assert (output[:, 1] != 0).all()
    assert_close(call(model, X, mask)[0], np.array([[0.5, 0, 2]] * 3))


def test_module_as_the_join_is_trained(getkey):
    first, second, join = linears(getkey(), 3, 3, 1)
    model = nn.Parallel([first, second], nn.Sequential([nn.Lambda(sum), join]))
    gradient = eqx.filter_grad(lambda model: model(X).sum())(model)
    assert_close(gradient.join[1].weight[0], first(X) + second(X))


def test_stateful_branches_keep_their_own_values():
    @nn.make_with_state
    def make():
        return nn.Parallel([Counter(5), nn.Lambda(jnp.negative), Counter(7)], tuple)

    model, state = make()
    assert model.is_stateful()
    outputs, state = model(jnp.array(1), state)
    assert [*map(int, outputs)] == [7, -1, 9]
    outputs, state = model(jnp.array(1), state=state)
    assert [*map(int, outputs)] == [8, -1, 10]
    assert (state.get(model[0].index), state.get(model[2].index)) == (7, 9)


def test_model_without_stateful_branches_returns_its_state_unchanged():
    model, state = nn.Parallel([nn.Identity(), nn.Identity()]), object()
    assert not model.is_stateful()
    assert model(1, state=state) == (2, state)


MISTAKES = {
    ValueError: {
        "needs at least one branch": lambda: nn.Parallel([]),
        "join must be 'sum', 'concatenate' or a function .*, got 'product'": (
            lambda: nn.Parallel([nn.Identity()], "product")
        ),
    },
    TypeError: {
        r"Parallel: branches\[1\] expected a layer, or a function": (
            lambda: nn.Parallel([nn.Identity(), 3])
        ),
        r"Parallel needs the state, since branches\[1\], of type Counter, is stateful": (
            lambda: nn.Parallel([nn.Identity(), Counter()])(0)
        ),
    },
}


@each_mistake(MISTAKES)
def test_mistakes_are_refused(error, words, call):
    with pytest.raises(error, match=words):
        call()


def test_outputs_that_cannot_be_joined_name_the_layer(getkey):
    for join, message in (("sum", r"one shape, got \(4,\) and \(1,\)"), (jnp.stack, "shape")):
        model = nn.Sequential([nn.Parallel(linears(getkey(), 4, 1), join)])
        with pytest.raises(ValueError, match=message) as caught:
            model(X)
        note = "Raised while joining the outputs of Parallel at Sequential.layers[0]."
        assert note in caught.value.__notes__
