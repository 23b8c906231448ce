"""Leaves by predicates and by specifications: `filter`, `partition`, `combine`.

Any tree, any specification, right or wrong: the output on eqxlike is that on Equinox.
"""

import functools

import equinox
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

import eqxlike
from tests.beside_equinox import both, output
from tests.pytree.trees import Pair, trees_of


class ArrayLike:
    def __jax_array__(self):
        return jnp.ones(2)


class IntegerLike:
    def __jax_array__(self):
        return jnp.arange(2)


def is_int(leaf):
    return isinstance(leaf, int)


def is_none(node):
    return node is None


def is_tuple(node):
    return isinstance(node, tuple)


def is_pair(node):
    return isinstance(node, Pair)


# --- predicates -----------------------------------------------------------------------------------


# Each as (value, is_array, is_array_like, is_inexact_array, is_inexact_array_like).
KINDS = {
    "float32": (jnp.ones(2), True, True, True, True),
    "bfloat16": (jnp.ones(2, jnp.bfloat16), True, True, True, True),
    "int32": (jnp.arange(2), True, True, False, False),
    "bool": (jnp.ones(2, bool), True, True, False, False),
    "typed key": (jax.random.key(0), True, True, False, False),
    "numpy float": (np.ones(2), True, True, True, True),
    "numpy text": (np.array(["a"]), True, True, False, False),
    "numpy float scalar": (np.float32(1), True, True, True, True),
    "numpy time": (np.datetime64(1, "s"), True, True, False, False),
    "int": (1, False, True, False, False),
    "bool value": (True, False, True, False, False),
    "float": (1.0, False, True, False, True),
    "complex": (1j, False, True, False, True),
    "str": ("1.0", False, False, False, False),
    "None": (None, False, False, False, False),
    "list": ([1.0], False, False, False, False),
    "array-like": (ArrayLike(), False, True, False, True),
    "integer array-like": (IntegerLike(), False, True, False, False),
    "struct": (jax.ShapeDtypeStruct((2,), jnp.float32), False, False, False, False),
}
NAMES = ["is_array", "is_array_like", "is_inexact_array", "is_inexact_array_like"]


@both
@pytest.mark.parametrize("name", NAMES)
def test_a_predicate_knows_the_kind(eqx, name):
    position = 1 + NAMES.index(name)
    answers = {kind: getattr(eqx, name)(row[0]) for kind, row in KINDS.items()}
    assert {type(answer) for answer in answers.values()} == {bool}
    assert answers == {kind: row[position] for kind, row in KINDS.items()}


def test_a_predicate_says_of_a_tracer_what_it_says_of_its_array():
    arrays = [row[0] for row in KINDS.values() if isinstance(row[0], jax.Array)]
    ours = [getattr(eqxlike, name) for name in NAMES]

    def ask(arrays):
        return [predicate(array) for predicate in ours for array in arrays]

    answers = []
    jax.eval_shape(lambda arrays: answers.extend(ask(arrays)), arrays)
    assert answers == ask(arrays)


# What Equinox says no of, as NumPy itself does: JAX takes gradients with respect to all of these.
@pytest.mark.parametrize("name", ["is_inexact_array", "is_inexact_array_like"])
def test_numpy_arrays_of_the_floating_point_types_of_jax_are_inexact(name):
    for dtype in (jnp.bfloat16, jnp.float8_e4m3fn):
        arrays = [np.ones(2, dtype), np.ones((), dtype)[()]]
        assert [getattr(eqxlike, name)(array) for array in arrays] == [True, True]
        assert [getattr(equinox, name)(array) for array in arrays] == [False, False]


# For Equinox it is array-like, and an error to ask if it is inexact.
def test_what_opts_out_of_being_an_array_is_not_array_like():
    class NoArray:
        __jax_array__ = None

    assert (eqxlike.is_array_like(NoArray()), equinox.is_array_like(NoArray())) == (False, True)
    assert eqxlike.is_inexact_array_like(NoArray()) is False


