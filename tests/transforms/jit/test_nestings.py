"""Whatever a function is wrapped in, and in whatever order, a jitted call is of that nesting.

A nesting is a chain of wrappers, innermost first, and a number that some of them bind. Several
nestings of the same functions are called in turn, since what is compiled for one of them must not
serve another, and compared with what raw JAX computes without compilation.
"""

import itertools

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st

from eqxlike import filter_jit
from tests.examples import at_most
from tests.transforms.jit.nestings import NAMES, OURS, PLAIN, Wrappers

X = np.arange(4.0, dtype=np.float32).reshape(2, 2) / 4


def assert_told_apart(nestings):
    ours, plain = Wrappers(OURS), Wrappers(PLAIN)
    expected = [plain.build(*nesting)(X) for nesting in nestings]
    built = [ours.build(*nesting) for nesting in nestings]
    jitted = [filter_jit(function) for function in built]
    # Twice the same wrapper, then a new one.
    for calls in (jitted, jitted, map(filter_jit, built)):
        for nesting, call, desired in zip(nestings, calls, expected, strict=True):
            np.testing.assert_allclose(call(X), desired, rtol=1e-5, err_msg=str(nesting))


def can_be_called(chain):
    return sum("vmap" in name for name in chain) <= X.ndim


@st.composite
def nestings(draw):
    """Some orders of the same wrappers, each with a number to bind."""
    wrappers = st.lists(st.sampled_from(NAMES), min_size=2, max_size=4)
    orders = st.permutations(draw(wrappers.filter(can_be_called))).map(tuple)
    return draw(st.lists(st.tuples(orders, st.sampled_from([2, 3])), min_size=2, max_size=4))


PAIRS = [*itertools.combinations_with_replacement(NAMES, 2)]


@pytest.mark.parametrize("pair", PAIRS, ids="-in-".join)
def test_either_order_of_two_wrappers_is_its_own_function(pair):
    # The long way and the fast path are walked all the same, and nothing waits for a compiler.
    with jax.disable_jit():
        assert_told_apart([(pair, 2), (pair[::-1], 2), (pair, 3)])


@at_most(50)
@hypothesis.given(nestings())
def test_each_nesting_is_its_own_function_where_nothing_is_compiled(nestings):
    with jax.disable_jit():
        assert_told_apart(nestings)


@at_most(15)
@hypothesis.given(nestings())
def test_each_nesting_is_its_own_function(nestings):
    assert_told_apart(nestings)
