"""Where a test takes `eqx`, the same program holds on Equinox, whose behaviour is the measure."""

import inspect
from typing import Any, NamedTuple

import equinox
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import eqxlike
from eqxlike import tree_at

both = pytest.mark.parametrize(
    "eqx", [pytest.param(equinox, id="equinox"), pytest.param(eqxlike, id="eqxlike")]
)


class Point(NamedTuple):
    x: Any
    y: Any


class Pair(eqxlike.Module):
    first: Any
    second: Any
    name: str = eqxlike.field(static=True, default="pair")


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


# --- errors -------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("kwargs", [{}, {"replace": 1, "replace_fn": str}], ids=["neither", "both"])
def test_precisely_one_of_replace_and_replace_fn_is_needed(eqx, kwargs):
    with pytest.raises(ValueError, match="Precisely one of `replace` and `replace_fn`"):
        eqx.tree_at(lambda tree: tree[0], [1, 2], **kwargs)


@both
def test_fewer_values_than_nodes_is_an_error(eqx):
    with pytest.raises(ValueError, match="same length as `replace`"):
        eqx.tree_at(lambda tree: (tree[0], tree[1]), [1, 2], (5,))


def test_the_error_of_a_wrong_number_of_values_names_both_numbers():
    with pytest.raises(ValueError, match="it returned 2, and `replace` has 1"):
        tree_at(lambda tree: (tree[0], tree[1]), [1, 2], (5,))


def test_one_value_for_several_nodes_is_an_error_that_names_its_type():
    expected = "returned 2 nodes, so `replace` must be a sequence of as many; it is of type int"
    with pytest.raises(ValueError, match=expected):
        tree_at(lambda tree: (tree[0], tree[1]), [1, 2], 5)


@both
@pytest.mark.parametrize("where", [lambda tree: 3, lambda tree: (tree[0], 3)], ids=["one", "many"])
def test_returning_what_is_no_node_is_an_error(eqx, where):
    with pytest.raises(TypeError):
        eqx.tree_at(where, [1, 2], (5, 6))


def test_the_error_of_what_is_no_node_says_what_came():
    with pytest.raises(TypeError, match="`where` returned 3 of type int, which is not a node"):
        tree_at(lambda tree: 3, [1, 2], 5)


@both
def test_a_static_field_is_no_node(eqx):
    with pytest.raises(TypeError):
        eqx.tree_at(lambda module: module.inner.size, make_module(eqx), 5)


@both
@pytest.mark.parametrize(
    "where",
    [lambda tree: (tree[0], tree[0][0]), lambda tree: (tree[0][0], tree[0])],
    ids=["outer first", "inner first"],
)
def test_a_node_inside_another_is_an_error(eqx, where):
    with pytest.raises(ValueError, match="does not specify an element or elements of `pytree`"):
        eqx.tree_at(where, [[1], 2], (3, 4))


@both
def test_a_nested_sequence_of_nodes_is_an_error(eqx):
    with pytest.raises(ValueError, match="does not specify an element or elements of `pytree`"):
        eqx.tree_at(lambda tree: ((tree[0], tree[1]), tree[2]), [1, 2, 3], ((5, 6), 7))


@both
def test_one_none_of_two_is_an_error_that_says_to_make_it_a_leaf(eqx):
    with pytest.raises(ValueError, match=r"(?s)does not uniquely identify .*is_leaf=lambda"):
        eqx.tree_at(lambda tree: tree[0], [None, None], 1)


@both
def test_calculating_with_a_leaf_is_an_error(eqx):
    with pytest.raises(TypeError, match="unsupported operand"):
        eqx.tree_at(lambda tree: tree[0] + 1, [1, 2], 5)


@both
@pytest.mark.parametrize("name", ["shape", "T", "dtype"])
def test_looking_inside_a_leaf_is_an_error(eqx, name):
    with pytest.raises(AttributeError, match=name):
        eqx.tree_at(lambda tree: getattr(tree[0], name), [jnp.ones(2), 2], 5)


def test_the_error_of_looking_inside_a_leaf_names_its_path_and_the_attribute():
    expected = r"asked the leaf at tree\['a'\]\[1\]\.first for 'shape'"
    with pytest.raises(AttributeError, match=expected):
        tree_at(lambda tree: tree["a"][1].first.shape, {"a": [1, Pair(2, 3)]}, 5)


# Each is a function from a tree of a 0, an array and a `None` which hangs on what the leaves are.
DEPENDENT = {
    "truth": lambda tree: tree[0] if tree[0] else tree[1],
    "equality": lambda tree: tree[0] if tree[0] == 0 else tree[1],
    "type": lambda tree: [leaf for leaf in tree if isinstance(leaf, int)],
    "is_array": lambda tree: [leaf for leaf in tree if eqxlike.is_array(leaf)],
    "is None": lambda tree: tree[0] if tree[2] is None else tree[1],
}


@both
@pytest.mark.parametrize("how", DEPENDENT)
def test_choosing_by_what_the_leaves_are_is_an_error(eqx, how):
    with pytest.raises(ValueError, match="`where` must not depend on the leaves"):
        eqx.tree_at(
            DEPENDENT[how], [0, jnp.ones(2), None], replace_fn=lambda node: 5, is_leaf=is_none
        )
