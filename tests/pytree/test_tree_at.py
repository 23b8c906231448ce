"""Where a test takes `eqx`, the same program holds on Equinox, whose behaviour is the measure."""

import inspect
from typing import Any

import equinox
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import eqxlike
from eqxlike import tree_at
from tests.beside_equinox import both
from tests.pytree.trees import Pair, Point


def is_none(node):
    return node is None


# --- laws ---------------------------------------------------------------------------------------


def test_has_the_parameters_of_equinox():
    def parameters(library):
        signature = inspect.signature(library.tree_at)
        return [
            (p.name, p.kind, p.default is None, p.default is inspect.Parameter.empty)
            for p in signature.parameters.values()
        ]

    assert parameters(eqxlike) == parameters(equinox)


# --- what may be replaced -----------------------------------------------------------------------


def make_module(eqx):
    class Inner(eqx.Module):
        weight: Any
        size: int = eqx.field(static=True, default=1)

        def get(self):
            return self.weight

    class Outer(eqx.Module):
        inner: Inner
        others: list

    return Outer(Inner(1), [Inner(2), Inner(3)])


@both
def test_a_leaf_of_a_module_is_replaced(eqx):
    module = eqx.tree_at(lambda module: module.inner.weight, make_module(eqx), 5)
    assert jtu.tree_leaves(module) == [5, 2, 3]


@both
def test_a_module_in_a_module_is_replaced(eqx):
    module = eqx.tree_at(lambda module: module.inner, make_module(eqx), "text")
    assert module.inner == "text"


@both
def test_a_list_comprehension_over_modules_names_their_leaves(eqx):
    module = eqx.tree_at(lambda m: [each.weight for each in m.others], make_module(eqx), [7, 8])
    assert jtu.tree_leaves(module) == [1, 7, 8]


@both
def test_where_may_call_a_method_that_returns_a_leaf(eqx):
    module = eqx.tree_at(lambda module: module.inner.get(), make_module(eqx), 5)
    assert module.inner.weight == 5


@both
def test_where_may_choose_by_static_fields(eqx):
    def where(module):
        return module.inner.weight if module.inner.size == 1 else module.others

    assert eqx.tree_at(where, make_module(eqx), 5).inner.weight == 5


@both
def test_where_may_choose_by_the_type_of_nodes(eqx):
    module = make_module(eqx)
    kind = type(module.inner)

    def where(tree):
        nodes = jtu.tree_leaves(tree, is_leaf=lambda node: isinstance(node, kind))
        return [node.weight for node in nodes if isinstance(node, kind)]

    assert jtu.tree_leaves(eqx.tree_at(where, module, (7, 8, 9))) == [7, 8, 9]


@both
def test_neither_converters_nor_checks_run(eqx):
    checked = []

    class Model(eqx.Module):
        x: float = eqx.field(converter=float)

        def __check_init__(self):
            checked.append(self.x)

    assert eqx.tree_at(lambda module: module.x, Model(1), "text").x == "text"
    assert checked == [1.0]


@both
@pytest.mark.parametrize("tree", [1, [1, 2], (1, 2), {"a": 1}, Point(1, 2)], ids=repr)
def test_the_whole_tree_may_be_replaced(eqx, tree):
    assert eqx.tree_at(lambda tree: tree, tree, "new") == "new"


@both
@pytest.mark.parametrize("node", [(1, 2), [1, 2], Point(1, 2), {"a": 1}], ids=repr)
@pytest.mark.parametrize("value", [9, (5, 6), [7, 8, 9]], ids=repr)
def test_a_container_is_one_node_and_its_replacement_one_value(eqx, node, value):
    assert eqx.tree_at(lambda tree: tree[0], [node, 3], value) == [value, 3]


@both
def test_a_replacement_may_be_none(eqx):
    assert eqx.tree_at(lambda tree: tree[0], [1, 2], None) == [None, 2]


