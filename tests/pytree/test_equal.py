"""Where a test takes `eqx`, the same program holds on Equinox, whose behaviour is the measure."""

import inspect
import math
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
from eqxlike import tree_equal
from tests.beside_equinox import both


class Pair(eqxlike.Module):
    first: Any
    second: Any
    name: str = eqxlike.field(static=True, default="pair")


TREES = st.recursive(
    st.integers(0, 2) | st.booleans() | st.sampled_from([0.0, 1.0, "a", None]),
    lambda trees: (
        st.lists(trees, max_size=2)
        | st.lists(trees, max_size=2).map(tuple)
        | st.dictionaries(st.sampled_from("ab"), trees)
        | st.builds(Pair, trees, trees, st.sampled_from("ab"))
    ),
    max_leaves=6,
)
SAMPLES = {
    "int": 1,
    "other int": 2,
    "bool": True,
    "float": 1.0,
    "nan": math.nan,
    "str": "a",
    "None": None,
    "list": [1],
    "tuple": (1,),
    "dict": {"a": 1},
    "other dict": {"b": 1},
    "function": jnp.sin,
    "jax": jnp.ones(2),
    "jax unequal": jnp.array([1.0, 2.0]),
    "jax longer": jnp.ones(3),
    "jax column": jnp.ones((2, 1)),
    "jax int": jnp.ones(2, jnp.int32),
    "jax scalar": jnp.ones(()),
    "jax weak scalar": jnp.array(1.0),
    "jax nan": jnp.array(math.nan),
    "jax empty": jnp.ones(0),
    "jax bfloat16": jnp.ones(2, jnp.bfloat16),
    "key": jax.random.key(0),
    "other key": jax.random.key(1),
    "numpy": np.ones(2, np.float32),
    "numpy double": np.ones(2),
    "numpy scalar": np.float32(1),
    "numpy array scalar": np.ones((), np.float32),
    "numpy text": np.array("a"),
    "struct": jax.ShapeDtypeStruct((2,), jnp.float32),
}


def test_has_the_parameters_of_equinox():
    def parameters(library):
        signature = inspect.signature(library.tree_equal)
        return [(p.name, p.kind, p.default) for p in signature.parameters.values()]

    assert parameters(eqxlike) == parameters(equinox)


@pytest.mark.parametrize("typematch", [False, True])
@pytest.mark.parametrize("name", SAMPLES)
def test_agrees_with_equinox_on_every_pair_with(name, typematch):
    def answers(eqx):
        return {
            other: bool(eqx.tree_equal(SAMPLES[name], sample, typematch=typematch))
            for other, sample in SAMPLES.items()
        }

    assert answers(eqxlike) == answers(equinox)


@given(TREES, TREES, st.booleans())
def test_agrees_with_equinox_on_random_trees(one, other, typematch):
    answers = [bool(eqx.tree_equal(one, other, typematch=typematch)) for eqx in (eqxlike, equinox)]
    assert answers[0] is answers[1]


@given(TREES, st.booleans())
def test_is_reflexive(tree, typematch):
    rebuilt = jtu.tree_map(lambda leaf: leaf, tree)
    assert tree_equal(tree, rebuilt, typematch=typematch) is True


@given(TREES, TREES, st.booleans())
def test_is_symmetric(one, other, typematch):
    forth = tree_equal(one, other, typematch=typematch)
    assert forth == tree_equal(other, one, typematch=typematch)


@given(TREES, TREES, TREES)
def test_of_three_is_equality_with_the_first(one, two, three):
    assert tree_equal(one, two, three) == (tree_equal(one, two) and tree_equal(one, three))


@given(TREES, TREES)
def test_typematch_is_stricter(one, other):
    assert not tree_equal(one, other, typematch=True) or tree_equal(one, other)


@both
def test_one_tree_is_equal_to_itself(eqx):
    assert eqx.tree_equal([1, 2])


@both
def test_a_difference_in_the_last_of_several_trees_counts(eqx):
    assert not eqx.tree_equal([1], [1], [2])