# --- laws, and the same output as on Equinox ------------------------------------------------------

LEAVES = st.sampled_from(
    [
        *(jnp.ones(2), jnp.arange(2), jnp.ones(2, jnp.bfloat16), jax.random.key(0)),
        *(np.ones(2), np.arange(2), np.array(["a"]), np.float32(1), np.int8(1), np.bool_(True)),
        *(0, 1, 1.5, 1j, True, False, "text", "", jnp.sin, len, int, ArrayLike()),
    ]
)
TREES = trees_of(LEAVES | st.none(), max_leaves=8)
SPECS = st.booleans() | st.sampled_from([*NAMES, str, callable])
WRONG_SPECS = st.sampled_from([None, 1, "a", np.True_, [], [True], (True, True), {"a": True}])
IS_LEAF = st.sampled_from([None, is_none, is_tuple, is_pair])


def children_of(node):
    """The children of a node and how to put others there; no children for a leaf."""
    is_leaf = jtu.all_leaves([node])
    return ([], None) if is_leaf else eqxlike.tree_flatten_one_level(node)


@st.composite
def prefixes(draw, tree, errs=True):
    """A prefix of `tree`, in about one of three cases with something wrong in it."""
    if errs and draw(st.integers(0, 15)) == 0:
        return draw(WRONG_SPECS)
    children, treedef = children_of(tree)
    if children and draw(st.integers(0, 3)):
        return treedef.unflatten([draw(prefixes(child, errs)) for child in children])
    return None if tree is None else draw(SPECS)


@st.composite
def changed(draw, tree):
    """`tree` with some leaves taken out, others put in, and seldom another structure."""
    if draw(st.integers(0, 15)) == 0:
        return draw(TREES)
    children, treedef = children_of(tree)
    if children:
        return treedef.unflatten([draw(changed(child)) for child in children])
    return draw(st.sampled_from([tree, None]) | LEAVES)


def for_library(spec, eqx):
    """The specification with the predicates of one library in the place of their names."""
    return jtu.tree_map(lambda leaf: getattr(eqx, leaf) if leaf in NAMES else leaf, spec)


def check_same_output(program, see=id):
    def seen(eqx):
        leaves, treedef = jtu.tree_flatten(program(eqx))
        return [*map(see, leaves)], treedef

    ours, theirs = (output(seen, eqx) for eqx in (eqxlike, equinox))
    event("returned" if theirs.raised is None else "raised")
    assert ours == theirs


@given(st.data(), TREES, st.booleans(), st.sampled_from([None, 0, "gone"]), IS_LEAF)
def test_filter_and_partition_are_those_of_equinox(data, tree, inverse, replace, is_leaf):
    spec = data.draw(prefixes(tree))

    def program(eqx):
        return eqx.filter(tree, for_library(spec, eqx), inverse, replace, is_leaf)

    check_same_output(program)
    check_same_output(lambda eqx: eqx.partition(tree, for_library(spec, eqx), replace, is_leaf))


@given(st.data(), TREES, IS_LEAF)
def test_combine_is_that_of_equinox(data, tree, is_leaf):
    others = data.draw(st.lists(changed(tree), max_size=2))
    check_same_output(lambda eqx: eqx.combine(tree, *others, is_leaf=is_leaf))


@given(st.data(), TREES)
def test_apply_updates_is_that_of_equinox(data, tree):
    updates = jtu.tree_map(lambda leaf: None if callable(leaf) else leaf, data.draw(changed(tree)))

    # New leaves: their values count, not which objects they are.
    check_same_output(lambda eqx: eqx.apply_updates(tree, updates), see=repr)


