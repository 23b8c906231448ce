import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqxlike as eqx
from eqxlike import nn
from tests.nn.arrays import normal
from tests.nn.parallel.branches import Counter, Noise, X, assert_close, call, linears, one_by_one


def test_each_branch_gets_the_key_that_it_gets_one_by_one(getkey):
    branches = [Noise(jnp.array(1.0)), nn.Dropout(0.5), Noise(jnp.array(2.0)), nn.Dropout(0.5)]
    model, key = nn.Parallel(branches, jnp.stack), getkey()
    assert model.places == ((0, 2), (1, 3))
    assert_close(call(model, X, key=key), one_by_one(branches, X, key=jr.clone(key)))


def test_branches_get_no_key_without_one():
    assert_close(nn.Parallel([Noise(jnp.array(1.0)), Noise(jnp.array(2.0))])(X), 2 * X)


def test_further_arguments_go_to_every_branch(getkey):
    class Masked(eqx.Module):
        linear: nn.Linear

        def __call__(self, x, mask, *, key=None):
            return jnp.where(mask, self.linear(x), 0)

    branches = [*map(Masked, linears(getkey()))]
    mask = jnp.array([True, False, True, False])
    expected = sum(map(np.asarray, one_by_one(branches, X, mask)))
    assert_close(call(nn.Parallel(branches), X, mask), expected)


def test_equal_stateful_branches_have_each_a_value_of_their_own():
    model, state = nn.make_with_state(lambda: nn.Parallel([Counter(10), Counter(20)], tuple))()
    assert model.places == ((0, 1),)
    assert state.get(model.groups[0].index).tolist() == [0, 0]
    assert [*map(int, model(0, state)[0])] == [11, 21]


def test_branches_begin_with_their_own_initial_values():
    branches = [Counter(0, init=jnp.array(value)) for value in (5, 7)]
    model, state = nn.make_with_state(lambda: nn.Parallel(branches, tuple))()
    assert [*map(int, model(0, state)[0])] == [6, 8]


@pytest.mark.parametrize("others", [[], [nn.Lambda(jnp.negative)]])
def test_stateful_branches_compute_what_they_do_one_by_one(others, getkey):
    def make():
        return nn.BatchNorm(3, mode="batch", batched=True)

    norms = [nn.make_with_state(make)() for _ in range(2)]
    model, state = nn.make_with_state(
        lambda: nn.Parallel([make(), *others, make()], "concatenate", axis=-1)
    )()
    for _ in range(2):
        x = normal(getkey(), (5, 3))
        y, state = call(model, x, state)
        outputs = [call(norm, x, norm_state) for norm, norm_state in norms]
        norms = [(norm, new) for (norm, _), (_, new) in zip(norms, outputs, strict=True)]
        first, second = (output for output, _ in outputs)
        assert_close(y, np.concatenate([first, *(other(x) for other in others), second], -1))
    expected = [state for _, state in norms]
    for stacked, *each in zip(*map(jax.tree.leaves, (state, *expected)), strict=True):
        assert_close(stacked, each)


@pytest.mark.parametrize("name", ["positional", "keyword"])
def test_state_comes_back_beside_the_output(name):
    model, state = nn.make_with_state(lambda: nn.Parallel([Counter(1), nn.Identity()]))()
    assert model.is_stateful()
    x, state = model(0, state) if name == "positional" else model(0, state=state)
    assert (x, state.get(model.groups[0].index)) == (2, 1)


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
