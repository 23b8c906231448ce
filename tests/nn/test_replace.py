"""Replacing layers and the arrays of layers."""

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
from tests.nn.arrays import filled, paths


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


def test_only_matches_are_replaced(model):
    is_linear = lambda node: isinstance(node, nn.Linear)
    for match in (nn.Linear, (nn.Linear, nn.Dropout), nn.Linear | nn.Dropout, is_linear):
        replaced = nn.replace_layers(model, match, Wrapped)
        assert type(replaced[0]) is Wrapped
        assert replaced[0].inner is model[0]
        assert replaced.layers[1:] == model.layers[1:]


def test_pattern_of_paths_selects_layers_to_replace(getkey):
    attention = nn.MultiheadAttention(2, 4, key=getkey())
    block = {"attention": attention, "mlp": nn.MLP(4, 4, 4, 2, key=getkey())}

    def replaced(where, model=block):
        new = nn.replace_layers(model, nn.Linear, Wrapped, where=where)
        is_new = lambda node: isinstance(node, Wrapped)
        return paths(new, is_new, is_leaf=is_new)

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
    # `**.` also matches an empty path.
    assert replaced("**.query_proj", attention) == [".query_proj"]
    # A layer with two paths is replaced only at the path that matches.
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


def test_shared_layer_stays_shared_and_equal_layers_stay_apart(getkey):
    key = getkey()
    shared, equal = nn.Linear(2, 2, key=key), nn.Linear(2, 2, key=jr.clone(key))
    for other, is_shared in ((shared, True), (equal, False)):
        replaced = nn.replace_layers(Twice(shared, {"a": [other]}), nn.Linear, Wrapped)
        assert (replaced.first is replaced.second["a"][0]) == is_shared


def test_key_of_a_layer_depends_only_on_its_path(getkey):
    layer, key = nn.Linear(2, 2, key=getkey()), getkey()

    def keys_of(model):
        replaced = nn.replace_layers(model, nn.Linear, lambda layer, key: key, key=key)
        return [jr.key_data(key).tolist() for key in jax.tree.leaves(replaced)]

    other = nn.Linear(2, 2, key=getkey())
    first, second = keys_of([layer, other])
    assert first != second
    assert keys_of([layer, other, nn.Linear(3, 3, key=getkey())])[:2] == [first, second]


def test_arrays_in_frozen_layers_are_matched(model):
    frozen = nn.freeze(model, lambda model: model[0])
    zeroed = nn.replace_layers(frozen, eqx.is_array, jnp.zeros_like)
    assert not zeroed[0].weight.any()
    assert eqx.filter(zeroed, eqx.is_inexact_array)[0].weight is None


NO_TYPE = "`match` must be a type, a tuple of types, or a function"


@pytest.mark.parametrize(
    ("tree", "match", "error", "message"),
    [
        (None, nn.Dropout, ValueError, r"matches Dropout\. .*Sequential, Linear, Lambda, LayerNo"),
        (None, (), ValueError, r"^No node of the model matches \(\)\."),
        ({"a": 1}, nn.Linear, ValueError, "no Module, but nodes of type dict, int"),
        (Twice(1, {}, nn.Lambda(abs)), nn.Lambda, ValueError, "Static fields are not searched"),
        (None, "Linear", TypeError, NO_TYPE),
        (None, (nn.Linear, "Conv"), TypeError, NO_TYPE),
    ],
)
def test_match_that_finds_no_node_is_refused(tree, match, error, message, model):
    with pytest.raises(error, match=message):
        nn.replace_layers(tree or model, match, Wrapped)


initializers = jax.nn.initializers


def weights(path, array):
    return initializers.normal(1.0) if path.endswith(".weight") else None


def test_rule_chooses_floating_arrays_by_their_paths(getkey):
    model = nn.MLP(2, 3, 4, 1, dtype=jnp.bfloat16, key=getkey())
    new = nn.reinitialise(model, weights, key=getkey())
    assert len(new.layers) == 2
    for layer, old in zip(new.layers, model.layers, strict=True):
        assert (layer.weight.shape, layer.weight.dtype) == (old.weight.shape, jnp.bfloat16)
        assert np.not_equal(layer.weight, old.weight).all()
        assert layer.bias is old.bias
    tree = {"layer": nn.Linear(2, 3, key=getkey()), "count": jnp.arange(3), "key": getkey()}
    asked = {}
    nn.reinitialise(tree, lambda path, array: asked.update({path: array.shape}), key=getkey())
    assert asked == {"['layer'].weight": (3, 2), "['layer'].bias": (3,)}


