"""Where a test takes `eqx`, the same program holds on Equinox, whose behaviour is the measure."""

from typing import Any

import equinox
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import eqxlike
from eqxlike import apply_updates
from tests.beside_equinox import both


class Pair:
    def __init__(self, parameter, update):
        self.parameter, self.update = parameter, update


INTEGERS = st.integers(-100, 100)
# Trees of pairs (parameter, update): one structure for both.
PAIRS = st.recursive(
    st.builds(Pair, INTEGERS, INTEGERS | st.none()),
    lambda trees: st.lists(trees, max_size=3) | st.dictionaries(st.sampled_from("ab"), trees),
    max_leaves=8,
)


@given(PAIRS)
def test_adds_leaf_by_leaf_where_there_is_an_update(pairs):
    parameters = jtu.tree_map(lambda pair: pair.parameter, pairs)
    updates = jtu.tree_map(lambda pair: pair.update, pairs)
    expected = jtu.tree_map(lambda pair: pair.parameter + (pair.update or 0), pairs)
    assert apply_updates(parameters, updates) == expected
    assert equinox.apply_updates(parameters, updates) == expected
    kept = apply_updates(parameters, jtu.tree_map(lambda _: None, parameters))
    assert [*map(id, jtu.tree_leaves(kept))] == [*map(id, jtu.tree_leaves(parameters))]


def test_agrees_with_optax_on_arrays():
    parameters = {"a": jnp.arange(3.0), "b": jnp.ones((2, 2))}
    updates = jtu.tree_map(lambda x: 0.5 * x, parameters)
    expected = optax.apply_updates(parameters, updates)
    assert eqxlike.tree_equal(apply_updates(parameters, updates), expected)


@both
def test_gradients_of_a_module_are_applied_to_its_arrays_alone(eqx):
    class Model(eqx.Module):
        weight: jax.Array
        function: Any
        size: int

    model = Model(jnp.array([1.0, 2.0]), jnp.sin, 3)
    gradient = eqx.filter_grad(lambda model: (model.weight**2).sum())(model)
    updated = eqx.apply_updates(model, gradient)
    assert (updated.weight.tolist(), updated.function, updated.size) == ([3, 6], jnp.sin, 3)


@both
def test_an_update_is_not_cast_and_a_none_represents_a_whole_subtree(eqx):
    assert eqx.apply_updates([[1, 2], 3], [None, 1]) == [[1, 2], 4]
    updated = eqx.apply_updates(np.ones(2), np.ones(2))
    assert (type(updated), updated.tolist()) == (np.ndarray, [2, 2])
    with pytest.raises(ValueError, match="no available implicit dtype promotion"):
        eqx.apply_updates(jnp.ones(2, jnp.bfloat16), jnp.ones(2))


def test_an_update_that_does_not_fit_is_named_with_its_place():
    model = {"a": [jnp.ones(2), jnp.ones(3)], "b": jnp.ones(2)}
    updates = {"a": [jnp.ones(2), jnp.ones(2)], "b": None}
    with pytest.raises(TypeError, match=r"is that of model\['a'\]\[1\]"):
        apply_updates(model, updates)
    with pytest.raises(TypeError, match=r"is that of model\[1\]"):
        apply_updates([1, [2, 3]], [1, 5])
    expected = r"updates\[0\] is a list of length 1, and model\[0\] is a leaf of type float"
    with pytest.raises(ValueError, match=expected):
        apply_updates([1.0], [[2.0]])
