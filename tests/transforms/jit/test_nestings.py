"""A jitted call runs the wrappers of its own function, in their order.

A nesting is a chain of wrappers, innermost first, and a number that some wrappers bind. A test
calls several nestings of the same functions in turn, because a program that is compiled for one
nesting must not be used for another. It compares the outputs with JAX without compilation.
"""

import collections
import functools
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from hypothesis import strategies as st

import eqxlike
from eqxlike import filter_jit
from tests.examples import at_most

Library = collections.namedtuple(
    "Library", ["vmap", "jit", "grad", "value_and_grad", "checkpoint", "partial", "base_class"]
)


def unchanged(function):
    return function


OURS = Library(
    eqxlike.filter_vmap,
    eqxlike.filter_jit,
    eqxlike.filter_grad,
    eqxlike.filter_value_and_grad,
    eqxlike.filter_checkpoint,
    eqxlike.Partial,
    eqxlike.Module,
)
# Plain JAX without compilation and without eqxlike.
PLAIN = Library(
    jax.vmap, unchanged, jax.grad, jax.value_and_grad, unchanged, functools.partial, object
)


def make_wrappers(library):
    """Wrappers of functions of an array, by name. A wrapper is called with a function and a number.

    Each call of `make_wrappers` makes new functions, for which nothing is compiled. The functions
    add the rank of their argument, so that different orders of wrappers give different outputs.
    """
    above = lambda inner, x: 2 * inner(x) + x.ndim
    scaled = lambda inner, factor, x: factor * inner(x) - x.ndim
    raised = lambda inner, x, *, power: inner(x) ** power + 3 * x.ndim
    total = lambda inner, x: jnp.sum(inner(x))

    class Model(library.base_class):
        inner: Any
        weight: Any

        def __init__(self, inner, weight):
            self.inner = inner
            self.weight = weight

        def __call__(self, x):
            return self.weight * self.inner(x) + 5 * x.ndim

        def apply(self, x):
            return self.inner(x) - self.weight * x.ndim

        @library.jit
        def jitted(self, x):
            return self.inner(x) + 2 * self.weight * x.ndim

    class Plain:
        def __init__(self, inner):
            self.inner = inner

        def __call__(self, x):
            return self.inner(x) / 2 + x.ndim

        def apply(self, x):
            return self.inner(x) / 4 - x.ndim

    def value_and_grad(inner, number):
        differentiated = library.value_and_grad(functools.partial(total, inner))
        return lambda x: jnp.add(*differentiated(x))

    return {
        "checkpoint": lambda inner, number: library.checkpoint(inner),
        "closure": lambda inner, number: lambda x: 7 * x.ndim - inner(x),
        "grad": lambda inner, number: library.grad(functools.partial(total, inner)),
        "jax_partial": lambda inner, number: jtu.Partial(above, inner),
        "jax_partial_of_array": lambda inner, n: jtu.Partial(scaled, inner, jnp.float32(n)),
        "jit": lambda inner, number: library.jit(inner),
        "jitted_method_of_module": lambda inner, number: Model(inner, number).jitted,
        "method_of_module": lambda inner, number: Model(inner, number).apply,
        "method_of_object": lambda inner, number: Plain(inner).apply,
        "module": lambda inner, number: Model(inner, number),
        "module_of_array": lambda inner, number: Model(inner, jnp.float32(number)),
        "object": lambda inner, number: Plain(inner),
        "our_partial": lambda inner, number: library.partial(above, inner),
        "our_partial_of_static": lambda inner, n: library.partial(raised, inner, power=n),
        "partial": lambda inner, number: functools.partial(above, inner),
        "partial_of_array": lambda inner, n: functools.partial(scaled, inner, jnp.float32(n)),
        "partial_of_static": lambda inner, n: functools.partial(raised, inner, power=n),
        "value_and_grad": value_and_grad,
        "vmap": lambda inner, number: library.vmap(inner),
        "vmap_to_last_axis": lambda inner, number: library.vmap(inner, out_axes=-1),
    }


NAMES = [*make_wrappers(PLAIN)]


def build(library, nestings):
    """The same function in the wrappers of each nesting, innermost first."""
    wrappers, base = make_wrappers(library), lambda x: jnp.sin(x) + x.ndim
    return [
        functools.reduce(lambda built, name: wrappers[name](built, number), chain, base)
        for chain, number in nestings
    ]


X = np.arange(4.0, dtype=np.float32).reshape(2, 2) / 4


def assert_told_apart(nestings):
    expected = [function(X) for function in build(PLAIN, nestings)]
    built = build(OURS, nestings)
    jitted = [filter_jit(function) for function in built]
    # Calls the same jitted functions twice, and then new ones.
    for calls in (jitted, jitted, map(filter_jit, built)):
        for nesting, call, desired in zip(nestings, calls, expected, strict=True):
            np.testing.assert_allclose(call(X), desired, rtol=1e-5, err_msg=str(nesting))


def can_be_called(chain):
    return sum("vmap" in name for name in chain) <= X.ndim


@st.composite
def nestings(draw):
    """Several orders of the same wrappers, each with a number to bind."""
    wrappers = st.lists(st.sampled_from(NAMES), min_size=2, max_size=4)
    orders = st.permutations(draw(wrappers.filter(can_be_called))).map(tuple)
    return draw(st.lists(st.tuples(orders, st.sampled_from([2, 3])), min_size=2, max_size=4))


def test_two_wrappers_in_either_order_are_different_functions():
    # Without compilation the test is fast, and still covers the slow and the fast path.
    with jax.disable_jit():
        for pair in zip(NAMES[::2], NAMES[1::2], strict=True):
            assert_told_apart([(pair, 2), (pair[::-1], 2), (pair, 3)])


@at_most(4)
@hypothesis.given(nestings())
def test_different_nestings_are_different_functions(nestings):
    assert_told_apart(nestings)
