"""What a walk over a tree gives and costs."""

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

# What a walk gives.


@given(trees, trees)
def test_arrays_are_those_of_jax_and_structures_differ_where_treedefs_do(tree, other):
    expected = [leaf for leaf in jtu.tree_leaves(tree) if is_array(leaf)]
    structure = flatten(tree)[1]
    arrays, cached = flatten(tree)
    assert [*map(id, arrays)] == [*map(id, expected)]
    assert structure is cached is flatten(jtu.tree_map(lambda leaf: leaf, tree))[1]
    if jtu.tree_structure(tree) != jtu.tree_structure(other):
        assert flatten(other)[1] is not structure


def test_registered_tuple_is_a_node_with_its_own_data_and_any_other_subclass_a_leaf():
    class Tagged(tuple):
        pass

    def make(tag, children):
        tagged = Tagged(children)
        tagged.tag = tag
        return tagged

    assert flatten(Tagged((jnp.float32, 2)))[1].meta == (jnp.float32, 2)
    jtu.register_pytree_node(Tagged, lambda tagged: (tuple(tagged), tagged.tag), make)
    assert flatten(make("a", (1, 2)))[1] is not flatten(make("b", (1, 2)))[1]


def test_shape_dtype_struct_counts_as_array_just_where_asked():
    module = Pair(jax.ShapeDtypeStruct((2,), jnp.float32))
    for _ in range(2):
        arrays, structure = flatten(module, with_abstract=True)
        assert arrays == [module.left]
        assert structure is flatten(Pair(jnp.ones(2)))[1]
        assert flatten(module)[0] == []


# Depth, cycles and cost.


def nest(wrap, depth, innermost):
    tree = innermost
    for _ in range(depth):
        tree = wrap(tree)
    return tree


def test_nesting_20_000_deep_works_and_one_deeper_raises_recursion_error():
    tree = nest(lambda tree: (tree,), 20_000, jnp.ones(2))
    assert len(flatten(tree)[0]) == 1
    with pytest.raises(RecursionError, match="nested more than 20000 deep"):
        flatten((tree,))


def in_itself(tree, put):
    put(tree)
    return tree


CYCLES = {
    "foreign": lambda: in_itself(collections.OrderedDict(a=1), lambda it: it.update(b=(it,))),
    "module": lambda: in_itself(Pair([]), lambda it: it.left.append(it)),
}


@pytest.mark.parametrize("name", CYCLES)
def test_cycle_raises_recursion_error(name):
    with pytest.raises(RecursionError, match="or contains itself"):
        flatten(CYCLES[name]())


# Errors name the path.

PATHS = {
    "root": (lambda leaf: leaf, r"tree,"),
    "in-a-tuple": (lambda leaf: (1, leaf), r"tree\[1\],"),
    "deep": (lambda leaf: Pair([1, {"b": Point(1, leaf)}]), r"tree\.left\[1\]\['b'\]\.y,"),
}


class Compared:
    """Its `==` gives an array, or raises."""

    def __init__(self, equal=lambda: np.ones(2)):
        self.equal = equal

    def __eq__(self, other):
        return self.equal()

    def __hash__(self):
        return hash(self.equal)


def raise_type_error():
    raise TypeError("cannot compare")


@pytest.mark.parametrize("place", PATHS)
def test_error_for_a_leaf_that_is_no_key_names_its_path(place):
    put, path = PATHS[place]
    with pytest.raises(TypeError, match=path + " of type set, is not hashable"):
        flatten(put({1}))
    for equal, reason in [
        (lambda: jnp.ones(2), "The truth value of an array"),
        (raise_type_error, "cannot compare"),
    ]:
        # Two that meet: the first is held, so that it is still known.
        first = flatten(put(Compared(equal)))
        expected = rf"{path} of type Compared, is not comparable \({reason}"
        with pytest.raises(TypeError, match=expected):
            flatten(put(Compared(equal)))
        assert first[0] == []


def test_error_for_a_static_field_that_is_no_key_names_the_module():
    first = flatten((Pair(1, mode=Compared()),))
    with pytest.raises(TypeError, match=r"tree\[0\], of type Pair, is not comparable"):
        flatten((Pair(1, mode=Compared()),))
    assert first[0] == []
    module = Pair(1)
    module.__dict__["mode"] = [np.ones(2)]
    with pytest.raises(TypeError, match=r"tree\[0\]\.left.*not hashable"):
        flatten((Pair(module),))


def test_leaf_that_cannot_be_compared_is_itself_all_the_same():
    first, second = Compared(), Compared()
    structure = flatten(first)[1]
    assert flatten(first)[1] is structure
    for way in ("is_output", "by_identity"):
        structures = [flatten((leaf,), **{way: True})[1] for leaf in (first, second)]
        assert structures[0].children[0].meta is first
        assert structures[1].children[0].meta is second


def test_error_for_a_hash_that_raises_says_so():
    class Broken:
        def __hash__(self):
            raise ValueError("no hash today")

    with pytest.raises(TypeError, match=r"of type Broken, is not hashable \(no hash today\)"):
        flatten(Broken())