@both
@pytest.mark.parametrize("other", ["b", "subclass"])
def test_modules_of_other_static_fields_or_class_differ(eqx, other):
    class Model(eqx.Module):
        name: str = eqx.field(static=True)

    class Sub(Model):
        pass

    assert not eqx.tree_equal(Model("a"), Sub("a") if other == "subclass" else Model(other))


# --- tolerances ---------------------------------------------------------------------------------

CLOSE = {
    "Python floats are compared exactly": (1.0, 1.1, {"atol": 0.2}, False),
    "atol": (jnp.array(1.0), jnp.array(1.1), {"atol": 0.2}, True),
    "atol too small": (jnp.array(1.0), jnp.array(1.1), {"atol": 0.05}, False),
    "rtol": (jnp.array(1.0), jnp.array(1.1), {"rtol": 0.2}, True),
    "rtol too small": (jnp.array(1.0), jnp.array(1.1), {"rtol": 0.02}, False),
    "rtol is of the second": (jnp.array(1.0), jnp.array(2.0), {"rtol": 0.6}, True),
    "rtol is not of the first": (jnp.array(2.0), jnp.array(1.0), {"rtol": 0.6}, False),
    "both": (jnp.array(1.0), jnp.array(2.0), {"rtol": 0.3, "atol": 0.5}, True),
    "NumPy": (np.array(1.0), np.array(1.1), {"rtol": 0.2}, True),
    "NumPy scalar": (np.float32(1.0), np.float32(1.1), {"atol": 0.2}, True),
    "NumPy against JAX": (np.array(1, np.float32), jnp.array(1.1), {"atol": 0.2}, True),
    "another dtype": (np.array(1.0), jnp.array(1.1), {"atol": 0.2}, False),
    "another shape": (jnp.ones(1), jnp.ones(()), {"atol": 0.2}, False),
    "integers": (jnp.array(1), jnp.array(2), {"atol": 2.0}, False),
    "booleans": (jnp.array(True), jnp.array(False), {"atol": 2.0}, False),
    "complex": (jnp.array(1 + 1j), jnp.array(1 + 1.1j), {"atol": 0.2}, True),
    "bfloat16": (jnp.ones(2, jnp.bfloat16), jnp.full(2, 1.1, jnp.bfloat16), {"atol": 0.2}, True),
    "nan": (jnp.array(math.nan), jnp.array(math.nan), {"atol": 0.2}, False),
    "infinity": (jnp.array(math.inf), jnp.array(math.inf), {"atol": 0.2}, True),
    "opposite infinities": (jnp.array(math.inf), jnp.array(-math.inf), {"rtol": 0.2}, False),
    "a JAX tolerance": (jnp.array(1.0), jnp.array(1.1), {"atol": jnp.array(0.2)}, True),
    "a NumPy tolerance": (jnp.array(1.0), jnp.array(1.1), {"atol": np.float32(0.2)}, True),
    "an integer tolerance": (jnp.array(1.0), jnp.array(1.5), {"atol": 1}, True),
    "a zero JAX tolerance": (jnp.array(1.0), jnp.array(1.1), {"atol": jnp.array(0.0)}, False),
}


@both
@pytest.mark.parametrize("case", CLOSE)
def test_tolerance(eqx, case):
    one, other, tolerance, is_close = CLOSE[case]
    assert bool(eqx.tree_equal(one, other, **tolerance)) is is_close


# --- under transformations ----------------------------------------------------------------------


@both
@pytest.mark.parametrize("other", [1.0, 2.0])
def test_of_traced_leaves_is_traced(eqx, other):
    kinds = []

    @jax.jit
    def same(one, other):
        answer = eqx.tree_equal([one, "a"], [other, "a"])
        kinds.append(isinstance(answer, jax.core.Tracer))
        return answer

    assert bool(same(1.0, other)) is (other == 1.0)
    assert kinds == [True]


@both
def test_a_static_difference_is_known_while_tracing(eqx):
    answers = []
    jax.jit(lambda x: answers.append(eqx.tree_equal((x, 1), (x, 2))))(1.0)
    assert answers == [False]


