"""How often a function is traced: counted, for each kind of argument."""

import copy
import functools
import inspect

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax

from eqxlike import (
    Module,
    filter_jit,
    filter_value_and_grad,
    is_array,
)
from tests.transforms.jit.models import Affine


class Traced:
    """A filtered function, and how often it was traced."""

    def __init__(self, function, **options):
        self.count = 0

        @functools.wraps(function)
        def counting(*args, **kwargs):
            self.count += 1
            return function(*args, **kwargs)

        # Said outright: `functools.wraps` alone tells nothing of how a decorator may be called.
        counting.__signature__ = inspect.signature(function)
        self.jitted = filter_jit(counting, **options)

    def __call__(self, *args, **kwargs):
        return self.jitted(*args, **kwargs)


def count_traces(*trees):
    traced = Traced(lambda tree: [leaf for leaf in jtu.tree_leaves(tree) if is_array(leaf)])
    for tree in trees:
        traced(tree)
    return traced.count


MODELS = {
    "array": lambda: jnp.ones(2),
    "nested-module": lambda: Affine(Affine(jnp.ones(2)), (jnp.ones(3), "a")),
    "module-with-list": lambda: Affine([jnp.ones(2)], {"a": jnp.ones(3)}),
    "tuple": lambda: (jnp.ones(2), None, "a", 1.5),
    "optax-state": lambda: optax.adam(1e-3).init(jnp.ones(2)),
}


def test_the_same_an_equal_one_and_new_values_are_one_trace():
    for make in MODELS.values():
        tree = make()
        other = jtu.tree_map(lambda leaf: leaf + 1 if is_array(leaf) else leaf, tree)
        assert count_traces(tree, tree, make(), other, tree) == 1


def test_new_shape_weak_type_or_kind_of_key_is_one_trace_more():
    weak, strong = jnp.asarray(1.0), jnp.asarray(1.0, jnp.float32)
    keys = [jax.random.key(0, impl=impl) for impl in ("threefry2x32", "rbg")]
    for first, second in ((jnp.ones(2), jnp.ones(3)), (weak, strong), keys):
        assert count_traces(*map(Affine, (first, second, first))) == 2


# --- calls that differ only in spelling are one trace ---------------------------------------------


def weigh(a, b=2, /, c=3, *, d=4, e=None):
    return a * b * c * d


SPELLINGS = {
    "by-place": lambda f, x: f(x, 2, 3, d=4, e=None),
    "defaults": lambda f, x: f(x),
    "some-defaults": lambda f, x: f(x, 2),
    "by-keyword": lambda f, x: f(x, c=3),
    "keywords-in-another-order": lambda f, x: f(x, e=None, d=4, c=3),
}


def test_calls_that_differ_only_in_spelling_are_one_trace():
    traced = Traced(weigh)
    x = jnp.arange(2.0)
    for spelling in SPELLINGS.values():
        assert jnp.array_equal(spelling(traced, x), 24 * x)
    assert traced.count == 1


def test_spelling_of_variadic_functions_is_one_trace():
    traced = Traced(lambda x, *rest, scale=1, **named: x * scale)
    x = jnp.ones(2)
    for call in (
        lambda: traced(x, 1, 2, a=3, b=4),
        lambda: traced(x, 1, 2, b=4, a=3),
        lambda: traced(x, 1, 2, scale=1, a=3, b=4),
        lambda: traced(x, 1, 2, b=4, scale=1, a=3),
    ):
        call()
    assert traced.count == 1


def test_spelling_of_a_call_of_what_wraps_a_function_is_one_trace():
    def function(w, x, scale=2):
        traces.append(1)
        return (w * x * scale).sum()

    class Model(Module):
        weight: object

        def __call__(self, x, scale=2):
            return function(self.weight, x, scale)

    w, x = jnp.ones(2), jnp.ones(2)
    partial = functools.partial(function, w)
    transformed = filter_value_and_grad(partial)
    for wrapped in (Model(w), partial, transformed):
        traces, call = [], filter_jit(wrapped)
        call(x)
        call(x, scale=2)
        call(x, 2)
        if wrapped is not transformed:
            call(scale=2, x=x)
        assert len(traces) == 1


def test_default_that_would_be_traced_is_left_to_the_function():
    two = np.int32(2)
    traced = Traced(lambda x, y=two, z=3: x[:y] * z)
    for call in (lambda: traced(jnp.ones(4)), lambda: traced(jnp.ones(4), z=3)):
        assert call().shape == (2,)
    assert traced.count == 1


def test_default_that_is_not_hashable_is_left_to_the_function():
    default = []
    traced = Traced(lambda x, y=default: x if y is default else 2 * x)
    assert traced(jnp.ones(())) == 1


# --- wrappers of one function share its traces, and so do lowering and calling --------------------


def test_wrappers_share_the_trace_of_a_function_unless_their_options_differ():
    count = []

    def function(x):
        count.append(1)
        return 2 * x

    wrapper = filter_jit(function)
    for same in (
        wrapper,
        filter_jit(function),
        copy.copy(wrapper),
        jtu.tree_map(lambda leaf: leaf, wrapper),
    ):
        same(jnp.ones(2))
    assert len(count) == 1
    filter_jit(function, donate="all")(jnp.ones(2))
    assert len(count) == 2


# --- outputs that come back as arguments are one trace --------------------------------------------


def test_returned_model_fed_back_is_one_trace():
    traced = Traced(
        lambda model: jtu.tree_map(lambda w: 0.9 * w if is_array(w) else w, model), donate="all"
    )
    model = Affine([jnp.ones(2), {"a": jnp.ones(3)}], "b")
    for _ in range(4):
        model = traced(model)
    assert traced.count == 1
