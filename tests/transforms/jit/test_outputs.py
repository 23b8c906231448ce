"""The outputs of a function of `filter_jit`."""

import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from eqxlike import filter_jit, is_array
from tests.transforms.jit.models import Affine, X, calls_of, double, equal

OUTCOMES = {
    "array": lambda x: x + 1,
    "nothing": lambda x: None,
    "static": lambda x: "text",
    "tuple": lambda x: (x, "text", None),
    "dict": lambda x: {"a": x, "b": 1.5},
    "module": lambda x: Affine(x, "b"),
    "class": lambda x: Affine,
    "function": lambda x: (double, x),
    "numpy": lambda x: np.ones(2, np.float32),
    "method": lambda x: Affine(x).apply,
}


def is_same(first, second):
    if type(first) is type(second) is float:
        # A float may be an equal object: that of a structure which is alive, from any other test.
        return first == second
    return equal(first, second) if is_array(first) else first is second


def test_output_equals_the_output_of_the_plain_function():
    x = jnp.asarray(X)
    for function in OUTCOMES.values():
        expected, jitted = function(x), filter_jit(function)
        for _ in range(3):
            output = jitted(x)
            assert jtu.tree_structure(output) == jtu.tree_structure(expected)
            assert all(map(is_same, jtu.tree_leaves(output), jtu.tree_leaves(expected)))
    assert filter_jit(lambda x: (x, {1, 2}))(X)[1] == {1, 2}  # It is not hashable.


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