@given(st.data(), TREES)
def test_partition_puts_each_leaf_in_one_part_and_combine_undoes_it(data, tree):
    spec = for_library(data.draw(prefixes(tree, errs=False)), eqxlike)
    chosen, rest = eqxlike.partition(tree, spec)
    for combined in (eqxlike.combine(chosen, rest), eqxlike.combine(rest, chosen)):
        assert jtu.tree_structure(combined) == jtu.tree_structure(tree)
        assert [*map(id, jtu.tree_leaves(combined))] == [*map(id, jtu.tree_leaves(tree))]
    missing = object()
    parts = eqxlike.partition(tree, spec, replace=missing)
    for leaf, *halves in zip(*map(jtu.tree_leaves, (tree, *parts)), strict=True):
        assert {id(half) for half in halves} == {id(leaf), id(missing)}
    kept = (eqxlike.filter(tree, spec), eqxlike.filter(tree, spec, inverse=True))
    assert eqxlike.tree_equal(kept, (chosen, rest), typematch=True)


# --- filter and partition -----------------------------------------------------------------------


def test_a_spec_is_a_prefix_of_booleans_and_predicates():
    tree = [(1, "a"), {"b": 2, "c": "d"}]
    assert eqxlike.filter(tree, [False, is_int]) == [(None, None), {"b": 2, "c": None}]
    assert eqxlike.filter(tree, [False, is_int], inverse=True)[1] == {"b": None, "c": "d"}
    assert eqxlike.filter(tree, True) == tree
    assert eqxlike.partition([1, "a"], is_int, replace=9) == ([1, 9], [9, "a"])


@both
def test_a_predicate_may_answer_with_what_has_a_truth_value(eqx):
    for answer in (bool, np.bool_, jnp.bool_, int):
        assert eqx.filter([1, 0], lambda leaf, answer=answer: answer(leaf)) == [1, None]


def test_a_predicate_that_answers_none_says_no():
    assert eqxlike.filter([1, 2], lambda leaf: None) == [None, None]
    with pytest.raises(ValueError, match="structure error"):
        equinox.filter([1, 2], lambda leaf: None)


def test_a_wrong_specification_is_an_error_that_says_where():
    def predicate(leaf):
        raise ValueError("mine")

    for function in (eqxlike.filter, eqxlike.partition):
        expected = (
            "must consist of booleans and callables only; it has a leaf 'a' of type str "
            r"at filter_spec\[1\]"
        )
        with pytest.raises(ValueError, match=expected):
            function([1, 2], [True, "a"])
        expected = r"filter_spec\.second is None, and pytree\.second is .* a prefix of `pytree`"
        with pytest.raises(ValueError, match=expected) as caught:
            function(Pair(1, [2]), Pair(True, None))
        assert "lambda" not in str(caught.value)
    with pytest.raises(ValueError, match="counts as a node: wrap it in a lambda"):
        eqxlike.filter([1, 2], jtu.Partial(callable))
    assert eqxlike.filter([1, len], functools.partial(callable)) == [None, len]
    with pytest.raises(ValueError, match=r"^mine$"):
        eqxlike.filter([1, 2], [predicate, True])


# --- combine ------------------------------------------------------------------------------------


@both
def test_combine_takes_the_first_that_is_not_none(eqx):
    assert eqx.combine([None, 1, None], [2, 3, None], [4, 5, None]) == [2, 1, None]
    assert eqx.combine([1, None]) == [1, None]
    assert eqx.combine([0, "", False], [1, "a", True]) == [0, "", False]
    assert eqx.combine([None, 1], [(2, 3), None]) == [(2, 3), 1]
    assert eqx.combine([(None, 2), None], [(3, 4), 5], is_leaf=is_tuple) == [(None, 2), 5]
    assert eqx.combine([None, 1], [2, None], is_leaf=lambda node: False) == [2, 1]


def test_combine_of_what_does_not_fit_is_an_error_that_says_where():
    expected = r"pytrees\[0\]\['a'\] is a list .* and pytrees\[2\]\['a'\] is a leaf of type int"
    with pytest.raises(ValueError, match=expected):
        eqxlike.combine({"a": [1]}, {"a": [None]}, {"a": 2})
    with pytest.raises(TypeError, match="`combine` expects at least one pytree"):
        eqxlike.combine()
