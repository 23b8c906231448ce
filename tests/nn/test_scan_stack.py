import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqxlike as eqx
from eqxlike import nn
from tests.nn.arrays import normal


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
    assert eqx.tree_equal(stack.unstack(), tuple(map(Block, jr.split(jr.clone(key), 3))))
    assert len(stack) == 3


@pytest.mark.parametrize("options", [{"remat": True, "unroll": 2}])
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
        return jnp.sum(in_a_loop(layers, x, shift, key=jr.clone(key)) ** 2)

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

    assert size(4) == size(16)


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


def negate(x):
    return -x


class Activated(eqx.Module):
    weight: jax.Array
    activation: object
    options: object = eqx.field(static=True, default=None)

    def __call__(self, x, *, key=None):
        return self.activation(self.weight * x)


def activated(activation, options=None):
    return Activated(jnp.ones(3), activation, options)


def adding(number):
    return lambda x: x + number


DIFFERENT = {
    "function": (activated(jnp.tanh), activated(negate), ".activation is <function negate at"),
    "closure": (activated(adding(1)), activated(adding(2)), r".activation is <function adding\."),
    "partial": (
        activated(functools.partial(adding(1), number=1)),
        activated(functools.partial(adding(1), number=2)),
        r".activation is functools\.partial",
    ),
    "number": (
        nn.Dropout(0.5),
        nn.Dropout(0.1),
        r".p is 0\.1, and layers\[0\].layers\[1\].p is 0\.5",
    ),
    "type of number": (
        nn.Dropout(1),
        nn.Dropout(1.0),
        r".p is 1\.0, and layers\[0\].layers\[1\].p is 1",
    ),
    "static field": (
        activated(jnp.tanh, 1),
        activated(jnp.tanh, True),
        r" is a node of type Activated with options=True, and .* with options=1\.",
    ),
    "missing array": (
        nn.LayerNorm(3),
        nn.LayerNorm(3, use_bias=False),
        r".bias is None, and layers\[0\].layers\[1\].bias is an array of shape \(3,\)",
    ),
    "shape": (nn.LayerNorm(3), nn.LayerNorm(4), r" is a node of type LayerNorm with shape=\(4,\)"),
    "shape of an array": (
        nn.PReLU(jnp.ones(3)),
        nn.PReLU(jnp.ones(4)),
        r".negative_slope is an array of shape \(4,\) .* is an array of shape \(3,\)",
    ),
    "dtype": (
        nn.PReLU(jnp.ones(3)),
        nn.PReLU(jnp.ones(3, jnp.bfloat16)),
        r".negative_slope is an array .* dtype bfloat16, and .*.negative_slope is .* dtype float32",
    ),
    "class": (
        nn.LayerNorm(3),
        nn.RMSNorm(3),
        r" is a node of type RMSNorm, and layers\[0\].layers\[1\] is a node of type LayerNorm",
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_layers_that_differ_in_more_than_arrays_are_refused_by_path(name):
    first, second, message = DIFFERENT[name]
    nested = [nn.Sequential([nn.Identity(), layer]) for layer in (first, first, second)]
    match = r"values of their arrays alone: layers\[2\].layers\[1\]" + message
    with pytest.raises(ValueError, match=match):
        nn.ScanStack.stack(nested)


def test_references_are_refused_by_path():
    # The references of the first layer would stand for those of all.
    layers = [nn.Lambda(activated(jax.new_ref(jnp.ones(3)))) for _ in range(2)]
    message = r"cannot stack a jax\.Ref, and layers\[0\]\.fn\.activation is one: .* a Sequential"
    with pytest.raises(ValueError, match=message):
        nn.ScanStack.stack(layers)


def test_nothing_does_not_stack():
    with pytest.raises(ValueError, match="at least one layer"):
        nn.ScanStack.stack([])


def test_layers_whose_static_parts_are_equal_stack():
    def layer():
        return activated(functools.partial(jax.nn.leaky_relu, negative_slope=0.5), (1, "a"))

    stack = nn.ScanStack.stack([layer(), layer()])
    assert stack(jnp.array([-1.0, 0.0, 1.0])).tolist() == [-0.25, 0, 1]


@pytest.mark.parametrize(
    ("is_first", "message"),
    [
        (True, r"layers\[1\].linear.weight is trained, and layers\[0\].linear.weight is frozen"),
        (False, r"layers\[1\].linear.weight is frozen, and layers\[0\].linear.weight is trained"),
    ],
)
def test_frozen_beside_trained_layers_are_refused_with_the_way_out(is_first, message, getkey):
    frozen, trained = nn.freeze(Block(getkey())), Block(getkey())
    with pytest.raises(ValueError, match=message + r".*`nn.freeze` .*or freeze the stack"):
        nn.ScanStack.stack([frozen, trained] if is_first else [trained, frozen])


def test_layers_of_which_the_same_is_frozen_stack(getkey):
    layers = [
        nn.freeze(Block(key), lambda block: block.linear.bias) for key in jr.split(getkey(), 2)
    ]
    trained = eqx.filter(nn.ScanStack.stack(layers), eqx.is_inexact_array)
    assert trained.layers.linear.bias is None
    assert trained.layers.linear.weight.shape == (2, 4, 4)


def test_weak_input_is_taken(getkey):
    stack = nn.ScanStack(lambda key: nn.Linear("scalar", "scalar", key=key), 2, key=getkey())
    np.testing.assert_allclose(stack(1.0), stack(jnp.ones(())))


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
    with pytest.raises(TypeError, match=r"input is .* \(3,\) .*, and output is .* \(4,\)"):
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


@pytest.mark.parametrize("options", [{"remat": True}])
def test_stateful_layers_compute_what_a_loop_does(options, getkey):
    stack, state = nn.make_with_state(nn.ScanStack)(Normalised, 3, **options, key=getkey())
    x, shift = normal(getkey(), (5, 4)), jnp.array(0.5)

    @eqx.filter_jit
    def in_a_loop(layers, state, x):
        substates = []
        for index, layer in enumerate(layers):
            substate = jax.tree.map(lambda leaf: leaf[index], state)  # noqa: B023
            x, substate = layer(x, shift, substate)
            substates.append(substate)
        return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *substates)

    looped, expected = in_a_loop(stack.unstack(), state, x)
    out, state = stack(x, shift, state=state)
    np.testing.assert_allclose(out, looped, rtol=1e-5, atol=1e-6)
    for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_state_of_the_stack_alone_may_be_given_by_position(getkey):
    def make(key):
        return nn.Sequential([nn.Lambda(jnp.sin), nn.BatchNorm(4, mode="batch", batched=True)])

    stack, state = nn.make_with_state(nn.ScanStack)(make, 2, key=getkey())
    out, state = stack(normal(getkey(), (5, 4)), state)
    assert out.shape == (5, 4)
    assert state.get(stack.layers[1].batch_counter).tolist() == [1, 1]


def test_stateful_layers_stack_before_their_state_is_made(getkey):
    keys = jr.split(getkey(), 3)
    stack, state = nn.make_with_state(lambda: nn.ScanStack.stack([*map(Normalised, keys)]))()
    same, same_state = nn.make_with_state(nn.ScanStack)(Normalised, 3, key=jr.key(0))
    same = eqx.tree_at(lambda s: s.layers.linear, same, stack.layers.linear)
    x, shift = normal(getkey(), (5, 4)), jnp.array(0.5)
    np.testing.assert_array_equal(
        stack(x, shift, state=state)[0], same(x, shift, state=same_state)[0]
    )


def test_layers_with_places_in_a_state_of_their_own_are_refused(getkey):
    def make(key):
        return nn.Sequential([*map(Normalised, jr.split(key))])

    model, _ = nn.make_with_state(make)(getkey())
    with pytest.raises(ValueError, match=r"layers\[1\].norm.batch_counter is .* StateIndex with"):
        nn.ScanStack.stack(model.layers)


class Counter(nn.StatefulLayer):
    index: nn.StateIndex

    def __init__(self, key):
        self.index = nn.StateIndex(0)

    def __call__(self, x, state, *, key=None):
        count = state.get(self.index) + 1
        return x + count, state.set(self.index, count)


@pytest.mark.parametrize(
    "make",
    [
        lambda key: nn.ScanStack(Counter, 3, key=key),
        lambda key: nn.ScanStack.stack([Counter(key) for _ in range(3)]),
    ],
)
def test_each_layer_has_a_state_that_begins_with_a_number(make, getkey):
    stack, state = nn.make_with_state(make)(getkey())
    x, state = stack(jnp.array(0), state)
    assert (x, state.get(stack.layers.index).tolist()) == (3, [1, 1, 1])


def test_missing_state_is_an_error_that_says_so(getkey):
    stack, _ = nn.make_with_state(nn.ScanStack)(Normalised, 2, key=getkey())
    with pytest.raises(TypeError, match=r"ScanStack needs the state, .* of type Normalised"):
        stack(jnp.ones((5, 4)), jnp.array(0.5))


def test_stack_without_stateful_layers_returns_the_state_that_it_got(getkey):
    stack, state = nn.ScanStack(Block, 2, key=getkey()), object()
    assert stack(jnp.ones(4), state=state, key=getkey())[1] is state
