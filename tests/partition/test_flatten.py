"""What a walk over a tree gives and costs."""

import collections
import contextlib
import sys
import threading

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eqxlike import is_array
from eqxlike._partition import flatten
from tests.partition.models import Pair, Point, flatten_cached

# What a walk gives.

leaves = st.one_of(
    st.sampled_from([jnp.ones(2), jnp.zeros((0, 3)), jnp.arange(3), jax.random.key(0)]),
    st.sampled_from([np.ones(2), np.float32(1), np.zeros((), bool)]),
    st.sampled_from([1, 1.0, True, "a", b"a", None, jnp.sin, len, Point]),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3).map(collections.OrderedDict),
        st.builds(Point, inner, inner),
        st.builds(Pair, inner, inner, mode=st.sampled_from(["a", 1, 1.0])),
    ),
    max_leaves=8,
)


@given(trees)
def test_arrays_are_those_leaves_that_are_arrays_in_the_order_of_jax(tree):
    expected = [leaf for leaf in jtu.tree_leaves(tree) if is_array(leaf)]
    for _ in range(2):  # Afresh, and from what is cached.
        assert [*map(id, flatten(tree)[0])] == [*map(id, expected)]


@given(trees)
def test_structure_is_the_same_from_what_is_kept_and_afresh(tree):
    structure = flatten(tree)[1]
    assert flatten(tree)[1] is structure
    assert flatten(jtu.tree_map(lambda leaf: leaf, tree))[1] is structure


@given(trees, trees)
def test_structures_differ_where_treedefs_differ(first, second):
    if jtu.tree_structure(first) != jtu.tree_structure(second):
        assert flatten(first)[1] is not flatten(second)[1]


def test_registered_tuple_is_a_node_with_its_own_data():
    class Tagged(tuple):
        pass

    def make(tag, children):
        tagged = Tagged(children)
        tagged.tag = tag
        return tagged

    jtu.register_pytree_node(Tagged, lambda tagged: (tuple(tagged), tagged.tag), make)
    assert flatten(make("a", (1, 2)))[1] is not flatten(make("b", (1, 2)))[1]


def test_subclass_of_tuple_that_jax_does_not_know_is_a_static_leaf():
    class Size(tuple):
        pass

    assert flatten(Size((jnp.float32, 2)))[1].meta == (jnp.float32, 2)


def test_shape_dtype_struct_counts_as_array_where_asked():
    struct = jax.ShapeDtypeStruct((2,), jnp.float32)
    arrays, structure = flatten(Pair(struct), with_abstract=True)
    assert arrays == [struct]
    assert structure is flatten(Pair(jnp.ones(2)))[1]


def test_shape_dtype_struct_counts_as_array_where_asked_though_it_was_static_before():
    module = Pair(jax.ShapeDtypeStruct((2,), jnp.float32))
    flatten(module)
    assert flatten(module, with_abstract=True)[0] == [module.left]


def test_shape_dtype_struct_is_static_though_it_counted_as_array_before():
    module = Pair(jax.ShapeDtypeStruct((2,), jnp.float32))
    flatten(module, with_abstract=True)
    assert flatten(module)[0] == []


# Depth, cycles and cost.


def nest(wrap, depth):
    tree = jnp.ones(2)
    for _ in range(depth):
        tree = wrap(tree)
    return tree


WRAPS = {
    "tuple": lambda tree: (tree,),
    "list": lambda tree: [tree],
    "dict": lambda tree: {"a": tree},
    "ordered-dict": lambda tree: collections.OrderedDict(a=tree),
    "namedtuple": lambda tree: Point(tree, None),
    "module": lambda tree: Pair(tree),
}


@pytest.mark.parametrize("name", WRAPS)
def test_nesting_1_000_deep_works(name):
    tree = nest(WRAPS[name], 1_000)
    assert len(flatten(tree)[0]) == 1


@pytest.mark.parametrize("name", WRAPS)
def test_nesting_100_000_deep_raises_recursion_error(name):
    tree = nest(WRAPS[name], 100_000)
    with pytest.raises(RecursionError):
        flatten(tree)


def list_in_itself():
    tree = [jnp.ones(2)]
    tree.append(tree)
    return tree


def dict_in_itself():
    tree = {"a": jnp.ones(2)}
    tree["b"] = tree
    return tree


def foreign_in_itself():
    tree = collections.OrderedDict(a=jnp.ones(2))
    tree["b"] = (tree,)
    return tree


def module_in_its_list():
    inside = []
    inside.append(Pair(inside))
    return inside[0]


def list_in_itself_beside_what_is_unhashable():
    tree = [{1}]
    tree.append(tree)
    return tree


CYCLES = [list_in_itself, dict_in_itself, foreign_in_itself, module_in_its_list]


def error_and_stack_left(function):
    """The type of the error that `function` raises, and how deep calls may go after it.

    In a thread: a walk in C that is cut short can leave the count of the stack of its thread wrong,
    after which no function can be called there.
    """
    found = []

    def depth(level):
        try:
            return depth(level + 1)
        except RecursionError:
            return level

    def run():
        before = depth(0)
        try:
            function()
        except Exception as error:
            found.append(type(error))
        found.append(depth(0) / before)

    # What cannot be called there cannot report either.
    with contextlib.suppress(RecursionError):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    return found


@pytest.mark.parametrize("make", CYCLES)
def test_cycle_raises_recursion_error_and_leaves_the_stack_whole(make):
    tree = make()
    assert error_and_stack_left(lambda: flatten(tree)) == [RecursionError, 1.0]


