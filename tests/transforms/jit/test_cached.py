"""A cached call gives what the plain function gives, whatever was done to the tree."""

import collections
import copy
import dataclasses
import functools
import pickle

import hypothesis
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from hypothesis import strategies as st

from eqxlike import Module, field, filter_jit, is_array, tree_at
from tests.examples import at_most
from tests.transforms.jit.values import Colour, Config, Pair, Point, Rank, describe


class OtherPair(Module):
    left: object
    right: object = None
    mode: object = field(static=True, default="a")


ARRAYS = [
    jnp.ones(2),
    jnp.arange(3),
    jnp.zeros((0, 2)),
    jnp.asarray(1.0),
    jnp.array(True),
    np.arange(2.0),
    np.float32(3),
    np.ones((1, 2), np.int32),
    jax.random.key(0),
]
STATICS = [
    *(0, 1, 1.0, True, False, 0.0, -0.0, float("nan"), 1j, None, ..., "a", "", b"a"),
    *(Colour.RED, Colour.GREEN, Rank.FIRST, len, max, Point, Config(1), Config(1.0)),
]
FIELDS = ["a", "b", 1, 1.0, True, None, (1, "a"), Colour.RED, len]
leaves = st.sampled_from(ARRAYS) | st.sampled_from(STATICS)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=2),
        st.builds(Point, inner, inner),
        st.builds(Pair, inner, inner, mode=st.sampled_from(FIELDS)),
        st.builds(OtherPair, inner, inner, mode=st.sampled_from(FIELDS)),
    ),
    max_leaves=6,
)
modules = st.builds(Pair, trees, trees, mode=st.sampled_from(FIELDS))


def replace_leaf(tree, data):
    paths = [path for path, _ in jtu.tree_leaves_with_path(tree)]
    if not paths:
        return tree
    path = data.draw(st.sampled_from(paths))

    def where(node):
        for key in path:
            if isinstance(key, jtu.GetAttrKey):
                node = getattr(node, key.name)
            else:
                node = node[key.key if isinstance(key, jtu.DictKey) else key.idx]
        return node

    return tree_at(where, tree, data.draw(leaves))


def shuffle_leaves(tree, data):
    found, treedef = jtu.tree_flatten(tree)
    return treedef.unflatten(data.draw(st.permutations(found)))


def edit_in_place(tree, data):
    """Changes a list or dict somewhere inside, where there is one."""
    nodes = []
    jtu.tree_map(lambda _: None, tree, is_leaf=lambda node: nodes.append(node))
    containers = [node for node in nodes if isinstance(node, list | dict) and node]
    if containers:
        container = data.draw(st.sampled_from(containers))
        container[next(iter(container)) if isinstance(container, dict) else 0] = data.draw(leaves)
    return tree


EDITS = {
    "nothing": lambda tree, data: tree,
    "tree_at": replace_leaf,
    "replace": lambda tree, data: dataclasses.replace(tree, left=data.draw(leaves)),
    "replace-static": lambda tree, data: dataclasses.replace(
        tree, mode=data.draw(st.sampled_from(FIELDS))
    ),
    "copy": lambda tree, data: copy.copy(tree),
    "deepcopy": lambda tree, data: copy.deepcopy(tree),
    "pickle": lambda tree, data: pickle.loads(pickle.dumps(tree)),
    "unflatten": shuffle_leaves,
    "tree_map": lambda tree, data: jtu.tree_map(
        lambda leaf: jnp.stack([leaf, leaf]) if is_array(leaf) else leaf, tree
    ),
    "tree_map-statics": lambda tree, data: jtu.tree_map(
        lambda leaf: leaf if is_array(leaf) else "b", tree
    ),
    "in-place": edit_in_place,
}


def summarise(tree):
    """The tree with its arrays computed on, and a text of all that was static in it."""
    found, treedef = jtu.tree_flatten(tree)
    statics = [describe(leaf) for leaf in found if not is_array(leaf)]
    computed = [jnp.asarray(leaf)[None] if is_array(leaf) else leaf for leaf in found]
    return treedef.unflatten(computed), statics, repr(treedef), tree.mode


def assert_same(output, expected):
    assert jtu.tree_structure(output) == jtu.tree_structure(expected)
    for ours, plain in zip(jtu.tree_leaves(output), jtu.tree_leaves(expected), strict=True):
        if is_array(plain):
            assert ours.dtype == plain.dtype
            assert ours.shape == plain.shape
            if jnp.issubdtype(plain.dtype, jax.dtypes.prng_key):
                ours, plain = map(jax.random.key_data, (ours, plain))
            np.testing.assert_array_equal(ours, plain)
        else:
            assert describe(ours) == describe(plain)
            # Numbers and text are the same whatever their identity.
            assert isinstance(plain, int | float | complex | str | bytes | Config) or ours is plain


@at_most(15, suppress_health_check=[hypothesis.HealthCheck.too_slow])
@hypothesis.given(modules, st.lists(st.sampled_from(sorted(EDITS)), max_size=4), st.data())
def test_cached_equals_uncached_through_edits(tree, edits, data):
    jitted = filter_jit(summarise)
    assert_same(jitted(tree), summarise(tree))
    for name in edits:
        edited = EDITS[name](tree, data)
        for _ in range(2):  # The long way, or warm; and warm.
            assert_same(jitted(edited), summarise(edited))
        assert_same(jitted(tree), summarise(tree))
        tree = edited


@at_most(8)
@hypothesis.given(trees)
def test_returned_tree_passed_again_is_what_it_says(tree):
    identity = filter_jit(lambda tree: tree)
    once = identity(identity(Pair(tree)))
    assert_same(filter_jit(summarise)(once), summarise(once))


# --- warm calls, for each sort of argument beside an array ----------------------------------------


class Opaque:
    """Mutable, and hashes by identity: never cached."""

    def __init__(self):
        self.value = 2


X = jnp.arange(3.0)

ARGUMENTS = {
    "module": Pair(X, X),
    "module-with-dict": Pair({"b": X, "a": 2.5}),
    "module-with-foreign-node": Pair(collections.OrderedDict(a=X)),
    "module-with-opaque-leaf": Pair(X, Opaque()),
    "module-with-partial": Pair(X, functools.partial(max, 1)),
    "jax-partial": jax.tree_util.Partial(jnp.add, X),
    "empty": (),
    "dict-with-int-keys": {1: X, 2: X},
}


def test_warm_call_gives_what_the_first_gives():
    @filter_jit
    def total(*args):
        return sum(leaf.sum() for leaf in jax.tree_util.tree_leaves(args) if hasattr(leaf, "sum"))

    for argument in ARGUMENTS.values():
        # The array first, and last.
        for args in ((X, argument), (argument, X)):
            first = total(*args)
            assert [total(*args) == first for _ in range(2)] == [True] * 2
