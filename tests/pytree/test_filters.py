"""Where a test takes `eqx`, the same program holds on Equinox, whose behaviour is the measure."""

import inspect
from typing import Any

import equinox
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import eqxlike
from tests.beside_equinox import both
from tests.pytree.trees import trees_of


class ArrayLike:
    def __jax_array__(self):
        return jnp.ones(2)


class IntegerLike:
    def __jax_array__(self):
        return jnp.arange(2)


def is_int(leaf):
    return isinstance(leaf, int)


def is_tuple(node):
    return isinstance(node, tuple)


LEAVES = st.integers() | st.floats(allow_nan=False) | st.text(max_size=2) | st.booleans()
TREES = trees_of(LEAVES | st.none())
PREDICATES = st.sampled_from(
    [is_int, lambda leaf: isinstance(leaf, str), lambda leaf: True, lambda leaf: False]
)


@st.composite
def trees_with_prefixes(draw):
    """A tree and a prefix of it whose leaves are booleans and predicates."""

    def prefix(tree):
        has_children = not jtu.all_leaves([tree]) and tree is not None
        if not has_children and tree is not None:
            return draw(st.booleans() | PREDICATES)
        if has_children and draw(st.booleans()):
            return jtu.tree_map(prefix, tree, is_leaf=lambda node: node is not tree)
        return None if tree is None else draw(st.booleans() | PREDICATES)

    tree = draw(TREES)
    return tree, prefix(tree)


# --- signatures and predicates ------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "is_array",
        "is_array_like",
        "is_inexact_array",
        "is_inexact_array_like",
        "filter",
        "partition",
        "combine",
    ],
)
def test_has_the_parameters_of_equinox(name):
    def parameters(library):
        signature = inspect.signature(getattr(library, name))
        return [(p.name, p.kind, p.default) for p in signature.parameters.values()]

    assert parameters(eqxlike) == parameters(equinox)


# Each as (value, is_array, is_array_like, is_inexact_array, is_inexact_array_like).
KINDS = {
    "float32": (jnp.ones(2), True, True, True, True),
    "bfloat16": (jnp.ones(2, jnp.bfloat16), True, True, True, True),
    "complex64": (jnp.ones(2, jnp.complex64), True, True, True, True),
    "int32": (jnp.arange(2), True, True, False, False),
    "bool": (jnp.ones(2, bool), True, True, False, False),
    "typed key": (jax.random.key(0), True, True, False, False),
    "raw key": (jax.random.PRNGKey(0), True, True, False, False),
    "numpy float": (np.ones(2), True, True, True, True),
    "numpy int": (np.arange(2), True, True, False, False),
    "numpy object": (np.array([object()]), True, True, False, False),
    "numpy text": (np.array(["a"]), True, True, False, False),
    "numpy float scalar": (np.float32(1), True, True, True, True),
    "numpy int scalar": (np.int8(1), True, True, False, False),
    "numpy bool scalar": (np.bool_(True), True, True, False, False),
    "numpy time": (np.datetime64(1, "s"), True, True, False, False),
    "numpy str": (np.str_("a"), True, True, False, False),
    "int": (1, False, True, False, False),
    "bool value": (True, False, True, False, False),
    "float": (1.0, False, True, False, True),
    "complex": (1j, False, True, False, True),
    "str": ("1.0", False, False, False, False),
    "None": (None, False, False, False, False),
    "list": ([1.0], False, False, False, False),
    "array-like": (ArrayLike(), False, True, False, True),
    "integer array-like": (IntegerLike(), False, True, False, False),
    "dtype": (jnp.float32, False, False, False, False),
    "struct": (jax.ShapeDtypeStruct((2,), jnp.float32), False, False, False, False),
    "function": (jnp.sin, False, False, False, False),
}
PREDICATE_NAMES = ["is_array", "is_array_like", "is_inexact_array", "is_inexact_array_like"]


@both
@pytest.mark.parametrize("name", PREDICATE_NAMES)
def test_a_predicate_knows_the_kind(eqx, name):
    position = 1 + PREDICATE_NAMES.index(name)
    answers = {kind: getattr(eqx, name)(row[0]) for kind, row in KINDS.items()}
    assert {type(answer) for answer in answers.values()} == {bool}
    assert answers == {kind: row[position] for kind, row in KINDS.items()}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int32, jnp.complex64, bool])
@pytest.mark.parametrize("name", PREDICATE_NAMES)
def test_a_predicate_says_of_a_tracer_what_it_says_of_its_array(name, dtype):
    predicate = getattr(eqxlike, name)
    answers = []
    jax.jit(lambda x: answers.append(predicate(x)))(jnp.ones(2, dtype))
    assert answers == [predicate(jnp.ones(2, dtype))]