def test_unhashable_leaf_beside_a_cycle_raises_an_error_and_leaves_the_stack_whole():
    tree = list_in_itself_beside_what_is_unhashable()
    error, stack_left = error_and_stack_left(lambda: flatten(tree))
    assert error in (RecursionError, TypeError)
    assert stack_left == 1.0


@pytest.mark.parametrize("name", WRAPS)
def test_unhashable_leaf_nested_1_000_deep_raises_a_type_error(name):
    tree = {1}
    for _ in range(1_000):
        tree = WRAPS[name](tree)
    assert error_and_stack_left(lambda: flatten(tree)) == [TypeError, 1.0]


def count_calls(function):
    """How many functions, in Python and in C, were called."""
    calls = 0

    def count(frame, event, _):
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(before)
    return calls


WIDE = {
    "tuple": lambda leaves: tuple(leaves),
    "list": list,
    "dict": lambda leaves: dict(enumerate(leaves)),
    "modules": lambda leaves: [Pair(leaf) for leaf in leaves],
    "modules-in-modules": lambda leaves: Pair(tuple(Pair((Pair(leaf), 1)) for leaf in leaves)),
}


@pytest.mark.parametrize("name", WIDE)
def test_work_grows_in_line_with_leaves(name):
    array = jnp.ones(2)
    flatten(WIDE[name]([array] * 10))
    small, large = (WIDE[name]([array] * size) for size in (400, 20_000))
    assert count_calls(lambda: flatten(large)) <= 51 * count_calls(lambda: flatten(small))


def test_100_000_leaves_are_flattened():
    leaves = [np.full((), index) for index in range(100_000)]
    assert [*map(id, flatten(Pair([leaves]))[0])] == [*map(id, leaves)]


def test_100_000_kept_leaves_take_no_more_calls_than_one(monkeypatch):
    monkeypatch.setattr("eqxlike._checking._depth", 0)
    small, large = (flatten_cached(Pair((jnp.ones(2),) * size)) for size in (1, 100_000))
    assert count_calls(lambda: flatten(large)) == count_calls(lambda: flatten(small))


# Errors name the path.

PATHS = {
    "root": (lambda leaf: leaf, r"tree,"),
    "in-a-tuple": (lambda leaf: (1, leaf), r"tree\[1\],"),
    "in-a-dict": (lambda leaf: {"a": leaf}, r"tree\['a'\],"),
    "in-a-module": (lambda leaf: Pair(1, leaf), r"tree\.right,"),
    "deep": (lambda leaf: Pair([1, {"b": Pair(leaf)}]), r"tree\.left\[1\]\['b'\]\.left,"),
}


@pytest.mark.parametrize("place", PATHS)
def test_error_for_an_unhashable_leaf_names_its_path(place):
    put, path = PATHS[place]
    with pytest.raises(TypeError, match=path + " of type set, is not hashable"):
        flatten(put({1}))


class Compared:
    """Its `==` gives an array, or raises."""

    def __init__(self, equal):
        self.equal = equal

    def __eq__(self, other):
        return self.equal()

    def __hash__(self):
        return 1


def raise_type_error():
    raise TypeError("cannot compare")


NOT_COMPARABLE = {
    "array": (lambda: jnp.ones(2), "The truth value of an array"),
    "numpy-array": (lambda: np.ones(2), "The truth value of an array"),
    "error": (raise_type_error, "cannot compare"),
}


@pytest.mark.parametrize("place", PATHS)
@pytest.mark.parametrize("name", NOT_COMPARABLE)
def test_error_for_a_leaf_that_cannot_be_compared_names_its_path(name, place):
    equal, reason = NOT_COMPARABLE[name]
    put, path = PATHS[place]
    # Two that meet: the first is held, so that it is still known.
    first = flatten(put(Compared(equal)))
    with pytest.raises(TypeError, match=rf"{path} of type Compared, is not comparable \({reason}"):
        flatten(put(Compared(equal)))
    assert first[0] == []


def test_error_for_a_static_field_that_cannot_be_compared_names_the_module():
    first = flatten((Pair(1, mode=Compared(lambda: np.ones(2))),))
    with pytest.raises(TypeError, match=r"tree\[0\], of type Pair, is not comparable"):
        flatten((Pair(1, mode=Compared(lambda: np.ones(2))),))
    assert first[0] == []


def test_leaf_that_cannot_be_compared_is_itself_all_the_same():
    leaf = Compared(lambda: np.ones(2))
    structure = flatten(leaf)[1]
    assert flatten(leaf)[1] is structure


@pytest.mark.parametrize("way", ["is_output", "is_bound"])
def test_leaf_that_cannot_be_compared_is_taken_where_it_is_no_part_of_a_key(way):
    first, second = Compared(lambda: np.ones(2)), Compared(lambda: np.ones(2))
    structures = [flatten((leaf,), **{way: True})[1] for leaf in (first, second)]
    assert structures[0].children[0].meta is first
    assert structures[1].children[0].meta is second


def test_error_for_a_hash_that_raises_says_so():
    class Broken:
        def __hash__(self):
            raise ValueError("no hash today")

    with pytest.raises(TypeError, match=r"of type Broken, is not hashable \(no hash today\)"):
        flatten(Broken())


def test_error_for_a_static_field_that_became_unhashable_names_its_path():
    module = Pair(1)
    module.__dict__["mode"] = [np.ones(2)]
    with pytest.raises(TypeError, match=r"tree\[0\]\.left.*not hashable"):
        flatten((Pair(module),))
