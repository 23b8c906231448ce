"""`ScanStack` computes, trains and updates states like a list of its layers."""

import copy
from collections.abc import Callable

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest

import eqxlike as eqx
from eqxlike import nn
from tests.nn.arrays import assert_close, filled, paths
from tests.nn.mistakes import each_mistake


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


def test_layers_equal_a_list_drawn_with_the_same_keys(getkey):
    key = getkey()
    stack = nn.ScanStack(Block, 3, key=key)
    assert eqx.tree_equal(stack.unstack(), tuple(map(Block, jr.split(jr.clone(key), 3))))
    assert len(stack) == 3
    stack = nn.ScanStack(lambda key: nn.Linear("scalar", "scalar", key=key), 2, key=getkey())
    np.testing.assert_allclose(stack(1.0), stack(jnp.ones(())))


def test_output_and_gradient_equal_a_loop(getkey):
    stack = filled(nn.ScanStack, Block, 3, remat=True, unroll=2, key=getkey())
    x, shift = np.ones(4, np.float32), np.float32(0.5)

    @eqx.filter_jit
    def scanned_and_looped(stack, key):
        def scanned(stack):
            return jnp.sum(stack(x, shift, key=key) ** 2)

        def looped(layers):
            return jnp.sum(in_a_loop(layers, x, shift, key=jr.clone(key)) ** 2)

        return [
            eqx.filter_value_and_grad(function)(layers)
            for function, layers in ((scanned, stack), (looped, stack.unstack()))
        ]

    (value, gradient), (expected, expected_gradients) = scanned_and_looped(stack, getkey())
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    found = [*gradient.layers.linear.weight]
    assert_close(found, [each.linear.weight for each in expected_gradients], rtol=1e-4)


def test_backward_pass_recomputes_cheap_operations_or_with_remat_all_operations(getkey):
    def count(primitive, **options):
        stack = nn.ScanStack(Block, 3, **options, key=getkey())
        key = getkey()
        jaxpr = jax.make_jaxpr(jax.grad(lambda x: stack(x, key=key).sum()))(jnp.ones(4))
        return str(jaxpr).count(f" {primitive}")

    # The backward pass adds one product.
    assert (count("dot_general"), count("dot_general", remat=True)) == (2, 3)
    assert count("tanh") == count("tanh", remat=True) == count("tanh", remat="cheap") == 2
    assert (count("dot_general", remat="nothing"), count("tanh", remat="nothing")) == (2, 1)


def test_layers_print_once_for_a_gradient(getkey, capsys):
    def shown(x):
        x = jnp.tanh(x)
        jax.debug.print("layer {}", x[0])
        return x

    def layer(key):
        return nn.Sequential([nn.Linear(4, 4, key=key), nn.Lambda(shown)])

    stack = nn.ScanStack(layer, 2, key=getkey())
    jax.grad(lambda x: stack(x).sum())(jnp.ones(4))
    jax.effects_barrier()
    assert capsys.readouterr().out.count("layer") == 2


def stack(*layers):
    return lambda: nn.ScanStack.stack(layers)


def differing(first, second):
    """Stacks layers. The last layer contains `second` instead of `first`."""
    nested = [nn.Sequential([nn.Identity(), layer]) for layer in (first, first, second)]
    return stack(*nested)


def make(cls, depth=2, **options):
    return nn.ScanStack(cls, depth, key=jr.key(0), **options)


PRELU, DIFFERENT = nn.PReLU(jnp.ones(3)), r"values of their arrays: layers\[2\].layers\[1\]"
MISTAKES = {
    ValueError: {
        DIFFERENT + r".p is 0\.1, and layers\[0\].layers\[1\].p is 0\.5": (
            differing(nn.Dropout(0.5), nn.Dropout(0.1))
        ),
        rf"{DIFFERENT}.negative_slope is .* bfloat16, and .*_slope is .* dtype float32": (
            differing(PRELU, nn.PReLU(jnp.ones(3, jnp.bfloat16)))
        ),
        # Frozen arrays are also compared.
        rf"{DIFFERENT}.negative_slope is an array .* shape \(2,\)": (
            differing(PRELU, nn.freeze(nn.PReLU(jnp.ones(2))))
        ),
        # The reference of the first layer would replace the references of the others.
        r"cannot stack a jax\.Ref, such as layers\[0\]\.fn\.fn: use a Sequential": (
            lambda: stack(*[nn.Lambda(nn.Lambda(jax.new_ref(jnp.ones(3))))] * 2)()
        ),
        "at least one layer": stack(),
        "depth must be": lambda: make(Block, 0),
        r'True, False, "cheap" or "nothing"; got \'dots\'': lambda: make(Block, remat="dots"),
        r"layers\[1\].index is .* StateIndex with": lambda: stack(*two_counters().layers)(),
    },
    TypeError: {
        r"input is .* \(3,\) .*, and output is .* \(4,\)": (
            lambda: make(lambda key: nn.Linear(3, 4, key=key))(jnp.ones(3))
        )
    },
}


