"""Predicates, `filter`, `partition`, `combine` and `apply_updates`.

For any tree and any valid or invalid specification, eqxlike gives the output of Equinox.
"""

import functools
import re

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


# --- predicates -----------------------------------------------------------------------------------


# Tuples (value, is_array, is_array_like, is_inexact_array, is_inexact_array_like).
KINDS = {
    "float32": (jnp.ones(2), True, True, True, True),
    "bfloat16": (jnp.ones(2, jnp.bfloat16), True, True, True, True),
    "int32": (jnp.arange(2), True, True, False, False),
    "bool": (jnp.ones(2, bool), True, True, False, False),
    "typed key": (jax.random.key(0), True, True, False, False),
    "numpy float": (np.ones(2), True, True, True, True),
    "numpy text": (np.array(["a"]), True, True, False, False),
    "numpy float scalar": (np.float32(1), True, True, True, True),
    "int": (1, False, True, False, False),
    "bool value": (True, False, True, False, False),
    "float": (1.0, False, True, False, True),
    "complex": (1j, False, True, False, True),
    "str": ("1.0", False, False, False, False),
    "None": (None, False, False, False, False),
    "array-like": (ArrayLike(), False, True, False, True),
    "integer array-like": (IntegerLike(), False, True, False, False),
    "struct": (jax.ShapeDtypeStruct((2,), jnp.float32), False, False, False, False),
}
NAMES = ["is_array", "is_array_like", "is_inexact_array", "is_inexact_array_like"]


@both
def test_predicates_classify_every_kind_of_value(eqx):
    for kind, (value, *expected) in KINDS.items():
        answers = [getattr(eqx, name)(value) for name in NAMES]
        assert all(isinstance(answer, bool) for answer in answers)
        assert (kind, answers) == (kind, expected)


# JAX differentiates with respect to these arrays. Equinox and NumPy return `False`.
@pytest.mark.parametrize("name", ["is_inexact_array", "is_inexact_array_like"])
def test_numpy_arrays_of_the_floating_point_types_of_jax_are_inexact(name):
    for dtype in (jnp.bfloat16, jnp.float8_e4m3fn):
        arrays = [np.ones(2, dtype), np.ones((), dtype)[()]]
        assert [getattr(eqxlike, name)(array) for array in arrays] == [True, True]
        assert [getattr(equinox, name)(array) for array in arrays] == [False, False]


# On Equinox it is array-like, and `is_inexact_array_like` raises an error.
def test_object_that_opts_out_of_being_an_array_is_not_array_like():
    class NoArray:
        __jax_array__ = None

    assert (eqxlike.is_array_like(NoArray()), equinox.is_array_like(NoArray())) == (False, True)
    assert eqxlike.is_inexact_array_like(NoArray()) is False


# --- laws, and agreement with Equinox -------------------------------------------------------------

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
IS_LEAF = st.sampled_from(
    [None, lambda node: node is None, lambda node: isinstance(node, tuple | Pair)]
)


def children_of(node):
    """The children and the one-level treedef of a node. A leaf has no children."""
    is_leaf = jtu.all_leaves([node])
    return ([], None) if is_leaf else eqxlike.tree_flatten_one_level(node)


@st.composite
def prefixes(draw, tree, errs=True):
    """A prefix of `tree`. About one in three contains an error."""
    if errs and draw(st.integers(0, 15)) == 0:
        return draw(WRONG_SPECS)
    children, treedef = children_of(tree)
    if children and draw(st.integers(0, 3)):
        return treedef.unflatten([draw(prefixes(child, errs)) for child in children])
    return None if tree is None else draw(SPECS)


@st.composite
def changed(draw, tree):
    """`tree` with some leaves removed or replaced, and sometimes with another structure."""
    if draw(st.integers(0, 15)) == 0:
        return draw(TREES)
    children, treedef = children_of(tree)
    if children:
        return treedef.unflatten([draw(changed(child)) for child in children])
    return draw(st.sampled_from([tree, None]) | LEAVES)


def for_library(spec, eqx):
    """Replaces the names of predicates by the predicates of one library."""
    return jtu.tree_map(lambda leaf: getattr(eqx, leaf) if leaf in NAMES else leaf, spec)


