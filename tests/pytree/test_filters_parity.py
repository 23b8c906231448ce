"""Any tree, any specification, right or wrong: the output on eqxlike is that on Equinox."""

import equinox
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from hypothesis import event, given
from hypothesis import strategies as st

import eqxlike
from tests.beside_equinox import output
from tests.pytree.trees import Pair, trees_of


class ArrayLike:
    def __jax_array__(self):
        return jnp.ones(2)


def is_none(node):
    return node is None


def is_tuple(node):
    return isinstance(node, tuple)


def is_pair(node):
    return isinstance(node, Pair)


LEAVES = st.sampled_from(
    [
        *(jnp.ones(2), jnp.arange(2), jnp.ones(2, jnp.bfloat16), jax.random.key(0)),
        *(np.ones(2), np.arange(2), np.array(["a"]), np.float32(1), np.int8(1), np.bool_(True)),
        *(1, 1.5, 1j, True, "text", jnp.sin, len, int, ArrayLike()),
    ]
)


TREES = trees_of(LEAVES | st.none(), max_leaves=8)
NAMES = ["is_array", "is_array_like", "is_inexact_array", "is_inexact_array_like"]
SPECS = st.booleans() | st.sampled_from([*NAMES, str])
WRONG_SPECS = st.sampled_from([None, 1, "a", np.True_, [], [True], (True, True), {"a": True}])
IS_LEAF = st.sampled_from([None, is_none, is_tuple, is_pair])


def children_of(node):
    """The children of a node and how to put others there; no children for a leaf."""
    is_leaf = jtu.all_leaves([node])
    children, treedef = ([], None) if is_leaf else eqxlike.tree_flatten_one_level(node)
    return children, treedef


@st.composite
def prefixes(draw, tree):
    """A prefix of `tree`, in about one of three cases with something wrong in it."""
    if draw(st.integers(0, 15)) == 0:
        return draw(WRONG_SPECS)
    children, treedef = children_of(tree)
    if children and draw(st.integers(0, 3)):
        return treedef.unflatten([draw(prefixes(child)) for child in children])
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
def test_filter(data, tree, inverse, replace, is_leaf):
    spec = data.draw(prefixes(tree))

    def program(eqx):
        return eqx.filter(tree, for_library(spec, eqx), inverse, replace, is_leaf)

    check_same_output(program)


@given(st.data(), TREES, st.sampled_from([None, 0, "gone"]), IS_LEAF)
def test_partition(data, tree, replace, is_leaf):
    spec = data.draw(prefixes(tree))
    check_same_output(lambda eqx: eqx.partition(tree, for_library(spec, eqx), replace, is_leaf))


@given(st.data(), TREES, IS_LEAF)
def test_combine(data, tree, is_leaf):
    others = data.draw(st.lists(changed(tree), max_size=2))
    check_same_output(lambda eqx: eqx.combine(tree, *others, is_leaf=is_leaf))


@given(st.data(), TREES)
def test_apply_updates(data, tree):
    updates = jtu.tree_map(lambda leaf: None if callable(leaf) else leaf, data.draw(changed(tree)))

    # New leaves: their values count, not which objects they are.
    check_same_output(lambda eqx: eqx.apply_updates(tree, updates), see=repr)
