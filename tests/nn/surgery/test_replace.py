"""Layers, and arrays of layers, replaced by others."""

import functools
import hashlib

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest

import eqxlike as eqx
from eqxlike import nn
from tests.nn.arrays import filled


class Wrapped(eqx.Module):
    inner: eqx.Module

    def __call__(self, x, *, key=None):
        return 2 * self.inner(x)


class Twice(eqx.Module):
    first: eqx.Module
    second: dict
    hidden: eqx.Module | None = eqx.field(static=True, default=None)


@pytest.fixture
def model(getkey):
    linear = filled(nn.Linear, 2, 3, key=getkey())
    return nn.Sequential([linear, nn.Lambda(jnp.tanh), nn.LayerNorm(3)])


@pytest.mark.parametrize(
    "match",
    [
        nn.Linear,
        (nn.Linear, nn.Dropout),
        nn.Linear | nn.Dropout,
        lambda node: isinstance(node, nn.Linear),
    ],
)
def test_what_matches_is_replaced_and_nothing_else(match, model):
    replaced = nn.replace_layers(model, match, Wrapped)
    assert type(replaced[0]) is Wrapped
    assert replaced[0].inner is model[0]
    assert replaced[1] == model[1]
    assert replaced[2] == model[2]


def test_a_pattern_of_paths_says_where_to_replace(getkey):
    attention = nn.MultiheadAttention(2, 4, key=getkey())
    block = {"attention": attention, "mlp": nn.MLP(4, 4, 4, 2, key=getkey())}

    def replaced(where, model=block):
        new = nn.replace_layers(model, nn.Linear, Wrapped, where=where)
        nodes = jax.tree_util.tree_leaves_with_path(new, is_leaf=lambda x: isinstance(x, Wrapped))
        return [jax.tree_util.keystr(path) for path, node in nodes if isinstance(node, Wrapped)]

    query = "['attention'].query_proj"
    layers = [f"['mlp'].layers[{index}]" for index in range(3)]
    for where, expected in {
        "**.query_proj": [query],
        "attention.query_proj": [query],
        "*.query_proj": [query],
        "['attention'].query_proj": [query],
        "mlp.layers.*": layers,
        "mlp.layers[*]": layers,
        "mlp.layers.2": layers[2:],
        "**.1": layers[1:2],
        "mlp.**": layers,
    }.items():
        assert replaced(where) == expected
    # `**.` stands for no name too.
    assert replaced("**.query_proj", attention) == [".query_proj"]
    # Of a layer that stands at two places, only the place that matches.
    linear = attention.query_proj
    assert replaced("*", [linear, {"a": linear}]) == ["[0]"]
    weight = linear.weight
    zeroed = nn.replace_layers([weight, {"a": weight}], eqx.is_array, jnp.zeros_like, where="0")
    assert [bool(each.any()) for each in jax.tree.leaves(zeroed)] == [False, True]
    with pytest.raises(ValueError, match=r"No node at '\*' matches; matches elsewhere: \['att"):
        replaced("*")
    with pytest.raises(TypeError, match="`where` must be a path pattern"):
        replaced(3)


def test_outermost_match_is_replaced_and_not_searched(getkey):
    inner = Wrapped(nn.Linear(2, 2, key=getkey()))
    seen = []

    def make(node):
        seen.append(node)
        return nn.Identity()

    replaced = nn.replace_layers([Wrapped(inner)], Wrapped, make)
    assert replaced == [nn.Identity()]
    assert len(seen) == 1
    assert seen[0].inner is inner


def test_shared_layer_is_replaced_once_and_stays_shared(getkey):
    shared = nn.Linear(2, 2, key=getkey())
    replaced = nn.replace_layers(Twice(shared, {"a": [shared]}), nn.Linear, Wrapped)
    assert replaced.first is replaced.second["a"][0]


def test_equal_layers_that_are_two_stay_two(getkey):
    key = getkey()
    model = Twice(nn.Linear(2, 2, key=key), {"a": nn.Linear(2, 2, key=jr.clone(key))})
    replaced = nn.replace_layers(model, nn.Linear, Wrapped)
    assert replaced.first is not replaced.second["a"]