# What Equinox says no of, as NumPy itself does: JAX takes gradients with respect to all of these.
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3fn], ids=["bfloat16", "float8"])
@pytest.mark.parametrize("name", ["is_inexact_array", "is_inexact_array_like"])
def test_numpy_arrays_of_the_floating_point_types_of_jax_are_inexact(name, dtype):
    arrays = [np.ones(2, dtype), np.ones((), dtype)[()]]
    assert [getattr(eqxlike, name)(array) for array in arrays] == [True, True]
    assert [getattr(equinox, name)(array) for array in arrays] == [False, False]


# For Equinox it is array-like, and an error to ask if it is inexact.
def test_what_opts_out_of_being_an_array_is_not_array_like():
    class NoArray:
        __jax_array__ = None

    assert (eqxlike.is_array_like(NoArray()), equinox.is_array_like(NoArray())) == (False, True)
    assert eqxlike.is_inexact_array_like(NoArray()) is False


# --- laws ---------------------------------------------------------------------------------------


@given(trees_with_prefixes())
def test_combine_undoes_partition(tree_and_spec):
    tree, spec = tree_and_spec
    combined = eqxlike.combine(*eqxlike.partition(tree, spec))
    assert eqxlike.tree_equal(combined, tree, typematch=True)


@given(trees_with_prefixes())
def test_combine_does_not_mind_the_order_of_the_parts(tree_and_spec):
    tree, spec = tree_and_spec
    chosen, rest = eqxlike.partition(tree, spec)
    assert eqxlike.tree_equal(eqxlike.combine(rest, chosen), tree, typematch=True)


@given(trees_with_prefixes())
def test_partition_is_filter_and_its_inverse(tree_and_spec):
    tree, spec = tree_and_spec
    parts = (eqxlike.filter(tree, spec), eqxlike.filter(tree, spec, inverse=True))
    assert eqxlike.tree_equal(eqxlike.partition(tree, spec), parts, typematch=True)


@given(trees_with_prefixes())
def test_filter_is_idempotent(tree_and_spec):
    tree, spec = tree_and_spec
    mask = eqxlike.filter(jtu.tree_map(lambda leaf: True, tree), spec, replace=False)
    once = eqxlike.filter(tree, mask, replace=0)
    assert eqxlike.tree_equal(eqxlike.filter(once, mask, replace=0), once, typematch=True)


@given(trees_with_prefixes())
def test_every_leaf_lies_in_one_part_by_reference(tree_and_spec):
    tree, spec = tree_and_spec
    missing = object()
    parts = eqxlike.partition(tree, spec, replace=missing)
    for leaf, *halves in zip(*map(jtu.tree_leaves, (tree, *parts)), strict=True):
        assert {id(half) for half in halves} == {id(leaf), id(missing)}


@given(trees_with_prefixes(), st.booleans())
def test_filter_agrees_with_equinox(tree_and_spec, inverse):
    tree, spec = tree_and_spec
    outputs = [eqx.filter(tree, spec, inverse, replace=0) for eqx in (eqxlike, equinox)]
    assert eqxlike.tree_equal(*outputs, typematch=True)


@given(st.lists(trees_with_prefixes(), min_size=1, max_size=1), st.data())
def test_combine_agrees_with_equinox(trees, data):
    (tree, _) = trees[0]
    specs = [jtu.tree_map(lambda _: data.draw(st.booleans()), tree) for _ in range(3)]
    parts = [equinox.filter(tree, spec) for spec in specs]
    outputs = [eqx.combine(*parts) for eqx in (eqxlike, equinox)]
    assert eqxlike.tree_equal(*outputs, typematch=True)


# --- filter and partition -----------------------------------------------------------------------


@both
def test_a_spec_may_be_one_boolean(eqx):
    assert (eqx.filter([1, "a"], True), eqx.filter([1, "a"], False)) == ([1, "a"], [None, None])


@both
def test_a_spec_may_be_a_prefix(eqx):
    tree = [(1, "a"), {"b": 2, "c": "d"}]
    assert eqx.filter(tree, [False, is_int]) == [(None, None), {"b": 2, "c": None}]


@both
def test_a_spec_may_be_a_module(eqx):
    class Model(eqx.Module):
        first: Any
        second: Any

    assert eqx.filter(Model(1, [2, 3]), Model(False, True)) == Model(None, [2, 3])


@both
def test_replace_stands_for_what_was_taken(eqx):
    assert eqx.filter([1, "a"], is_int, replace=9) == [1, 9]