@each_mistake(MISTAKES)
def test_mistakes_are_refused(error, words, call):
    with pytest.raises(error, match=words):
        call()


def test_stacked_layers_stay_frozen_and_are_unstacked(getkey):
    blocks = map(Block, jr.split(getkey(), 2))
    layers = [nn.freeze(block, lambda block: block.linear.bias) for block in blocks]
    stack = nn.ScanStack.stack(layers, remat=True, unroll=2)
    assert (stack.remat, stack.unroll) == (True, 2)
    assert eqx.tree_equal(stack.unstack(), tuple(layers))
    assert eqx.tree_equal(stack[-1], layers[1])
    for index in (2, -3):
        with pytest.raises(IndexError, match=f"depth 2 has no layer {index}"):
            stack[index]
    trained = eqx.filter(stack, eqx.is_inexact_array)
    assert trained.layers.linear.bias is None
    assert trained.layers.linear.weight.shape == (2, 4, 4)


class Counter(nn.StatefulLayer):
    """Returns twice its input plus the number of its calls."""

    index: nn.StateIndex

    def __init__(self, key, init=0):
        self.index = nn.StateIndex(init)

    def __call__(self, x, shift=0, *, state, key=None):
        count = state.get(self.index) + 1
        return 2 * x + shift + count, state.set(self.index, count)


def two_counters():
    return nn.make_with_state(lambda *keys: nn.Sequential([*map(Counter, keys)]))(1, 2)[0]


@pytest.mark.parametrize("remat", [False, True])
def test_each_layer_has_its_own_state(remat, getkey):
    def make():
        return nn.ScanStack.stack([Counter(None, init) for init in (0, 5, 7)], remat=remat)

    stack, state = nn.make_with_state(make)()
    x, state = stack(jnp.array(0), state)
    assert (x, state.get(stack.layers.index).tolist()) == (4 * 1 + 2 * 6 + 8, [1, 6, 8])
    x, state = stack(jnp.array(0), jnp.array(10), state=state)
    assert (x, state.get(stack.layers.index).tolist()) == (4 * 12 + 2 * 17 + 19, [2, 7, 9])


def test_stateful_layers_need_a_state_and_others_return_it(getkey):
    stack, state = nn.make_with_state(nn.ScanStack)(Counter, 3, key=getkey())
    assert stack(jnp.array(0), state)[0] == 4 + 2 + 1
    with pytest.raises(TypeError, match=r"ScanStack needs the state, .* of type Counter"):
        stack(jnp.array(0), jnp.array(10))
    stack, state = nn.ScanStack(Block, 2, key=getkey()), object()
    assert stack(jnp.ones(4), state=state, key=getkey())[1] is state


def test_layers_with_their_own_functions_and_weak_types_are_stacked(getkey):
    class Scaled(eqx.Module):
        scale: jax.Array
        function: Callable[[jax.Array], jax.Array] = eqx.field(static=True)

        def __call__(self, x, *, key=None):
            return self.function(x * self.scale)

    make_layer = lambda key: Scaled(jnp.asarray(1.5), lambda x: x + 1)
    stack = nn.ScanStack(make_layer, 3, key=getkey())
    assert stack.layers.scale.tolist() == [1.5] * 3
    assert stack(jnp.ones(2, jnp.float16)).tolist() == [8.125, 8.125]


def frozen(layer):
    """The paths of the frozen arrays of a layer."""
    kept = eqx.filter(layer, eqx.is_inexact_array, inverse=True)
    return set(paths(kept, eqx.is_array))


LINEAR = {".linear.weight", ".linear.bias"}
SOME = {
    "layer": (lambda stack: stack[0], [LINEAR, set(), set(), set()]),
    "slice": (lambda stack: stack[:2], [LINEAR, LINEAR, set(), set()]),
    "middle": (lambda stack: [stack[1], stack[-2]], [set(), LINEAR, LINEAR, set()]),
    "row": (lambda stack: stack.layers.linear.bias[0], [{".linear.bias"}, set(), set(), set()]),
    "field": (lambda stack: stack[3].linear.bias, [set(), set(), set(), {".linear.bias"}]),
    "all": (lambda stack: [each.linear.bias for each in stack], [{".linear.bias"}] * 4),
}


@pytest.mark.parametrize("name", SOME)
def test_some_layers_are_frozen(name, getkey):
    where, expected = SOME[name]
    stack = nn.ScanStack(Block, 4, key=getkey())
    some = nn.freeze(stack, where)
    assert list(map(frozen, some.unstack())) == expected
    assert eqx.tree_equal(nn.ScanStack.stack(some.unstack()), some)
    assert list(map(frozen, some[1:].unstack())) == expected[1:]
    assert eqx.tree_equal(nn.unfreeze(some), stack)
    assert eqx.tree_equal(nn.freeze(some), nn.freeze(stack))