def test_additional_layers_do_not_change_the_values_of_others(getkey):
    layers, key = [nn.Linear(2, 2, key=getkey()) for _ in range(3)], getkey()
    few = nn.reinitialise(layers[:2], weights, key=key)
    many = nn.reinitialise([*layers[:2], layers[2]], weights, key=key)
    assert eqx.tree_equal(few, many[:2])
    assert np.not_equal(many[0].weight, many[1].weight).all()


def test_value_depends_on_the_path_and_not_on_the_process():
    model = {"a": jnp.zeros(2)}
    new = nn.reinitialise(model, lambda *_: initializers.normal(1.0), key=jr.key(0))
    # The eight bytes of blake2b("['a']") are the two words that are folded into the key.
    words = np.frombuffer(hashlib.blake2b(b"['a']", digest_size=8).digest(), "<u4")
    key = jr.fold_in(jr.fold_in(jr.key(0), words[0]), words[1])
    np.testing.assert_array_equal(new["a"], jr.normal(jr.split(key, 1)[0], (2,)))


@pytest.mark.parametrize("shape", [(5, 7), (5, 7, 3, 2)])
def test_fan_in_of_an_initializer_is_the_number_of_inputs(shape, getkey):
    seen = []

    def initializer(key, shape, dtype):
        seen.append(shape)
        return jnp.zeros(shape, dtype)

    new = nn.reinitialise([jnp.ones(shape)], lambda *_: initializer, key=getkey())
    assert seen == [(*shape[2:], 7, 5)]
    assert new[0].shape == shape


def test_wrong_result_of_a_rule_or_initializer_is_refused_with_its_path(getkey):
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


def test_only_weights_of_affine_maps_decay():
    """Tests a single model and an ensemble, with a mask in Optax."""
    attention = [f".attention.{name}_proj.weight" for name in ("query", "key", "value", "output")]
    stack = ".blocks.layers[1].layers"
    expected = [
        *[f"{stack}.layers[1].weight", f"{stack}.layers[3].down", f"{stack}.layers[3].up"],
        *attention,
        *[".cell.weight_ih", ".cell.weight_hh", ".head['conv'].weight"],
    ]
    keys = jr.split(jr.key(0), 2)
    for model in (filled(Model, keys[0]), filled(eqx.filter_vmap(Model), keys)):
        params = jax.tree.map(np.asarray, eqx.filter(model, eqx.is_inexact_array))
        zeros, ones = (jax.tree.map(make, params) for make in (np.zeros_like, np.ones_like))
        for also, more in (((), []), (nn.Embedding, [".table.weight"])):
            mask = functools.partial(nn.decay_mask, also=also)
            decay = optax.add_decayed_weights(1.0, mask=mask)
            updates, _ = decay.update(zeros, decay.init(params), ones)
            assert paths(updates, np.all) == more + expected
        # Frozen arrays do not decay, even if the tree contains them.
        assert sum(jax.tree.leaves(nn.decay_mask(model))) == len(expected)


def test_skipped_arrays_do_not_decay():
    model = filled(Model, jr.key(0))

    def decayed(skip, also=()):
        mask = nn.decay_mask(eqx.filter(model, eqx.is_inexact_array), also, skip)
        return paths(mask, bool)

    everything = decayed(())
    without = lambda *names: [path for path in everything if not any(n in path for n in names)]
    assert len(without(".attention")) == len(everything) - 4
    assert decayed("attention") == decayed(nn.MultiheadAttention) == without(".attention")
    assert decayed("**.query_proj.weight") == without("query")
    assert decayed("cell.*") == decayed(nn.GRUCell) == without("cell")
    both = decayed((nn.GRUCell, "head.conv", "**.table"), nn.Embedding)
    assert both == without("cell", "conv")
    for skip in (3, (nn.Linear, 3)):
        with pytest.raises(TypeError, match="decay_mask expected skip"):
            decayed(skip)