@both
def test_a_difference_in_shape_is_known_while_tracing(eqx):
    answers = []
    jax.jit(lambda x: answers.append(eqx.tree_equal(x, x[:1])))(jnp.ones(2))
    assert answers == [False]


@both
def test_traced_leaves_may_be_close(eqx):
    same = jax.jit(lambda one, other, atol: eqx.tree_equal(one, other, atol=atol))
    close = [bool(same(jnp.ones(2), jnp.full(2, 1.1), atol)) for atol in (0.2, 0.05)]
    assert close == [True, False]


def test_a_tracer_has_the_type_of_a_jax_array():
    def same(other):
        return bool(jax.jit(lambda x: tree_equal(x, other, typematch=True))(jnp.ones(2)))

    assert (same(jnp.ones(2)), same(np.ones(2, np.float32))) == (True, False)


@both
def test_maps_over_a_batch(eqx):
    same = jax.vmap(eqx.tree_equal)(jnp.arange(3), jnp.array([0, 5, 2]))
    assert same.tolist() == [True, False, True]


def test_of_concrete_trees_is_a_bool():
    kinds = [type(tree_equal(x, x)) for x in (1, np.ones(2), jnp.ones(2), Pair(1, jnp.ones(2)))]
    assert kinds == [bool] * 4


# --- kinds of leaves under transformations --------------------------------------------------------

KEYS = jax.random.split(jax.random.key(0), 2)

TRACED = {
    "keys": (KEYS, KEYS[::-1]),
    "integers": (jnp.arange(2), jnp.array([0, 5])),
    "booleans": (jnp.array([True, False]), jnp.array([True, True])),
    "bfloat16": (jnp.ones(2, jnp.bfloat16), jnp.array([1, 2], jnp.bfloat16)),
    "NaN": (jnp.array([1.0, math.nan]), jnp.array([1.0, math.nan])),
}


@both
@pytest.mark.parametrize("kind", TRACED)
def test_compares_what_is_traced(eqx, kind):
    one, other = TRACED[kind]
    same = jax.jit(lambda one, other: (eqx.tree_equal(one, one), eqx.tree_equal(one, other)))
    assert [bool(answer) for answer in same(one, other)] == [kind != "NaN", False]


@both
@pytest.mark.parametrize("kind", TRACED)
def test_maps_over_a_batch_of(eqx, kind):
    one, other = TRACED[kind]
    expected = [bool(eqx.tree_equal(a, b)) for a, b in zip(one, other, strict=True)]
    assert jax.vmap(eqx.tree_equal)(one, other).tolist() == expected


@both
def test_traced_leaves_of_several_trees_all_count(eqx):
    same = jax.jit(lambda x, y: eqx.tree_equal([x, "a"], [x, "a"], [y, "a"]))
    assert [bool(same(1, other)) for other in (1, 2)] == [True, False]


@both
def test_a_traced_answer_is_not_true_while_tracing(eqx):
    answers = []
    jax.jit(lambda x: answers.append(eqx.tree_equal(x, x) is True))(1.0)
    assert answers == [False]


# --- where Equinox answers otherwise --------------------------------------------------------------


def test_of_concrete_arrays_is_a_bool_where_equinox_gives_an_array():
    answers = [eqx.tree_equal(jnp.ones(2), jnp.ones(2)) for eqx in (eqxlike, equinox)]
    assert [isinstance(answer, bool) for answer in answers] == [True, False]
    assert [bool(answer) for answer in answers] == [True, True]


def test_a_tracer_has_the_type_of_a_jax_array_and_on_equinox_another():
    concrete = jnp.ones(2)
    answers = [
        bool(jax.jit(lambda x, eqx=eqx: eqx.tree_equal(x, concrete, typematch=True))(concrete))
        for eqx in (eqxlike, equinox)
    ]
    assert answers == [True, False]


def test_no_trees_are_equal():
    assert tree_equal() is True
    with pytest.raises(IndexError):
        equinox.tree_equal()
