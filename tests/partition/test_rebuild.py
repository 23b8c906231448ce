"""Generated code rebuilds the flattened tree from its arrays."""

import jax.numpy as jnp
import jax.tree_util as jtu
import pytest
from hypothesis import given

from eqxlike import Module, field, is_array
from eqxlike._module import get_cached
from eqxlike._partition import flatten
from tests.partition.models import Pair, arrays_of, trees


def rebuild(tree, keep=False):
    arrays, structure = flatten(tree)
    return structure.rebuilder(cache=keep)(tuple(arrays))


def statics_of(tree):
    return [(type(leaf), repr(leaf)) for leaf in jtu.tree_leaves(tree) if not is_array(leaf)]


def cached_in(tree):
    """The partitions that are cached on the Modules of a tree."""
    nodes = []
    jtu.tree_map(lambda _: None, tree, is_leaf=lambda node: nodes.append(node))
    cached = [get_cached(node) for node in nodes if isinstance(node, Module)]
    return [each and ([*map(id, each.arrays)], each.structure) for each in cached]


@given(trees)
def test_rebuilt_tree_is_the_original_with_the_partitions_that_a_walk_caches(tree):
    walked, rebuilt = (rebuild(tree, keep) for keep in (False, True))
    for each in (walked, rebuilt):
        assert jtu.tree_structure(each) == jtu.tree_structure(tree)
        assert arrays_of(each) == arrays_of(tree)
        assert statics_of(each) == statics_of(tree)
    assert not any(cached_in(walked))
    flatten(walked)
    assert cached_in(rebuilt) == cached_in(walked)


def test_rebuilt_lists_and_dicts_are_new():
    arrays, structure = flatten([{"a": jnp.ones(2)}])
    build = structure.rebuilder(cache=False)
    assert structure.rebuilder(cache=False) is build
    first, second = build(tuple(arrays)), build(tuple(arrays))
    first[0]["b"] = 1
    first.append(2)
    assert list(second[0]) == ["a"]
    assert len(second) == 1


def test_rebuilding_runs_no_constructor_converter_or_check():
    runs = []

    class Noisy(Module):
        left: object = field(converter=lambda value: runs.append("converter") or value)
        size: int = field(static=True)

        def __init__(self, size):
            runs.append("init")
            self.left, self.size = jnp.ones(size), size

        def __check_init__(self):
            runs.append("check_init")

    module = Noisy(3)
    assert runs == ["init", "converter", "check_init"]
    rebuilt = rebuild(module, keep=True)
    assert len(runs) == 3
    assert (rebuilt.size, rebuilt.left.shape) == (3, (3,))
    with pytest.raises(AttributeError, match="frozen"):
        rebuilt.left = 1


def test_tree_nested_1_000_deep_is_rebuilt():
    tree = array = jnp.ones(2)
    for _ in range(1_000):
        tree = Pair(tree)
    # JAX cannot flatten this tree, because its traversal is recursive.
    rebuilt = rebuild(tree, keep=True)
    for _ in range(1_000):
        rebuilt = rebuilt.left
    assert rebuilt is array
