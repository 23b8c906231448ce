"""`flatten`: arrays, structures and errors."""

import collections

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given

from eqxlike import is_array
from eqxlike._partition import flatten
from tests.partition.models import Pair, Point, trees


@given(trees, trees)
def test_arrays_match_jax_and_structures_differ_if_treedefs_do(tree, other):
    expected = [leaf for leaf in jtu.tree_leaves(tree) if is_array(leaf)]
    structure = flatten(tree)[1]
    arrays, cached = flatten(tree)
    assert [*map(id, arrays)] == [*map(id, expected)]
    assert structure is cached is flatten(jtu.tree_map(lambda leaf: leaf, tree))[1]
    if jtu.tree_structure(tree) != jtu.tree_structure(other):
        assert flatten(other)[1] is not structure


def test_registered_tuple_is_a_node_and_an_unregistered_one_a_leaf():
    class Tagged(tuple):
        pass

    def make(tag, children):
        tagged = Tagged(children)
        tagged.tag = tag
        return tagged

    assert flatten(Tagged((jnp.float32, 2)))[1].meta == (jnp.float32, 2)
    jtu.register_pytree_node(Tagged, lambda tagged: (tuple(tagged), tagged.tag), make)
    assert flatten(make("a", (1, 2)))[1] is not flatten(make("b", (1, 2)))[1]


def test_shape_dtype_struct_counts_as_array_only_on_request():
    module = Pair(jax.ShapeDtypeStruct((2,), jnp.float32))
    for _ in range(2):
        arrays, structure = flatten(module, with_abstract=True)
        assert arrays == [module.left]
        assert structure is flatten(Pair(jnp.ones(2)))[1]
        assert flatten(module)[0] == []


def test_deeper_nesting_than_20_000_or_a_cycle_is_an_error():
    tree = jnp.ones(2)
    for _ in range(20_000):
        tree = (tree,)
    assert len(flatten(tree)[0]) == 1
    foreign, module = collections.OrderedDict(), Pair([])
    foreign["a"] = (foreign,)
    module.left.append(module)
    for cycle in ((tree,), foreign, module):
        with pytest.raises(RecursionError, match="nested more than 20000 deep, or contains itself"):
            flatten(cycle)


class Broken:
    def __hash__(self):
        raise TypeError("no hash today")


def fail(*args):
    raise TypeError("cannot compare")


def deep(leaf):
    return Pair([1, {"b": Point(1, leaf)}])


PATH = r"tree\.left\[1\]\['b'\]\.y, of type "
UNUSABLE = [
    (lambda: {1}, "tree, of type set, is not hashable"),
    (lambda: deep({1}), PATH + "set, is not hashable"),
    (lambda: deep(Broken()), PATH + r"Broken, is not hashable \(no hash today\)"),
    (lambda: deep(Compared()), PATH + r"Compared, is not comparable \(The truth value of an array"),
    (lambda: deep(Compared(fail)), PATH + r"Compared, is not comparable \(cannot compare"),
    (lambda: (Pair(1, mode=Compared()),), r"tree\[0\], of type Pair, is not comparable"),
]


def test_error_of_an_unusable_static_leaf_names_its_path():
    for make, message in UNUSABLE:
        held = []
        with pytest.raises(TypeError, match=message):
            # The first structure stays alive, so that the second is compared with it.
            held.extend(flatten(make()) for _ in range(2))


class Compared:
    """`==` returns an array or raises an error."""

    def __init__(self, equal=np.ones):
        self.equal = equal

    def __eq__(self, other):
        return self.equal(2)

    def __hash__(self):
        return hash(self.equal)


def test_leaf_that_cannot_be_compared_equals_itself():
    first, second = Compared(), Compared()
    structure = flatten(first)[1]
    assert flatten(first)[1] is structure
    for way in ("is_output", "by_identity"):
        structures = [flatten((leaf,), **{way: True})[1] for leaf in (first, second)]
        assert structures[0].children[0].meta is first
        assert structures[1].children[0].meta is second
