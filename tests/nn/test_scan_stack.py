import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqxlike as eqx
from eqxlike import nn


class Block(eqx.Module):
    linear: nn.Linear
    dropout: nn.Dropout

    def __init__(self, key):
        self.linear = nn.Linear(4, 4, key=key)
        self.dropout = nn.Dropout(0.5)

    def __call__(self, x, shift=0.0, *, key=None):
        return self.dropout(jnp.tanh(self.linear(x)) + shift, key=key)


def in_a_loop(layers, x, *args, key):
    for layer, layer_key in zip(layers, jr.split(key, len(layers)), strict=True):
        x = layer(x, *args, key=layer_key)
    return x


def num_equations(jaxpr):
    """How many primitives a program has, those inside of its loops included."""
    inner = (each for eqn in jaxpr.eqns for each in jax.tree.leaves(list(eqn.params.values())))
    nested = (each.jaxpr for each in inner if hasattr(each, "jaxpr"))
    return len(jaxpr.eqns) + sum(map(num_equations, nested))


def test_layers_are_those_of_a_list(getkey):
    key = getkey()
    stack = nn.ScanStack(Block, 3, key=key)
    assert eqx.tree_equal(stack.unstack(), tuple(map(Block, jr.split(key, 3))))
    assert len(stack) == 3


@pytest.mark.parametrize("options", [{}, {"remat": True}, {"unroll": 2}])
def test_output_and_gradient_are_those_of_a_loop(options, getkey):
    stack = nn.ScanStack(Block, 3, **options, key=getkey())
    x, key, shift = jnp.ones(4), getkey(), jnp.array(0.5)

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def scanned(stack):
        return jnp.sum(stack(x, shift, key=key) ** 2)

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def looped(layers):
        return jnp.sum(in_a_loop(layers, x, shift, key=key) ** 2)

    value, gradient = scanned(stack)
    expected, expected_gradients = looped(stack.unstack())
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for index, layer_gradient in enumerate(expected_gradients):
        np.testing.assert_allclose(
            gradient.layers.linear.weight[index], layer_gradient.linear.weight, rtol=1e-4, atol=1e-6
        )


def test_program_does_not_grow_with_depth(getkey):
    def size(depth):
        stack = nn.ScanStack(Block, depth, key=getkey())
        return num_equations(
            jax.make_jaxpr(lambda x, key: stack(x, key=key))(jnp.ones(4), getkey())
        )

    assert size(4) == size(16) == size(64)


def test_inside_of_a_layer_is_computed_again_for_the_gradient(getkey):
    def num_tanh(remat):
        stack = nn.ScanStack(Block, 3, remat=remat, key=getkey())
        key = getkey()
        return str(jax.make_jaxpr(jax.grad(lambda x: stack(x, key=key).sum()))(jnp.ones(4))).count(
            " tanh "
        )

    assert num_tanh(remat=True) == 2 * num_tanh(remat=False) == 2


def test_stack_and_unstack_are_inverse(getkey):
    layers = tuple(map(Block, jr.split(getkey(), 3)))
    assert eqx.tree_equal(nn.ScanStack.stack(layers).unstack(), layers)


def test_layers_of_other_forms_do_not_stack(getkey):
    layers = [nn.Linear(3, 3, key=getkey()), nn.Linear(3, 3, False, key=getkey())]
    with pytest.raises(ValueError, match=r"expected layers\[1\] to be as layers\[0\].*bias=None"):
        nn.ScanStack.stack(layers)
    with pytest.raises(ValueError, match="at least one layer"):
        nn.ScanStack.stack([])


def test_index_past_the_end_is_refused(getkey):
    stack = nn.ScanStack(Block, 3, key=getkey())
    assert eqx.tree_equal(stack[-1], stack[2])
    with pytest.raises(IndexError, match="depth 3 has no layer 3"):
        stack[3]


@pytest.mark.parametrize("depth", [0, -1, 1.5])
def test_depth_without_layers_is_refused(depth, getkey):
    with pytest.raises(ValueError, match="depth must be"):
        nn.ScanStack(Block, depth, key=getkey())


def test_layer_that_changes_the_shape_is_named(getkey):
    stack = nn.ScanStack(lambda key: nn.Linear(3, 4, key=key), 2, key=getkey())
    with pytest.raises(TypeError, match=r"it got f32\[3\], and returned f32\[4\]"):
        stack(jnp.ones(3))


class Normalised(nn.StatefulLayer):
    linear: nn.Linear
    norm: nn.BatchNorm

    def __init__(self, key):
        self.linear = nn.Linear(4, 4, key=key)
        self.norm = nn.BatchNorm(4, mode="batch", batched=True)

    def __call__(self, x, shift, state, *, key=None):
        out, state = self.norm(jax.vmap(self.linear)(x) + shift, state)
        return jnp.tanh(out), state


@pytest.mark.parametrize("options", [{}, {"remat": True}])
def test_stateful_layers_compute_what_a_loop_does(options, getkey):
    stack, state = nn.make_with_state(nn.ScanStack)(Normalised, 3, **options, key=getkey())
    x, shift = jr.normal(getkey(), (5, 4)), jnp.array(0.5)
    layers = stack.unstack()
    substates = [jax.tree.map(lambda leaf: leaf[index], state) for index in range(3)]  # noqa: B023
    out, state = stack(x, shift, state=state)
    for index, (layer, substate) in enumerate(zip(layers, substates, strict=True)):
        x, substates[index] = layer(x, shift, substate)
    np.testing.assert_allclose(out, x, rtol=1e-5, atol=1e-6)
    expected = jax.tree.map(lambda *leaves: jnp.stack(leaves), *substates)
    for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_state_of_the_stack_alone_may_be_given_by_position(getkey):
    def make(key):
        return nn.Sequential([nn.Lambda(jnp.sin), nn.BatchNorm(4, mode="batch", batched=True)])

    stack, state = nn.make_with_state(nn.ScanStack)(make, 2, key=getkey())
    out, state = stack(jr.normal(getkey(), (5, 4)), state)
    assert out.shape == (5, 4)
    assert state.get(stack.layers[1].batch_counter).tolist() == [1, 1]


def test_missing_state_is_an_error_that_says_so(getkey):
    stack, _ = nn.make_with_state(nn.ScanStack)(Normalised, 2, key=getkey())
    with pytest.raises(TypeError, match=r"ScanStack needs the state, .* of type Normalised"):
        stack(jnp.ones((5, 4)), jnp.array(0.5))


def test_stack_without_stateful_layers_returns_the_state_that_it_got(getkey):
    stack, state = nn.ScanStack(Block, 2, key=getkey()), object()
    assert stack(jnp.ones(4), state=state, key=getkey())[1] is state