def test_each_layer_gets_a_key_of_its_own_that_hangs_on_its_path(getkey):
    layer, key = nn.Linear(2, 2, key=getkey()), getkey()

    def keys_of(model):
        replaced = nn.replace_layers(model, nn.Linear, lambda layer, key: key, key=key)
        return [jr.key_data(key).tolist() for key in jax.tree.leaves(replaced)]

    other = nn.Linear(2, 2, key=getkey())
    first, second = keys_of([layer, other])
    assert first != second
    assert keys_of([layer, other, nn.Linear(3, 3, key=getkey())])[:2] == [first, second]


def test_array_in_a_frozen_layer_is_seen_as_an_array(model):
    frozen = nn.freeze(model, lambda model: model[0])
    zeroed = nn.replace_layers(frozen, eqx.is_array, jnp.zeros_like)
    assert not zeroed[0].weight.any()
    assert eqx.filter(zeroed, eqx.is_inexact_array)[0].weight is None


def test_no_match_names_the_types_that_are_there(model):
    message = r"No node of the model matches Dropout\. .*Sequential, Linear, Lambda, LayerNorm\."
    with pytest.raises(ValueError, match=message):
        nn.replace_layers(model, nn.Dropout, Wrapped)
    with pytest.raises(ValueError, match=r"^No node of the model matches \(\)\."):
        nn.replace_layers(model, (), Wrapped)
    with pytest.raises(ValueError, match="no Module, but nodes of type dict, int"):
        nn.replace_layers({"a": 1}, nn.Linear, Wrapped)


def test_static_field_is_not_searched():
    model = Twice(nn.Identity(), {}, hidden=nn.Lambda(jnp.tanh))
    with pytest.raises(ValueError, match="Static fields are not searched"):
        nn.replace_layers(model, nn.Lambda, Wrapped)


@pytest.mark.parametrize("match", ["Linear", (nn.Linear, "Conv")])
def test_what_is_neither_type_nor_function_is_refused(match, model):
    with pytest.raises(TypeError, match="`match` must be a type, a tuple of types, or a function"):
        nn.replace_layers(model, match, Wrapped)


initializers = jax.nn.initializers


def weights(path, array):
    return initializers.normal(1.0) if path.endswith(".weight") else None


def test_rule_chooses_by_path_and_the_rest_stays(getkey):
    model = nn.MLP(2, 3, 4, 1, dtype=jnp.bfloat16, key=getkey())
    new = nn.reinitialise(model, weights, key=getkey())
    assert len(new.layers) == 2
    for layer, old in zip(new.layers, model.layers, strict=True):
        assert (layer.weight.shape, layer.weight.dtype) == (old.weight.shape, jnp.bfloat16)
        assert np.not_equal(layer.weight, old.weight).all()
        assert layer.bias is old.bias


def test_rule_gets_every_floating_array_with_its_path(getkey):
    tree = {"layer": nn.Linear(2, 3, key=getkey()), "count": jnp.arange(3), "key": getkey()}
    asked = {}
    nn.reinitialise(tree, lambda path, array: asked.update({path: array.shape}), key=getkey())
    assert asked == {"['layer'].weight": (3, 2), "['layer'].bias": (3,)}


def test_another_layer_changes_no_value_of_the_others(getkey):
    layers, key = [nn.Linear(2, 2, key=getkey()) for _ in range(3)], getkey()
    few = nn.reinitialise(layers[:2], weights, key=key)
    many = nn.reinitialise([*layers[:2], layers[2]], weights, key=key)
    assert eqx.tree_equal(few, many[:2])
    assert np.not_equal(many[0].weight, many[1].weight).all()


def test_value_hangs_on_the_path_and_not_on_the_process():
    model = {"a": jnp.zeros(2)}
    new = nn.reinitialise(model, lambda *_: initializers.normal(1.0), key=jr.key(0))
    # blake2b("['a']") in eight bytes is the two words that are folded into the key.
    words = np.frombuffer(hashlib.blake2b(b"['a']", digest_size=8).digest(), "<u4")
    key = jr.fold_in(jr.fold_in(jr.key(0), words[0]), words[1])
    np.testing.assert_array_equal(new["a"], jr.normal(jr.split(key, 1)[0], (2,)))


@pytest.mark.parametrize("shape", [(5, 7), (5, 7, 3, 2)])
def test_initializer_counts_fan_in_on_inputs(shape, getkey):
    seen = []

    def initializer(key, shape, dtype):
        seen.append(shape)
        return jnp.zeros(shape, dtype)

    new = nn.reinitialise([jnp.ones(shape)], lambda *_: initializer, key=getkey())
    assert seen == [(*shape[2:], 7, 5)]
    assert new[0].shape == shape


