"""Warm calls, for each sort of argument beside an array."""

import collections
import functools

import jax
import jax.numpy as jnp
import pytest

from eqxlike import Module, filter_jit


class Pair(Module):
    left: object
    right: object = None


class Opaque:
    """Mutable, and hashes by identity: never cached."""

    def __init__(self):
        self.value = 2


X = jnp.arange(3.0)

ARGUMENTS = {
    "array": X,
    "module": Pair(X, X),
    "module-with-list": Pair([X, 1], X),
    "module-with-dict": Pair({"b": X, "a": 2.5}),
    "module-with-foreign-node": Pair(collections.OrderedDict(a=X)),
    "module-with-opaque-leaf": Pair(X, Opaque()),
    "module-with-partial": Pair(X, functools.partial(max, 1)),
    "module-with-zero": Pair([X], 0.0),
    "foreign-node": collections.OrderedDict(a=X, b=X),
    "jax-partial": jax.tree_util.Partial(jnp.add, X),
    "tuple": (X, "text", None),
    "empty": (),
    "list-of-modules": [Pair(X), Pair(X, X)],
    "dict-with-int-keys": {1: X, 2: X},
    "string": "text",
}


@pytest.mark.parametrize("arrays_first", [True, False], ids=["array-first", "array-last"])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_warm_call_gives_what_the_first_gives(name, arrays_first):
    @filter_jit
    def total(*args):
        return sum(leaf.sum() for leaf in jax.tree_util.tree_leaves(args) if hasattr(leaf, "sum"))

    args = (X, ARGUMENTS[name]) if arrays_first else (ARGUMENTS[name], X)
    first = total(*args)
    assert [total(*args) == first for _ in range(3)] == [True] * 3
