"""A tree put together from its arrays by generated code is the tree that was taken apart."""

import collections
import gc
import linecache
import weakref

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eqxlike import Module, field, is_array
from eqxlike._codegen import forget_sources
from eqxlike._module import get_cached
from eqxlike._partition import flatten
from tests.partition.models import Pair, Point


class Mixed(Module):
    """Static fields before, between and after the others."""

    first: object = field(static=True)
    left: object
    second: object = field(static=True)
    right: object
    third: object = field(static=True)


class Empty(Module):
    pass


Nothing = collections.namedtuple("Nothing", [])


def rebuild(tree, keep=False):
    arrays, structure = flatten(tree)
    return structure.rebuilder(cache=keep)(tuple(arrays))


def text():
    return "".join(["te", "xt"])


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


@given(trees, st.booleans())
def test_rebuilt_tree_has_the_treedef_of_the_original(tree, keep):
    assert jtu.tree_structure(rebuild(tree, keep)) == jtu.tree_structure(tree)


@given(trees, st.booleans())
def test_rebuilt_tree_has_the_arrays_of_the_original(tree, keep):
    arrays = [leaf for leaf in jtu.tree_leaves(rebuild(tree, keep)) if is_array(leaf)]
    assert [*map(id, arrays)] == [id(leaf) for leaf in jtu.tree_leaves(tree) if is_array(leaf)]


@given(trees, st.booleans())
def test_rebuilt_tree_has_static_leaves_of_the_type_and_value_of_the_original(tree, keep):
    def describe(tree):
        return [(type(leaf), repr(leaf)) for leaf in jtu.tree_leaves(tree) if not is_array(leaf)]

    assert describe(rebuild(tree, keep)) == describe(tree)


@given(trees)
def test_partition_is_cached_on_rebuilt_modules_just_where_a_walk_would_cache_it(tree):
    rebuilt = rebuild(tree, keep=True)
    walked = rebuild(tree, keep=False)
    flatten(walked)

    def cached(tree):
        modules = []
        jtu.tree_map(lambda _: None, tree, is_leaf=lambda node: modules.append(node))
        return [get_cached(node) for node in modules if isinstance(node, Module)]

    def identities(tree):
        return [each and ([*map(id, each.arrays)], each.structure) for each in cached(tree)]

    assert identities(rebuilt) == identities(walked)


@given(trees)
def test_nothing_is_cached_where_not_asked(tree):
    modules = []
    jtu.tree_map(lambda _: None, rebuild(tree), is_leaf=lambda node: modules.append(node))
    assert not [node for node in modules if isinstance(node, Module) and get_cached(node)]


@given(trees)
def test_rebuilt_tree_takes_other_arrays(tree):
    arrays, structure = flatten(tree)
    others = tuple(np.full((), index) for index in range(len(arrays)))
    rebuilt = structure.rebuilder(cache=False)(others)
    found = [leaf for leaf in jtu.tree_leaves(rebuilt) if is_array(leaf)]
    assert [*map(id, found)] == [*map(id, others)]


def test_static_leaves_are_those_of_the_original():
    def function():
        pass

    value = text()
    rebuilt = rebuild((function, Pair(value, mode=function)))
    assert rebuilt[0] is function
    assert rebuilt[1].left == value
    assert rebuilt[1].mode is function


def test_lists_and_dicts_are_new_each_time():
    arrays, structure = flatten([{"a": jnp.ones(2)}])
    build = structure.rebuilder(cache=False)
    first, second = build(tuple(arrays)), build(tuple(arrays))
    first[0]["b"] = 1
    first.append(2)
    assert list(second[0]) == ["a"]
    assert len(second) == 1


def test_dict_has_its_keys_in_the_order_of_jax():
    tree = {"b": jnp.ones(2), "a": 1}
    assert list(rebuild(tree)) == list(jtu.tree_map(lambda leaf: leaf, tree))


def test_ordered_dict_keeps_the_order_of_its_keys():
    assert list(rebuild(collections.OrderedDict(b=1, a=2))) == ["b", "a"]


def test_default_dict_keeps_its_factory():
    assert rebuild(collections.defaultdict(list, a=1)).default_factory is list