def test_rule_or_initializer_that_returns_what_does_not_fit_is_refused_with_the_path(getkey):
    mlp = nn.MLP(2, 3, 4, 1, key=getkey())
    with pytest.raises(TypeError, match=r"array at model\.layers\[0\]\.weight it returned 0\.0"):
        nn.reinitialise(mlp, lambda *_: 0.0, key=getkey())
    with pytest.raises(ValueError, match="returned shape") as caught:
        nn.reinitialise(mlp, lambda *_: lambda *_: jnp.zeros(3), key=getkey())
    assert caught.value.__notes__ == ["This happened for the array at model.layers[0].weight."]


class Model(eqx.Module):
    table: nn.Embedding
    place: jax.Array
    blocks: nn.ScanStack
    attention: nn.MultiheadAttention
    cell: nn.GRUCell
    head: dict

    def __init__(self, key):
        def block(key):
            linear = nn.Linear(4, 4, key=key)
            adapted = nn.LoRALinear(linear, 2, key=jr.clone(key))
            return nn.Sequential([nn.LayerNorm(4), linear, nn.PReLU(), adapted])

        keys = jr.split(key, 5)
        self.table = nn.Embedding(5, 4, key=keys[0])
        self.place = jnp.ones((3, 4))
        self.blocks = nn.freeze(nn.ScanStack(block, 3, key=keys[1]), lambda stack: stack[0])
        self.attention = nn.MultiheadAttention(2, 4, use_query_bias=True, key=keys[2])
        self.cell = nn.GRUCell(4, 4, key=keys[3])
        self.head = {"norm": nn.GroupNorm(2, 4), "conv": nn.Conv1d(4, 1, 1, key=keys[4])}


def test_weights_of_affine_maps_decay_and_nothing_else(getkey):
    """Of a single model and of an ensemble, with Optax's own mask."""
    attention = [f".attention.{name}_proj.weight" for name in ("query", "key", "value", "output")]
    stack = ".blocks.layers[1].layers"
    expected = [
        *[f"{stack}.layers[1].weight", f"{stack}.layers[3].down", f"{stack}.layers[3].up"],
        *attention,
        *[".cell.weight_ih", ".cell.weight_hh", ".head['conv'].weight"],
    ]
    key = getkey()
    for model in (Model(key), eqx.filter_vmap(Model)(jr.split(jr.clone(key), 2))):
        params = eqx.filter(model, eqx.is_inexact_array)
        for also, more in (((), []), (nn.Embedding, [".table.weight"])):
            mask = functools.partial(nn.decay_mask, also=also)
            decay = optax.add_decayed_weights(1.0, mask=mask)
            zeros, ones = (jax.tree.map(make, params) for make in (jnp.zeros_like, jnp.ones_like))
            updates, _ = decay.update(zeros, decay.init(params), ones)
            leaves = jax.tree_util.tree_leaves_with_path(updates)
            decayed = [jax.tree_util.keystr(path) for path, update in leaves if update.all()]
            assert decayed == more + expected
        # What is frozen does not decay, also in a tree with frozen arrays.
        assert sum(jax.tree.leaves(nn.decay_mask(model))) == len(expected)


def test_what_is_skipped_does_not_decay(getkey):
    model = Model(getkey())

    def decayed(skip, also=()):
        mask = nn.decay_mask(eqx.filter(model, eqx.is_inexact_array), also, skip)
        leaves = jax.tree_util.tree_leaves_with_path(mask)
        return [jax.tree_util.keystr(path) for path, decays in leaves if decays]

    everything = decayed(())
    without_attention = [path for path in everything if ".attention" not in path]
    assert len(without_attention) == len(everything) - 4
    assert decayed("attention") == decayed(nn.MultiheadAttention) == without_attention
    assert decayed("**.query_proj.weight") == [x for x in everything if "query" not in x]
    assert decayed("cell.*") == decayed(nn.GRUCell) == [x for x in everything if "cell" not in x]
    both = decayed((nn.GRUCell, "head.conv", "**.table"), nn.Embedding)
    assert both == [x for x in everything if "cell" not in x and "conv" not in x]
    for skip in (3, (nn.Linear, 3)):
        with pytest.raises(TypeError, match="decay_mask expected skip"):
            decayed(skip)
