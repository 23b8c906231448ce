"""`RNN`, which applies a cell to a sequence."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqxlike as eqx
from eqxlike import nn
from tests.nn.arrays import assert_close, filled, normal
from tests.nn.mistakes import each_mistake

CELLS = {"gru": nn.GRUCell, "lstm": nn.LSTMCell}


class Dropping(eqx.Module):
    """A user's cell that needs a key."""

    dropout: nn.Dropout

    def __call__(self, x, state, *, key):
        return {"sum": state["sum"] + self.dropout(x, key=key)}


class Bare(eqx.Module):
    """Wraps a cell in a type whose initial state is unknown."""

    cell: eqx.Module

    def __call__(self, x, state):
        return self.cell(x, state)


@pytest.mark.parametrize(("name", "reverse"), [("gru", False), ("lstm", True)])
def test_layer_applies_its_cell_up_to_the_length(name, reverse, getkey):
    cell = filled(CELLS[name], 3, 4, key=getkey())
    xs = normal(getkey(), (6, 3))
    zeros = jnp.zeros(4) if name == "gru" else (jnp.zeros(4), jnp.zeros(4))

    def by_hand(cell, xs, length):
        state, outputs = zeros, jnp.zeros((6, 4))
        for index in range(length)[:: -1 if reverse else 1]:
            state = cell(xs[index], state)
            outputs = outputs.at[index].set(state if name == "gru" else state[0])
        return outputs, state

    def by_layer(cell, xs, length):
        return nn.RNN(cell, reverse=reverse)(xs, length=length)

    def loss(arguments, run, length):
        outputs, state = run(*arguments, length)
        return jnp.sum(jnp.sin(outputs)) + sum(jnp.sum(x**2) for x in jax.tree.leaves(state))

    @eqx.filter_jit
    def program(cell, xs, lengths):
        found = [
            (by_layer(cell, xs, length), eqx.filter_grad(loss)((cell, xs), by_layer, length))
            for length in (*lengths, None)
        ]
        expected = [
            (by_hand(cell, xs, length), eqx.filter_grad(loss)((cell, xs), by_hand, length))
            for length in (0, 4, 6, 6)
        ]
        wrapped = nn.RNN(Bare(cell), reverse=reverse)(xs, zeros, length=lengths[1])
        return found, expected, wrapped

    found, expected, wrapped = program(cell, xs, jnp.array([0, 4, 6]))
    assert_close((found, wrapped), (expected, expected[1][0]))


def test_cell_gets_a_new_key_in_each_step_and_may_have_any_state(getkey):
    layer, key = nn.RNN(Dropping(nn.Dropout(0.5))), getkey()
    outputs, last = layer(jnp.ones((3, 20)), {"sum": jnp.zeros(20)}, key=key)
    dropped = [nn.Dropout(0.5)(jnp.ones(20), key=each) for each in jr.split(jr.clone(key), 3)]
    np.testing.assert_allclose(outputs["sum"], np.cumsum(dropped, axis=0))
    np.testing.assert_array_equal(last["sum"], outputs["sum"][-1])
    shorter = layer(jnp.ones((3, 20)), {"sum": jnp.zeros(20)}, key=jr.clone(key), length=2)
    np.testing.assert_array_equal(shorter[0]["sum"], outputs["sum"].at[2].set(0))
    np.testing.assert_array_equal(shorter[1]["sum"], outputs["sum"][1])


def test_state_has_the_dtype_of_the_steps(getkey):
    cell = nn.LSTMCell(3, 4, dtype=jnp.bfloat16, key=getkey())
    outputs, state = nn.RNN(nn.freeze(cell))(jnp.ones((5, 3), jnp.bfloat16))
    assert {each.dtype for each in (outputs, *state)} == {jnp.dtype(jnp.bfloat16)}


def call(*shape, hidden=None, wrap=lambda layer: layer, **options):
    layer = wrap(nn.RNN(nn.GRUCell(3, 4, key=jr.key(0))))
    return lambda: layer(jnp.ones(shape), *([] if hidden is None else [hidden]), **options)


MISTAKES = {
    ValueError: {
        r"\(sequence, 3\), .* `jax.vmap": call(2, 5, 3),
        r"RNN expected x of shape \(sequence, 3\)": call(5, 2),
        r"expected hidden of shape \(4": call(5, 3, hidden=jnp.ones(3)),
        r"length of shape \(\)": call(5, 3, length=jnp.ones(2)),
    },
    TypeError: {
        "length to be an integer, got 2.5": call(5, 3, length=2.5),
        r"is Bare\. .*`rnn\(xs, state": call(5, 3, wrap=lambda layer: nn.RNN(Bare(layer))),
        "RNN: cell expected a layer": lambda: nn.RNN("lstm"),
    },
}


@each_mistake(MISTAKES)
def test_mistakes_are_refused(error, words, call):
    with pytest.raises(error, match=words):
        call()
