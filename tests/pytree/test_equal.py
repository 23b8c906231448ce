"""`tree_equal`. A test with the parameter `eqx` runs on Equinox and eqxlike, which must agree."""

import itertools
import math

import equinox
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import eqxlike
from eqxlike import tree_equal
from tests.beside_equinox import both
from tests.pytree.trees import Pair, trees_of

LIBRARIES = (eqxlike, equinox)
TREES = trees_of(st.sampled_from([0, 1, 2, False, True, 0.0, 1.0, "a", None]), max_leaves=6)
SAMPLES = [
    *(1, True, 1.0, None, [1], np.ones(2, np.float32), np.ones(2), np.float32(1)),
    *(jnp.ones(2), jnp.array([1.0, 2.0]), jnp.ones((2, 1)), jnp.ones(2, jnp.int32), jnp.ones(())),
    *(jnp.array(1.0), jnp.array(math.nan), jax.random.key(0), jax.random.key(1)),
    jax.ShapeDtypeStruct((2,), jnp.float32),
]


@pytest.mark.parametrize("typematch", [False, True])
def test_equality_agrees_with_equinox_on_every_pair(typematch):
    for one, other in itertools.product(SAMPLES, repeat=2):
        ours, theirs = (eqx.tree_equal(one, other, typematch=typematch) for eqx in LIBRARIES)
        assert bool(ours) == bool(theirs), (one, other)


@given(TREES, TREES, TREES, st.booleans())
def test_equality_is_reflexive_symmetric_and_agrees_with_equinox(one, other, third, typematch):
    rebuilt = jtu.tree_map(lambda leaf: leaf, one)
    assert tree_equal(one, rebuilt, typematch=typematch) is True
    forth = tree_equal(one, other, typematch=typematch)
    assert forth is tree_equal(other, one, typematch=typematch)
    assert forth is bool(equinox.tree_equal(one, other, typematch=typematch))
    assert tree_equal(one, other, third) == (tree_equal(one, other) and tree_equal(one, third))


CLOSE = {
    "Python floats are compared exactly": (1.0, 1.1, {"atol": 0.2}, False),
    "atol": (jnp.array(1.0), jnp.array(1.1), {"atol": 0.2}, True),
    "rtol is of the second": (jnp.array(1.0), jnp.array(2.0), {"rtol": 0.6}, True),
    "rtol is not of the first": (jnp.array(2.0), jnp.array(1.0), {"rtol": 0.6}, False),
    "both": (jnp.array(1.0), jnp.array(2.0), {"rtol": 0.3, "atol": 0.5}, True),
    "NumPy": (np.array(1.0), np.array(1.1), {"rtol": 0.2}, True),
    "NumPy against JAX": (np.array(1, np.float32), jnp.array(1.1), {"atol": 0.2}, True),
    "JAX against NumPy": (jnp.array(1.1), np.array(1, np.float32), {"atol": 0.2}, True),
    "another dtype": (np.array(1.0), jnp.array(1.1), {"atol": 0.2}, False),
    "another shape": (jnp.ones(1), jnp.ones(()), {"atol": 0.2}, False),
    "integers": (jnp.array(1), jnp.array(2), {"atol": 2.0}, False),
    "bfloat16": (jnp.ones(2, jnp.bfloat16), jnp.full(2, 1.1, jnp.bfloat16), {"atol": 0.2}, True),
    "nan": (jnp.array(math.nan), jnp.array(math.nan), {"atol": 0.2}, False),
    "a JAX tolerance": (jnp.array(1.0), jnp.array(1.1), {"atol": jnp.array(0.2)}, True),
    "an integer tolerance": (jnp.array(1.0), jnp.array(1.5), {"atol": 1}, True),
    "a zero JAX tolerance": (jnp.array(1.0), jnp.array(1.1), {"atol": jnp.array(0.0)}, False),
}


@both
def test_tolerance_is_as_in_allclose(eqx):
    answers = {
        case: bool(eqx.tree_equal(one, other, **tolerance))
        for case, (one, other, tolerance, _) in CLOSE.items()
    }
    assert answers == {case: is_close for case, (*_, is_close) in CLOSE.items()}


# --- under transformations ----------------------------------------------------------------------


@both
def test_answer_is_traced_if_it_depends_on_tracers(eqx):
    kinds = []

    @jax.jit
    def same(one, other, atol):
        answers = [
            eqx.tree_equal([one, "a"], [other, "a"]),
            eqx.tree_equal([one, "a"], [one, "a"], [other, "a"]),
            eqx.tree_equal(one, other, atol=atol),
        ]
        known = [eqx.tree_equal((one, 1), (one, 2)), eqx.tree_equal(one, one[:1])]
        kinds.append([isinstance(each, jax.core.Tracer) for each in answers])
        kinds.append(known)
        return answers

    answers = [
        [bool(each) for each in same(jnp.ones(2), jnp.full(2, other), atol)]
        for other, atol in ((1.0, 0.0), (1.1, 0.2), (1.1, 0.05))
    ]
    assert answers == [[True, True, True], [False, False, True], [False, False, False]]
    assert kinds == [[True] * 3, [False, False]]


KEYS = jax.random.split(jax.random.key(0), 2)
TRACED = {
    "keys": (KEYS, KEYS[::-1]),
    "integers": (jnp.arange(2), jnp.array([0, 5])),
    "NaN": (jnp.array([1.0, math.nan]), jnp.array([1.0, math.nan])),
}


@both
def test_equality_of_traced_leaves_of_every_kind_and_under_vmap(eqx):
    @jax.jit
    def same(traced):
        return {
            kind: (
                eqx.tree_equal(one, one),
                eqx.tree_equal(one, other),
                jax.vmap(eqx.tree_equal)(one, other),
            )
            for kind, (one, other) in traced.items()
        }

    for kind, (is_self, is_other, of_batch) in same(TRACED).items():
        assert (bool(is_self), bool(is_other)) == (kind != "NaN", False)
        expected = [bool(eqx.tree_equal(a, b)) for a, b in zip(*TRACED[kind], strict=True)]
        assert of_batch.tolist() == expected


# --- differences from Equinox --------------------------------------------------------------------


def test_answer_for_concrete_arrays_is_a_bool_and_an_array_on_equinox():
    answers = [eqx.tree_equal(jnp.ones(2), jnp.ones(2)) for eqx in LIBRARIES]
    assert [isinstance(answer, bool) for answer in answers] == [True, False]
    assert [bool(answer) for answer in answers] == [True, True]
    kinds = [type(tree_equal(x, x)) for x in (1, np.ones(2), Pair(1, jnp.ones(2)))]
    assert kinds == [bool] * 3


def test_tracer_counts_as_a_jax_array_but_not_on_equinox():
    concrete = jnp.ones(2)

    def same(eqx, other):
        function = jax.jit(lambda x: eqx.tree_equal(x, other, typematch=True))
        return bool(function(concrete))

    assert (same(eqxlike, concrete), same(equinox, concrete)) == (True, False)
    assert same(eqxlike, np.ones(2, np.float32)) is False


def test_equality_without_trees_is_true():
    assert tree_equal() is True
    with pytest.raises(IndexError):
        equinox.tree_equal()
