import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqxlike as eqx
from eqxlike import nn


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
    return nn.Sequential([nn.Linear(2, 3, key=getkey()), nn.Lambda(jnp.tanh), nn.LayerNorm(3)])


@pytest.mark.parametrize(
    "match", [nn.Linear, (nn.Linear, nn.Dropout), lambda node: isinstance(node, nn.Linear)]
)
def test_what_matches_is_replaced_and_nothing_else(match, model):
    replaced = nn.replace_layers(model, match, Wrapped)
    assert type(replaced[0]) is Wrapped
    assert replaced[0].inner is model[0]
    assert replaced[1] == model[1]
    assert replaced[2] == model[2]


def test_union_of_types_is_a_match(model):
    replaced = nn.replace_layers(model, nn.Linear | nn.LayerNorm, Wrapped)
    assert [type(layer) for layer in replaced.layers] == [Wrapped, nn.Lambda, Wrapped]


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


def test_replacement_is_not_searched(model):
    replaced = nn.replace_layers(model, nn.Linear, lambda layer: nn.Sequential([layer]))
    assert type(replaced[0][0]) is nn.Linear


def test_root_itself_may_match(getkey):
    assert nn.replace_layers(nn.Linear(2, 2, key=getkey()), nn.Linear, type) is nn.Linear


def test_shared_layer_is_replaced_once_and_stays_shared(getkey):
    shared = nn.Linear(2, 2, key=getkey())
    replaced = nn.replace_layers(Twice(shared, {"a": [shared]}), nn.Linear, Wrapped)
    assert replaced.first is replaced.second["a"][0]


def test_equal_layers_that_are_two_stay_two(getkey):
    key = getkey()
    model = Twice(nn.Linear(2, 2, key=key), {"a": nn.Linear(2, 2, key=jr.clone(key))})
    replaced = nn.replace_layers(model, nn.Linear, Wrapped)
    assert replaced.first is not replaced.second["a"]


def test_function_among_the_leaves_can_be_replaced(model):
    replaced = nn.replace_layers(model, lambda node: node is jnp.tanh, lambda _: jax.nn.relu)
    assert replaced[1].fn is jax.nn.relu


def test_each_layer_gets_a_key_of_its_own_that_hangs_on_its_path(getkey):
    layer, key = nn.Linear(2, 2, key=getkey()), getkey()

    def keys_of(model):
        replaced = nn.replace_layers(model, nn.Linear, lambda layer, key: key, key=key)
        return [jr.key_data(key).tolist() for key in jax.tree.leaves(replaced)]

    other = nn.Linear(2, 2, key=getkey())
    first, second = keys_of([layer, other])
    assert first != second
    assert keys_of([layer, other, nn.Linear(3, 3, key=getkey())])[:2] == [first, second]


def test_frozen_layer_matches_the_class_it_was_made_of(model):
    replaced = nn.replace_layers(nn.freeze(model), nn.Linear, Wrapped)
    np.testing.assert_array_equal(replaced[0](jnp.ones(2)), 2 * model[0](jnp.ones(2)))


def test_array_in_a_frozen_layer_is_seen_as_an_array(model):
    frozen = nn.freeze(model, lambda model: model[0])
    zeroed = nn.replace_layers(frozen, eqx.is_array, jnp.zeros_like)
    assert not zeroed[0].weight.any()
    assert eqx.filter(zeroed, eqx.is_inexact_array)[0].weight is None


def test_no_match_names_the_types_that_are_there(model):
    message = r"No node of the model matches Dropout\. .*Sequential, Linear, Lambda, LayerNorm\."
    with pytest.raises(ValueError, match=message):
        nn.replace_layers(model, nn.Dropout, Wrapped)


def test_no_match_without_modules_names_the_nodes():
    with pytest.raises(ValueError, match="no Module, but nodes of type dict, int"):
        nn.replace_layers({"a": 1}, nn.Linear, Wrapped)


def test_static_field_is_not_searched():
    model = Twice(nn.Identity(), {}, hidden=nn.Lambda(jnp.tanh))
    with pytest.raises(ValueError, match="Static fields are not searched"):
        nn.replace_layers(model, nn.Lambda, Wrapped)


def test_no_type_at_all_matches_nothing(model):
    with pytest.raises(ValueError, match=r"^No node of the model matches \(\)\."):
        nn.replace_layers(model, (), Wrapped)


@pytest.mark.parametrize("match", ["Linear", (nn.Linear, "Conv")])
def test_what_is_neither_type_nor_function_is_refused(match, model):
    with pytest.raises(TypeError, match="`match` must be a type, a tuple of types, or a function"):
        nn.replace_layers(model, match, Wrapped)
