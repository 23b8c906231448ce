"""The number of traces for each kind of argument."""

import functools
import inspect

import equinox
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
import pytest

from eqxlike import Module, filter_jit, filter_value_and_grad, is_array
from tests.transforms.jit.models import Affine


class Traced:
    """A filtered function that counts its traces."""

    def __init__(self, function, jit=filter_jit, **options):
        self.count = 0

        @functools.wraps(function)
        def counting(*args, **kwargs):
            self.count += 1
            return function(*args, **kwargs)

        # `functools.wraps` does not guarantee the signature, so it is set explicitly.
        counting.__signature__ = inspect.signature(function)
        self.jitted = jit(counting, **options)

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


def test_equal_trees_and_new_values_share_a_trace():
    for make in MODELS.values():
        tree = make()
        other = jtu.tree_map(lambda leaf: leaf + 1 if is_array(leaf) else leaf, tree)
        assert count_traces(tree, tree, make(), other, tree) == 1


def test_new_shape_weak_type_or_kind_of_key_is_one_more_trace():
    weak, strong = jnp.asarray(1.0), jnp.asarray(1.0, jnp.float32)
    keys = [jax.random.key(0, impl=impl) for impl in ("threefry2x32", "rbg")]
    for first, second in ((jnp.ones(2), jnp.ones(3)), (weak, strong), keys):
        assert count_traces(*map(Affine, (first, second, first))) == 2


def test_equal_static_values_of_different_types_have_different_traces():
    for jit, count in ((filter_jit, 3), (equinox.filter_jit, 1)):
        traced = Traced(lambda static: None, jit)
        for static in (1, 1.0, True, 1):
            traced(static)
        assert traced.count == count


def test_error_of_an_unhashable_static_leaf_names_its_path():
    with pytest.raises(ValueError, match="Non-hashable static arguments"):
        equinox.filter_jit(lambda x: x)({"a": [set()]})
    with pytest.raises(TypeError, match=r"the static part of x\['a'\]\[0\], of type set"):
        filter_jit(lambda x: x)({"a": [set()]})


# --- positional and keyword arguments ---


def weigh(a, b=2, /, c=3, *, d=4, e=None):
    return a * b * c * d


SPELLINGS = {
    "by-place": lambda f, x: f(x, 2, 3, d=4, e=None),
    "defaults": lambda f, x: f(x),
    "some-defaults": lambda f, x: f(x, 2),
    "by-keyword": lambda f, x: f(x, c=3),
    "keywords-in-another-order": lambda f, x: f(x, e=None, d=4, c=3),
}


def test_positional_and_keyword_calls_share_a_trace():
    traced, in_equinox = Traced(weigh), Traced(weigh, equinox.filter_jit)
    x = jnp.arange(2.0)
    for spelling in SPELLINGS.values():
        for each in (traced, in_equinox):
            assert jnp.array_equal(spelling(each, x), 24 * x)
    assert traced.count == 1 < in_equinox.count
    traced = Traced(lambda x, *rest, scale=1, **named: x * scale)
    traced(x, 1, 2, a=3, b=4)
    traced(x, 1, 2, b=4, scale=1, a=3)
    assert traced.count == 1


def test_positional_and_keyword_calls_of_a_wrapped_function_share_a_trace():
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


def test_array_or_unhashable_default_is_not_passed_as_an_argument():
    two = np.int32(2)
    traced = Traced(lambda x, y=two, z=3: x[:y] * z)
    for call in (lambda: traced(jnp.ones(4)), lambda: traced(jnp.ones(4), z=3)):
        assert call().shape == (2,)
    assert traced.count == 1
    default = []
    traced = Traced(lambda x, y=default: x if y is default else 2 * x)
    assert traced(jnp.ones(())) == 1


def test_returned_model_passed_again_shares_the_trace():
    traced = Traced(
        lambda model: jtu.tree_map(lambda w: 0.9 * w if is_array(w) else w, model), donate="all"
    )
    model = Affine([jnp.ones(2), {"a": jnp.ones(3)}], "b")
    for _ in range(4):
        model = traced(model)
    assert traced.count == 1