@both
@pytest.mark.parametrize("many", [tuple, list])
@pytest.mark.parametrize("values", [(5, 6), [5, 6], np.array([5, 6]), "ab"], ids=str)
def test_several_nodes_take_a_sequence_of_values(eqx, many, values):
    assert eqx.tree_at(lambda tree: many([tree[0], tree[1]]), [1, 2], values) == list(values)


@both
def test_a_sequence_of_one_node_takes_a_sequence_of_one_value(eqx):
    assert eqx.tree_at(lambda tree: (tree[0],), [1, 2], (5,)) == [5, 2]


@both
def test_a_sequence_of_no_nodes_changes_nothing(eqx):
    assert eqx.tree_at(lambda tree: (), [1, 2], ()) == [1, 2]


@both
def test_replace_fn_is_called_for_each_node(eqx):
    replaced = eqx.tree_at(lambda tree: (tree[0], tree[1]), [1, (2, 3)], replace_fn=str)
    assert replaced == ["1", "(2, 3)"]


@both
def test_one_array_in_two_places_is_replaced_in_one(eqx):
    x = jnp.ones(2)
    replaced = eqx.tree_at(lambda tree: tree[0], [x, x], 3)
    assert replaced[0] == 3
    assert replaced[1] is x


@both
def test_one_list_in_two_places_is_replaced_in_one(eqx):
    x = [1]
    assert eqx.tree_at(lambda tree: tree[0], [x, x], 3) == [3, [1]]


@both
@pytest.mark.parametrize("empty", [(), [], {}], ids=repr)
def test_one_empty_container_of_two_is_replaced(eqx, empty):
    assert eqx.tree_at(lambda tree: tree[1], [empty, type(empty)()], 3) == [empty, 3]


@both
def test_the_only_none_of_a_tree_is_replaced(eqx):
    assert eqx.tree_at(lambda tree: tree[0], [None, 2], 1) == [1, 2]


@both
def test_one_none_of_two_is_replaced_where_none_is_a_leaf(eqx):
    assert eqx.tree_at(lambda tree: tree[1], [None, None], 1, is_leaf=is_none) == [None, 1]


@both
def test_replace_fn_gets_a_none_that_is_a_leaf(eqx):
    replaced = eqx.tree_at(lambda tree: tree[0], [None, 2], replace_fn=repr, is_leaf=is_none)
    assert replaced == ["None", 2]


@both
def test_is_leaf_may_make_a_node_one_leaf(eqx):
    replaced = eqx.tree_at(
        lambda tree: tree[0], [(1, 2), 3], replace_fn=len, is_leaf=lambda x: isinstance(x, tuple)
    )
    assert replaced == [2, 3]


@both
@pytest.mark.parametrize(
    "leaf", [jnp.sin, "text", int, object(), 1j], ids=lambda leaf: type(leaf).__name__
)
def test_a_leaf_may_be_anything(eqx, leaf):
    assert eqx.tree_at(lambda tree: tree[0], [leaf, 2], replace_fn=lambda x: x is leaf) == [True, 2]


@both
def test_works_under_jit(eqx):
    replaced = jax.jit(lambda tree, value: eqx.tree_at(lambda tree: tree[0], tree, value))(
        [1.0, 2.0], 5.0
    )
    assert [float(leaf) for leaf in replaced] == [5, 2]


@both
def test_a_gradient_flows_through_the_replacement(eqx):
    gradient = jax.grad(lambda value: sum(eqx.tree_at(lambda tree: tree[0], [1.0, 2.0], value)))
    assert gradient(5.0) == 1


def test_a_kept_partition_is_not_taken_over():
    read = eqxlike.filter_jit(lambda pair: pair.first * 1)
    pair = Pair(jnp.array(1.0), 2)
    read(pair)
    assert read(tree_at(lambda pair: pair.first, pair, jnp.array(5.0))) == 5