@both
def test_partition_replaces_in_both_parts(eqx):
    assert eqx.partition([1, "a"], is_int, replace=9) == ([1, 9], [9, "a"])


@both
def test_inverse_keeps_what_would_be_replaced(eqx):
    assert eqx.filter([1, "a"], is_int, inverse=True) == [None, "a"]


@both
@pytest.mark.parametrize("answer", [bool, np.bool_, jnp.bool_, int], ids=lambda kind: kind.__name__)
def test_a_predicate_may_answer_with_what_has_a_truth_value(eqx, answer):
    assert eqx.filter([1, 0], lambda leaf: answer(leaf)) == [1, None]


def test_a_predicate_that_answers_none_says_no():
    assert eqxlike.filter([1, 2], lambda leaf: None) == [None, None]
    with pytest.raises(ValueError, match="structure error"):
        equinox.filter([1, 2], lambda leaf: None)


@both
def test_is_leaf_makes_a_node_one_leaf(eqx):
    assert eqx.filter([(1, 2), 3], is_tuple, is_leaf=is_tuple) == [(1, 2), None]


@both
def test_is_leaf_serves_partition_too(eqx):
    parts = eqx.partition([(1, 2), 3], is_tuple, is_leaf=is_tuple)
    assert parts == ([(1, 2), None], [None, 3])


@both
def test_is_leaf_may_make_none_a_leaf(eqx):
    def is_none(node):
        return node is None

    assert eqx.filter([None, 3], is_none, replace=0, is_leaf=is_none) == [None, 0]


@both
def test_filter_under_jit_keeps_tracers(eqx):
    double = jax.jit(lambda tree: eqx.filter(tree, eqx.is_inexact_array))
    kept = double([jnp.ones(2), jnp.arange(2)])
    assert (kept[0].tolist(), kept[1]) == ([1, 1], None)


@both
@pytest.mark.parametrize("spec", [1, "a", 1.0, None], ids=repr)
def test_a_spec_of_other_leaves_is_an_error(eqx, spec):
    with pytest.raises(ValueError):  # noqa: PT011
        eqx.filter([1], [spec])


@pytest.mark.parametrize("function", [eqxlike.filter, eqxlike.partition])
def test_the_error_of_a_wrong_spec_says_what_is_allowed_and_what_came_where(function):
    expected = (
        "must consist of booleans and callables only; it has a leaf 'a' of type str "
        r"at filter_spec\[1\]"
    )
    with pytest.raises(ValueError, match=expected):
        function([1, 2], [True, "a"])


@both
@pytest.mark.parametrize(
    ("tree", "spec"),
    [([1, 2], [True]), (1, [True]), ([1], (True,)), ({"a": 1}, {"b": True})],
    ids=repr,
)
def test_a_spec_that_is_no_prefix_is_an_error(eqx, tree, spec):
    with pytest.raises(ValueError, match="structure error"):
        eqx.filter(tree, spec)


# --- combine ------------------------------------------------------------------------------------


@both
def test_combine_takes_the_first_that_is_not_none(eqx):
    assert eqx.combine([None, 1, None], [2, 3, None], [4, 5, None]) == [2, 1, None]


@both
def test_combine_of_one_tree_is_that_tree(eqx):
    assert eqx.combine([1, None]) == [1, None]


@both
def test_combine_takes_falsy_leaves(eqx):
    assert eqx.combine([0, "", False], [1, "a", True]) == [0, "", False]


@both
def test_combine_fills_a_none_with_a_subtree(eqx):
    assert eqx.combine([None, 1], [(2, 3), None]) == [(2, 3), 1]


@both
def test_combine_with_is_leaf_takes_nodes_whole(eqx):
    assert eqx.combine([(None, 2), None], [(3, 4), 5], is_leaf=is_tuple) == [(None, 2), 5]


@both
def test_none_is_missing_whatever_is_leaf_says(eqx):
    assert eqx.combine([None, 1], [2, None], is_leaf=lambda node: False) == [2, 1]


@both
@pytest.mark.parametrize(
    "trees", [([1, 2], [1]), ([1], (1,)), ({"a": 1}, {"b": 1}), ([(1, 2)], [None])], ids=repr
)
def test_combine_of_different_structures_is_an_error(eqx, trees):
    with pytest.raises(ValueError, match="structure error"):
        eqx.combine(*trees)


@both
def test_combine_of_nothing_is_an_error(eqx):
    with pytest.raises(TypeError):
        eqx.combine()


def test_the_error_of_combine_of_nothing_says_what_is_needed():
    with pytest.raises(TypeError, match="`combine` expects at least one pytree"):
        eqxlike.combine()
