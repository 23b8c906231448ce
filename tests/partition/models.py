"""Modules and random trees for tests of partitions."""

import collections

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from hypothesis import strategies as st

from eqxlike import Module, field, is_array
from eqxlike._partition import flatten


class Pair(Module):
    left: object
    right: object = None
    mode: object = field(static=True, default="a")


class Mixed(Module):
    """Static fields before, between and after dynamic fields."""

    first: object = field(static=True)
    left: object
    second: object = field(static=True)
    right: object
    third: object = field(static=True)


class Empty(Module):
    pass


Point = collections.namedtuple("Point", ["x", "y"])
Nothing = collections.namedtuple("Nothing", [])


def flatten_cached(module):
    """Flattens a module, which caches its partition, and returns the module."""
    flatten(module)
    return module


def structure_of(tree):
    return flatten(tree)[1]


def arrays_of(tree):
    return [id(leaf) for leaf in jtu.tree_leaves(tree) if is_array(leaf)]


leaves = st.one_of(
    st.sampled_from([jnp.ones(2), jnp.zeros((0, 3)), jnp.arange(3), jax.random.key(0)]),
    st.sampled_from([np.ones(2), np.float32(1), np.zeros((), bool)]),
    st.sampled_from([0, 1, 1.0, -0.0, float("nan"), True, "a", b"a", None, ..., jnp.sin, Point]),
    st.sampled_from([(), Nothing(), Empty()]),
)
statics = st.sampled_from(["a", 1, 1.0, None, (1, "b")])
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from(["c", "b", "a"]), inner, max_size=3),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3).map(collections.OrderedDict),
        st.builds(Point, inner, inner),
        st.builds(Pair, inner, inner, mode=statics),
        st.builds(Mixed, statics, inner, statics, inner, statics),
    ),
    max_leaves=8,
)
