"""Arithmetic of trees acts on their leaves, as in Equinox."""

import operator
import re

import equinox.internal
import hypothesis
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import eqxlike.internal
from eqxlike.internal import ω
from tests.beside_equinox import output

BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "lt", "le", "eq", "ne", "gt", "ge")
UNARY = ("neg", "pos", "abs")
LEAVES = (
    1.5,
    np.float32(2.5),
    jnp.array(0.5),
    jnp.array(3.0, jnp.float32),
    jnp.array([1.0, -2.0], jnp.float32),
    jnp.array([0.5, 4.0], jnp.bfloat16),
    jnp.array([1.0, 2.0j], jnp.complex64),
)
SCALARS = (2.0, 3, jnp.array(0.25), jnp.array(2.0, jnp.float32))


def assert_agree(leaves, function):
    """Asserts that both libraries return equal types and values, or raise the same error class."""
    theirs, ours = (
        output(lambda eqx: function(eqx.ω, {"a": leaves[0], "b": [leaves[1], (leaves[0],)]}), eqx)
        for eqx in (equinox.internal, eqxlike.internal)
    )
    assert ours.raised is theirs.raised
    described = lambda leaf: (jax.typeof(leaf), np.asarray(leaf).tolist())
    assert jtu.tree_map(described, ours.returned) == jtu.tree_map(described, theirs.returned)


leaves = st.tuples(st.sampled_from(LEAVES), st.sampled_from(LEAVES))


@hypothesis.settings(max_examples=20)
@given(leaves, st.sampled_from((*BINARY, *UNARY)))
@jax.numpy_dtype_promotion("standard")
def test_operations_on_one_and_two_trees_agree_with_equinox(leaves, name):
    def function(w, tree):
        operands = tree**w, jtu.tree_map(lambda leaf: leaf + leaf, tree) ** w
        return getattr(operator, name)(*operands[: 1 if name in UNARY else 2]).ω

    assert_agree(leaves, function)


def test_operations_on_integers_agree_with_equinox():
    for name in ("and_", "or_", "xor", "lshift", "rshift", "invert"):

        def function(w, tree, name=name):
            operands = [tree**w] if name == "invert" else [tree**w, tree**w]
            return getattr(operator, name)(*operands).ω

        assert_agree((jnp.array([1, 2]), 3), function)


@hypothesis.settings(max_examples=20)
@given(leaves, st.sampled_from(BINARY), st.sampled_from(SCALARS), st.booleans())
@jax.numpy_dtype_promotion("standard")
def test_operations_on_a_tree_and_a_scalar_agree_with_equinox(leaves, name, scalar, is_reflected):
    def function(w, tree):
        operands = (scalar, tree**w) if is_reflected else (tree**w, scalar)
        return getattr(operator, name)(*operands).ω

    assert_agree(leaves, function)


@jax.numpy_dtype_promotion("standard")
def test_operations_on_traced_trees_agree_with_equinox():
    def function(w, tree):
        scaled = lambda tree: SCALARS[3] * (2.0 * tree**w - tree**w / 3) * SCALARS[3]
        return jax.jit(lambda tree: (scaled(tree).ω, (scaled(tree) < tree**w).ω))(tree)

    assert_agree((LEAVES[4], LEAVES[5]), function)


def test_powers_and_matrix_products():
    matrix, array = jnp.array([[1.0, 2.0], [0.0, 1.0]]), jnp.array([[2.0, 0.0], [1.0, 1.0]])
    tree = {"a": array} ** ω
    for found, expected in [
        (tree @ matrix, array @ matrix),
        (matrix @ tree, matrix @ array),
        (tree**2.0, array**2.0),
        (2.0**tree, 2.0**array),
    ]:
        assert jnp.array_equal(found.ω["a"], expected)


def test_updates_at_an_index_match_the_leaves():
    @jax.jit
    def updates(tree, other):
        names = ("set", "add", "multiply", "divide", "power", "min", "max")
        return [
            (
                getattr(tree["a"].at[1], name)(3.0),
                [getattr(ω(tree).at[1], name)(value).ω for value in (3.0, other**ω)],
            )
            for name in names
        ]

    for expected, found in updates({"a": jnp.arange(1.0, 5.0)}, {"a": jnp.array(3.0)}):
        for each in found:
            assert each.keys() == {"a"}
            assert np.array_equal(each["a"], expected)


def test_omega_keeps_is_leaf_and_is_hashed_by_identity():
    is_leaf, tree = lambda node: node is None, ω([1])
    both = -ω([1], is_leaf=is_leaf) + ω([1], is_leaf=is_leaf)
    assert both.is_leaf is is_leaf
    assert ω([None, 1], is_leaf=is_leaf).call(is_leaf).ω == [True, False]
    assert len({tree, tree, ω([1])}) == 2
    assert repr(tree) == "ω([1])"
    assert isinstance([1] ** ω, ω)
    arrays = {"a": jnp.arange(3), "b": jnp.ones((2, 2))}
    assert jtu.tree_map(jnp.shape, ω(arrays)[None].ω) == {"a": (1, 3), "b": (1, 2, 2)}


def test_operations_treat_a_numpy_array_as_one_leaf():
    array = np.arange(3.0)
    assert np.array_equal((array**ω).ω, array)
    assert np.array_equal((array * {"a": array} ** ω).ω["a"], array * array)
    assert np.array_equal((array**ω + array).ω, 2 * array)
    scalar = np.float32(2)
    assert (scalar * [1.5] ** ω).ω == ([1.5] ** ω * scalar).ω == [3.0]


def test_traced_operation_is_one_equation():
    def function(a, b, scale):
        return (a**ω + scale * b**ω / 2.0 - b**ω).ω

    array = jnp.ones(3, jnp.float32)
    scale = jnp.array(2.0, jnp.float32)
    names = [str(each.primitive) for each in jax.make_jaxpr(function)(array, array, scale).eqns]
    assert names == ["mul", "div", "add", "sub"]


# Tuples of a call, an error class and a message.
MISTAKES = [
    (
        *(lambda: {"a": 1, "b": 2} ** ω + {"a": 1} ** ω, ValueError),
        "The trees in ω(first) + ω(second) must have the same structure: first is a dict with the "
        "keys ['a', 'b'], and second is a dict with the keys ['a'].",
    ),
    (
        *(lambda: ω([jnp.ones(2)]).at[0].set(ω([1.0, 2.0])), ValueError),
        "The trees in ω(first) .at[...].set ω(second) must have",
    ),
    (
        *(lambda: [1] ** ω + [1], TypeError),
        "The other operand of ω(...) + must be an array, a number, or ω(tree) with a tree of the "
        "same structure; got a list of length 1.",
    ),
    (
        *(lambda: ω([1], is_leaf=lambda node: node is None) + ω([1]), ValueError),
        "Only one operand of ω(...) + ω(...) has `is_leaf`: pass it to both.",
    ),
    (lambda: list(ω([1])), TypeError, "ω is not iterable: iterate over its tree"),
]


def test_error_explains_the_mistake():
    for mistake, error, message in MISTAKES:
        with pytest.raises(error, match=re.escape(message)):
            mistake()