def test_registered_class_is_built_by_its_own_function():
    class Foreign:
        def __init__(self, value, label):
            self.value = value
            self.label = label

    jtu.register_pytree_node(
        Foreign, lambda it: ((it.value,), it.label), lambda label, ch: Foreign(*ch, label)
    )
    rebuilt = rebuild([Foreign({"a": jnp.ones(2)}, "b")])[0]
    assert type(rebuilt) is Foreign
    assert rebuilt.label == "b"
    assert list(rebuilt.value) == ["a"]


def test_registered_tuple_keeps_its_data():
    class Tagged(tuple):
        pass

    def make(tag, children):
        tagged = Tagged(children)
        tagged.tag = tag
        return tagged

    jtu.register_pytree_node(Tagged, lambda tagged: (tuple(tagged), tagged.tag), make)
    assert rebuild(make("a", (jnp.ones(2),))).tag == "a"


def test_constructor_converters_and_checks_do_not_run():
    runs = []

    class Noisy(Module):
        left: object = field(converter=lambda value: runs.append("converter") or value)

        def __post_init__(self):
            runs.append("post_init")

        def __check_init__(self):
            runs.append("check_init")

    module = Noisy(jnp.ones(2))
    runs.clear()
    rebuild(module, keep=True)
    assert runs == []


def test_module_with_a_constructor_of_its_own_is_rebuilt():
    class Sized(Module):
        weight: object
        size: int = field(static=True)

        def __init__(self, size):
            self.weight = jnp.ones(size)
            self.size = size

    rebuilt = rebuild(Sized(3))
    assert (rebuilt.size, rebuilt.weight.shape) == (3, (3,))


def test_module_without_all_fields_is_rebuilt_without_them():
    module = object.__new__(Mixed)
    module.__dict__.update(second="b", right=jnp.ones(2))
    assert sorted(vars(rebuild(module, keep=True))) == ["right", "second"]


def test_rebuilt_module_is_frozen():
    rebuilt = rebuild(Pair(jnp.ones(2)), keep=True)
    with pytest.raises(AttributeError, match="frozen"):
        rebuilt.left = 1


@pytest.mark.parametrize("keep", [False, True])
def test_function_is_generated_once_for_a_structure(keep):
    structure = flatten(Pair(jnp.ones(2), "generated once"))[1]
    assert structure.rebuilder(cache=keep) is structure.rebuilder(cache=keep)


NESTS = {
    "tuple": (lambda tree: (tree,), lambda tree: tree[0]),
    "list": (lambda tree: [tree], lambda tree: tree[0]),
    "dict": (lambda tree: {"a": tree}, lambda tree: tree["a"]),
    "module": (Pair, lambda tree: tree.left),
}


@pytest.mark.parametrize("name", NESTS)
def test_tree_nested_1_000_deep_is_rebuilt(name):
    wrap, unwrap = NESTS[name]
    tree = array = jnp.ones(2)
    for _ in range(1_000):
        tree = wrap(tree)
    # Not by JAX, whose walk takes the stack.
    rebuilt = rebuild(tree, keep=True)
    for _ in range(1_000):
        rebuilt = unwrap(rebuilt)
    assert rebuilt is array


def test_100_000_arrays_are_rebuilt():
    arrays = [np.full((), index) for index in range(100_000)]
    rebuilt = rebuild(Pair(tuple(arrays)), keep=True)
    assert [*map(id, rebuilt.left)] == [*map(id, arrays)]


def test_source_grows_in_line_with_leaves():
    def num_characters(size):
        array = jnp.ones(())
        build = flatten([Pair(array, "a") for _ in range(size)])[1].rebuilder(cache=True)
        return sum(map(len, linecache.getlines(build.__code__.co_filename)))

    # Ten times as many leaves, and the names one digit longer.
    assert num_characters(5_000) <= 13 * num_characters(500)


def test_source_goes_with_the_structure():
    structure = flatten(Pair(jnp.ones(2), "its source goes"))[1]
    filename = structure.rebuilder(cache=True).__code__.co_filename
    assert filename in linecache.cache
    del structure
    gc.collect()
    forget_sources()
    assert filename not in linecache.cache


def test_function_dies_with_the_structure():
    structure = flatten(Pair(jnp.ones(2), "its function goes"))[1]
    reference = weakref.ref(structure.rebuilder(cache=True))
    del structure
    gc.collect()
    assert reference() is None