def check_same_output(program, see=id):
    def seen(eqx):
        leaves, treedef = jtu.tree_flatten(program(eqx))
        return [*map(see, leaves)], treedef

    ours, theirs = (output(seen, eqx) for eqx in (eqxlike, equinox))
    event("returned" if theirs.raised is None else "raised")
    assert ours == theirs


@given(st.data(), TREES, st.booleans(), st.sampled_from([None, 0, "gone"]), IS_LEAF)
def test_filter_and_partition_agree_with_equinox(data, tree, inverse, replace, is_leaf):
    spec = data.draw(prefixes(tree))

    def program(eqx):
        return eqx.filter(tree, for_library(spec, eqx), inverse, replace, is_leaf)

    check_same_output(program)
    check_same_output(lambda eqx: eqx.partition(tree, for_library(spec, eqx), replace, is_leaf))


@given(st.data(), TREES, IS_LEAF)
def test_combine_agrees_with_equinox(data, tree, is_leaf):
    others = data.draw(st.lists(changed(tree), max_size=2))
    check_same_output(lambda eqx: eqx.combine(tree, *others, is_leaf=is_leaf))


@given(st.data(), TREES)
def test_apply_updates_agrees_with_equinox(data, tree):
    updates = jtu.tree_map(lambda leaf: None if callable(leaf) else leaf, data.draw(changed(tree)))

    # Compares the values of new leaves instead of their identity.
    check_same_output(lambda eqx: eqx.apply_updates(tree, updates), see=repr)


# --- filter and partition -----------------------------------------------------------------------


@both
def test_predicate_may_return_any_value_with_a_truth_value(eqx):
    for answer in (bool, np.bool_, jnp.bool_, int):
        assert eqx.filter([1, 0], lambda leaf, answer=answer: answer(leaf)) == [1, None]


def test_predicate_may_return_none_for_false():
    assert eqxlike.filter([1, 2], lambda leaf: None) == [None, None]
    with pytest.raises(ValueError, match="structure error"):
        equinox.filter([1, 2], lambda leaf: None)


def test_error_of_a_wrong_specification_names_the_path():
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


def test_class_or_dtype_is_not_a_predicate():
    for function in (eqxlike.filter, eqxlike.partition):
        for spec in (jnp.float32, np.float32, jax.Array, np.dtype("float32")):
            expected = rf"leaf {re.escape(repr(spec))} .* at filter_spec\[1\]\. .* `lambda leaf: "
            with pytest.raises(ValueError, match=expected):
                function([1, 2.0], [True, spec])
    assert eqxlike.filter([1, 0], bool) == equinox.filter([1, 0], bool) == [1, None]


# --- combine ------------------------------------------------------------------------------------


def test_error_of_combine_names_the_path_of_the_mismatch():
    expected = r"pytrees\[0\]\['a'\] is a list .* and pytrees\[2\]\['a'\] is a leaf of type int"
    with pytest.raises(ValueError, match=expected):
        eqxlike.combine({"a": [1]}, {"a": [None]}, {"a": 2})
    with pytest.raises(TypeError, match="`combine` expects at least one pytree"):
        eqxlike.combine()


# --- apply_updates ------------------------------------------------------------------------------


@both
def test_update_is_not_cast_and_none_may_replace_a_whole_subtree(eqx):
    assert eqx.apply_updates([[1, 2], 3], [None, 1]) == [[1, 2], 4]
    updated = eqx.apply_updates(np.ones(2), np.ones(2))
    assert (type(updated), updated.tolist()) == (np.ndarray, [2, 2])
    with pytest.raises(ValueError, match="no available implicit dtype promotion"):
        eqx.apply_updates(jnp.ones(2, jnp.bfloat16), jnp.ones(2))


def test_error_names_the_path_of_a_mismatched_update():
    model = {"a": [jnp.ones(2), jnp.ones(3)], "b": jnp.ones(2)}
    updates = {"a": [jnp.ones(2), jnp.ones(2)], "b": None}
    with pytest.raises(TypeError, match=r"The update of model\['a'\]\[1\] could not"):
        eqxlike.apply_updates(model, updates)
    with pytest.raises(TypeError, match=r"update of model\[1\] could not"):
        eqxlike.apply_updates([1, [2, 3]], [1, 5])
    expected = r"updates\[0\] is a list of length 1, and model\[0\] is a leaf of type float"
    with pytest.raises(ValueError, match=expected):
        eqxlike.apply_updates([1.0], [[2.0]])
