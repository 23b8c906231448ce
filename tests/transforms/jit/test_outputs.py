"""The outputs of a function of `filter_jit`."""

import operator

import jax.numpy as jnp

from eqxlike import filter_jit
from tests.transforms.jit.models import Affine, X, calls_of, double, equal


def test_static_leaves_of_the_output_are_the_same_objects():
    method = Affine(jnp.asarray(X)).apply
    static = (Affine, double, "text", None, method.__func__)
    jitted = filter_jit(lambda x: (*static, Affine(x, static), {"a": (x, method)}, {1, 2}))
    for _ in range(3):
        *same, module, tree, unhashable = jitted(jnp.asarray(X))
        assert all(map(operator.is_, same, static))
        assert all(map(operator.is_, module.shift, static))
        assert type(module) is Affine
        assert equal(module.scale, tree["a"][0])
        assert equal(tree["a"][1](X), X * X)
        assert unhashable == {1, 2}


def test_static_output_may_depend_on_the_shape():
    jitted = filter_jit(lambda x: (x, f"{x.shape}", [x] * x.shape[0]))
    for size in (1, 2, 3, 1, 2, 3):
        _, text, copies = jitted(jnp.ones(size))
        assert (text, len(copies)) == (f"({size},)", size)


def test_call_does_not_wait_for_its_result():
    jitted = filter_jit(lambda x: Affine(x + 1))
    names = [name for _ in range(3) for _, name in calls_of(jitted, X)]
    assert names
    assert not [name for name in names if "block_until_ready" in name or name == "__array__"]


def test_warm_call_of_a_method_of_an_object_takes_the_fast_path(monkeypatch):
    monkeypatch.setattr("eqxlike._partition._flatten._depth", 0)

    class Plain:
        def loss(self, x):
            return 2 * x

    jitted = filter_jit(Plain().loss)
    jitted(X)
    assert "find" not in [name for _, name in calls_of(jitted, X)]
