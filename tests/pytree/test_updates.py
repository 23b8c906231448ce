"""Where a test takes `eqx`, the same program holds on Equinox, whose behaviour is the measure."""

import inspect
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

INTEGERS = st.integers(-100, 100)
# Trees of pairs (parameter, update): one structure for both.
PAIRS = st.recursive(
    st.tuples(INTEGERS, INTEGERS | st.none()).map(lambda pair: Pair(*pair)),
    lambda trees: st.lists(trees, max_size=3) | st.dictionaries(st.sampled_from("ab"), trees),
    max_leaves=8,
)


class Pair:
    def __init__(self, parameter, update):
        self.parameter, self.update = parameter, update


def unzip(pairs):
    return (
        jtu.tree_map(lambda pair: pair.parameter, pairs),
        jtu.tree_map(lambda pair: pair.update, pairs),
    )


def test_has_the_parameters_of_equinox():
    def parameters(library):
        signature = inspect.signature(library.apply_updates)
        return [(p.name, p.kind, p.default) for p in signature.parameters.values()]

    assert parameters(eqxlike) == parameters(equinox)


@given(PAIRS)
def test_adds_leaf_by_leaf_where_there_is_an_update(pairs):
    expected = jtu.tree_map(lambda pair: pair.parameter + (pair.update or 0), pairs)
    assert apply_updates(*unzip(pairs)) == expected


@given(PAIRS)
def test_agrees_with_equinox(pairs):
    assert apply_updates(*unzip(pairs)) == equinox.apply_updates(*unzip(pairs))


@given(PAIRS)
def test_what_has_no_update_is_kept_by_reference(pairs):
    parameters, _ = unzip(pairs)
    updated = apply_updates(parameters, jtu.tree_map(lambda _: None, parameters))
    assert list(map(id, jtu.tree_leaves(updated))) == list(map(id, jtu.tree_leaves(parameters)))


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
def test_a_none_stands_for_a_whole_subtree(eqx):
    assert eqx.apply_updates([[1, 2], 3], [None, 1]) == [[1, 2], 4]


@both
def test_numpy_parameters_stay_numpy(eqx):
    updated = eqx.apply_updates(np.ones(2), np.ones(2))
    assert (type(updated), updated.tolist()) == (np.ndarray, [2, 2])


@both
def test_works_under_jit(eqx):
    updated = jax.jit(lambda x, y: eqx.apply_updates([x, "a"], [y, None])[0])(1.0, 2.0)
    assert updated == 3


@both
def test_an_update_is_not_cast(eqx):
    with pytest.raises(ValueError, match="no available implicit dtype promotion"):
        eqx.apply_updates(jnp.ones(2, jnp.bfloat16), jnp.ones(2))


@both
@pytest.mark.parametrize(
    ("model", "updates"), [([1, 2], [1]), ((1,), [1]), ({"a": 1}, {"b": 1}), (1, [1])], ids=repr
)
def test_updates_of_another_structure_are_an_error(eqx, model, updates):
    with pytest.raises(ValueError, match="structure error"):
        eqx.apply_updates(model, updates)


def test_an_update_that_cannot_be_added_is_named_with_its_place():
    model = {"a": [jnp.ones(2), jnp.ones(3)], "b": jnp.ones(2)}
    updates = {"a": [jnp.ones(2), jnp.ones(2)], "b": None}
    with pytest.raises(TypeError, match=r"is that of model\['a'\]\[1\]"):
        apply_updates(model, updates)


def test_a_number_for_a_whole_list_is_named_with_its_place():
    with pytest.raises(TypeError, match=r"is that of model\[1\]"):
        apply_updates([1, [2, 3]], [1, 5])