def test_partly_frozen_stack_computes_and_trains_like_a_list(getkey):
    stack, x, key = nn.ScanStack(Block, 4, key=getkey()), jnp.ones(4), getkey()
    some = nn.freeze(stack, lambda stack: stack[1:3])
    optimiser = optax.chain(optax.add_decayed_weights(0.5), optax.sgd(0.1))

    @eqx.filter_jit
    def step(model):
        def loss(model):
            if isinstance(model, nn.ScanStack):
                return jnp.sum(model(x, key=jr.clone(key)) ** 2)
            return jnp.sum(in_a_loop(model, x, key=jr.clone(key)) ** 2)

        params = eqx.filter(model, eqx.is_inexact_array)
        updates, _ = optimiser.update(eqx.filter_grad(loss)(model), optimiser.init(params), params)
        return eqx.apply_updates(model, updates)

    layers = step(some).unstack()
    expected = step(some.unstack())
    assert jax.tree.structure(layers) == jax.tree.structure(expected)
    assert_close(layers, expected, rtol=1e-4, atol=0)
    assert eqx.tree_equal(layers[1:3], some.unstack()[1:3])
    gradient = eqx.filter_grad(lambda model: model(x, key=key).sum())
    assert str(eqx.filter_make_jaxpr(gradient)(some)[0]).count("scan[") == 3 + 3


@pytest.mark.parametrize("is_frozen_first", [False, True])
def test_frozen_layers_keep_their_states(is_frozen_first):
    def make():
        layers = [nn.Sequential([Counter(None, 3.0 * i), nn.PReLU()]) for i in range(4)]
        stack = nn.ScanStack.stack(layers)
        return freeze(stack) if is_frozen_first else stack

    def freeze(stack):
        return nn.freeze(stack, lambda stack: stack[1])

    stack, state = nn.make_with_state(make)()
    stack = nn.freeze(freeze(stack), lambda stack: stack[3])
    if not is_frozen_first:
        with pytest.raises(ValueError, match="slice of a stateful stack cannot be called"):
            stack[1:](jnp.array(0.0), copy.copy(state))
    x, state = stack(jnp.array(0.0), state)
    assert x == 8 * 1 + 4 * 4 + 2 * 7 + 10
    values = jnp.concatenate([jnp.atleast_1d(value) for value in jax.tree.leaves(state)])
    assert values.tolist() == [1, 4, 7, 10]


def test_single_layers_are_not_nodes_and_not_layers_of_an_ensemble(getkey):
    stack = nn.ScanStack(Block, 4, key=getkey())
    with pytest.raises(TypeError, match=r"`where` selects one of several stacked layers"):
        eqx.tree_at(lambda stack: stack[0].linear.weight, stack, jnp.ones((4, 4)))
    ensemble = eqx.filter_vmap(lambda key: nn.ScanStack(Block, 4, key=key))(jr.split(getkey(), 3))
    with pytest.raises(ValueError, match=r"shape \(3, 4, 4, 4\) at stack.layers.linear.weight"):
        nn.freeze(ensemble, lambda stack: stack[0])
    with pytest.raises(ValueError, match=r"no layers at slice\(4, None, None\)"):
        stack[4:]


def test_only_whole_layers_or_rows_can_be_frozen(getkey):
    """Tests stacks that contain stacks, and stacks without arrays."""
    nested = nn.ScanStack(lambda key: nn.ScanStack(Block, 2, key=key), 2, key=getkey())
    first, second = nn.freeze(nested, lambda stack: stack[0]).unstack()
    assert frozen(first)
    assert not frozen(second)
    with pytest.raises(TypeError, match=r"selects one of several stacked layers"):
        nn.freeze(nested, lambda stack: stack[0][0])
    with pytest.raises(AttributeError, match=r"not look inside a leaf"):
        nn.freeze(nested, lambda stack: [leaf for leaf in jax.tree.leaves(stack) if leaf.ndim < 4])
    model = [nn.ScanStack(lambda key: nn.Identity(), 3, key=getkey()), nn.PReLU()]
    assert frozen(nn.freeze(model, lambda model: model[1])) == {"[1].negative_slope"}


def test_structs_are_stacked_and_unstacked_like_arrays():
    def make(key):
        return {"block": Block(key), "key": jr.split(jr.clone(key)), "numpy": np.ones((), np.int32)}

    def stack():
        return nn.ScanStack(make, 3, key=jr.key(0))

    def structs(tree):
        return eqx.filter_eval_shape(lambda: tree)

    structure = eqx.filter_eval_shape(stack)
    layers = structure.unstack()
    assert eqx.tree_equal(layers, structs(stack().unstack()))
    assert eqx.tree_equal(structure[1:], structs(stack()[1:]))
    assert eqx.tree_equal(nn.ScanStack.stack(layers), structure)

    mesh = jax.sharding.Mesh(jax.devices()[:1], "x")
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "x"))
    shard = lambda leaf: leaf.update(sharding=sharding) if getattr(leaf, "ndim", 0) == 3 else leaf
    sharded = jax.tree.map(shard, structure)
    weight = sharded[0]["block"].linear.weight
    assert (weight.shape, weight.sharding.spec) == ((4, 4), jax.sharding.PartitionSpec("x"))
    stacked = nn.ScanStack.stack(sharded.unstack()).layers["block"].linear.weight
    assert stacked.sharding.spec == sharding.spec
