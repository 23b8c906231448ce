"""A tree put together from its arrays by generated code is the tree that was taken apart."""

import collections
import copy
import dataclasses
import gc
import inspect
import linecache
import operator
import pickle
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eqxlike import Module, field, filter_jit, is_array, tree_at
from eqxlike._module import get_kept
from eqxlike._partition import flatten


class Pair(Module):
    left: object
    right: object = None
    mode: object = field(static=True, default="a")

    def sum(self):
        return self.left.sum()

    @property
    def first(self):
        return self.left[0]


class Mixed(Module):
    """Static fields before, between and after the others."""

    first: object = field(static=True)
    left: object
    second: object = field(static=True)
    right: object
    third: object = field(static=True)


class Empty(Module):
    pass


Point = collections.namedtuple("Point", ["x", "y"])
Nothing = collections.namedtuple("Nothing", [])


def rebuild(tree, keep=False):
    arrays, structure = flatten(tree)
    return structure.rebuilder(keep=keep)(tuple(arrays))


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
def test_partition_is_kept_on_rebuilt_modules_just_where_a_walk_would_keep_it(tree):
    rebuilt = rebuild(tree, keep=True)
    walked = rebuild(tree, keep=False)
    flatten(walked)

    def kept(tree):
        modules = []
        jtu.tree_map(lambda _: None, tree, is_leaf=lambda node: modules.append(node))
        return [get_kept(node) for node in modules if isinstance(node, Module)]

    def identities(tree):
        return [pair and ([*map(id, pair[0])], pair[1]) for pair in kept(tree)]

    assert identities(rebuilt) == identities(walked)


@given(trees)
def test_nothing_is_kept_where_not_asked(tree):
    modules = []
    jtu.tree_map(lambda _: None, rebuild(tree), is_leaf=lambda node: modules.append(node))
    assert not [node for node in modules if isinstance(node, Module) and get_kept(node)]


@given(trees)
def test_rebuilt_tree_takes_other_arrays(tree):
    arrays, structure = flatten(tree)
    others = tuple(np.full((), index) for index in range(len(arrays)))
    rebuilt = structure.rebuilder(keep=False)(others)
    found = [leaf for leaf in jtu.tree_leaves(rebuilt) if is_array(leaf)]
    assert [*map(id, found)] == [*map(id, others)]


def test_static_leaves_are_those_of_the_original():
    def function():
        pass

    value = text()
    rebuilt = rebuild((function, Pair(value, mode=function)))
    assert rebuilt[0] is function
    assert rebuilt[1].left is value
    assert rebuilt[1].mode is function


def test_lists_and_dicts_are_new_each_time():
    arrays, structure = flatten([{"a": jnp.ones(2)}])
    build = structure.rebuilder(keep=False)
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
    assert structure.rebuilder(keep=keep) is structure.rebuilder(keep=keep)


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
        build = flatten([Pair(array, "a") for _ in range(size)])[1].rebuilder(keep=True)
        return sum(map(len, linecache.getlines(build.__code__.co_filename)))

    # Ten times as many leaves, and the names one digit longer.
    assert num_characters(5_000) <= 13 * num_characters(500)


def test_source_goes_with_the_structure():
    structure = flatten(Pair(jnp.ones(2), "its source goes"))[1]
    filename = structure.rebuilder(keep=True).__code__.co_filename
    assert filename in linecache.cache
    del structure
    gc.collect()
    assert filename not in linecache.cache


def test_function_dies_with_the_structure():
    structure = flatten(Pair(jnp.ones(2), "its function goes"))[1]
    reference = weakref.ref(structure.rebuilder(keep=True))
    del structure
    gc.collect()
    assert reference() is None


# A Module that a filtered function returned is built when somebody reads it, and nobody can tell.


def returned():
    """A Module that was just returned by a warm call."""
    make = filter_jit(lambda x: Pair(x, Pair((x + 1, "text")), mode="b"))
    make(jnp.ones(2))
    return make(jnp.ones(2))


def built():
    return Pair(jnp.ones(2), Pair((jnp.ones(2) + 1, "text")), mode="b")


READINGS = {
    "attribute": lambda it: it.left,
    "static-field": lambda it: it.mode,
    "inner": lambda it: it.right.left[0],
    "getattr": lambda it: getattr(it, "left", None),
    "getattr-missing": lambda it: getattr(it, "missing", None),
    "hasattr": lambda it: (hasattr(it, "left"), hasattr(it, "missing")),
    "vars": lambda it: sorted(vars(it)),
    "dict": lambda it: sorted(it.__dict__),
    "dict-of-object": lambda it: sorted(object.__getattribute__(it, "__dict__")),
    "getattribute-of-object": lambda it: object.__getattribute__(it, "left"),
    "getstate": lambda it: sorted(it.__getstate__()),
    "reduce": lambda it: sorted(it.__reduce_ex__(4)[2]),
    "dir": dir,
    "repr": repr,
    "copy": lambda it: repr(copy.copy(it)),
    "deepcopy": lambda it: repr(copy.deepcopy(it)),
    "pickle": lambda it: repr(pickle.loads(pickle.dumps(it))),
    "replace": lambda it: repr(dataclasses.replace(it, mode="c")),
    "asdict": lambda it: repr(dataclasses.asdict(it)),
    "astuple": lambda it: repr(dataclasses.astuple(it)),
    "equality": lambda it: it == built(),
    "equality-the-other-way-round": lambda it: built() == it,
    "leaves": jtu.tree_leaves,
    "leaves-with-paths": lambda it: [
        (jtu.keystr(path), leaf) for path, leaf in jtu.tree_leaves_with_path(it)
    ],
    "treedef": lambda it: jtu.tree_structure(it) == jtu.tree_structure(built()),
    "tree_map": lambda it: repr(jtu.tree_map(lambda leaf: leaf, it)),
    "tree_at": lambda it: repr(tree_at(lambda it: it.right.left[1], it, "other")),
    "jax-jit": lambda it: jax.jit(lambda x: x + 1)(it.left),
    "method": lambda it: it.sum(),
    "property": lambda it: it.first,
    "match": lambda it: match_fields(it),
    "members": lambda it: [name for name, _ in inspect.getmembers(it) if name in ("left", "mode")],
}


def match_fields(module):
    match module:
        case Pair(left=left, mode="b"):
            return left
    return None


@pytest.mark.parametrize("name", READINGS)
def test_returned_module_reads_like_one_that_was_built(name):
    read = READINGS[name]
    assert jtu.tree_all(jtu.tree_map(np.array_equal, read(returned()), read(built())))


@pytest.mark.parametrize("name", READINGS)
def test_module_that_was_read_gives_the_same_objects_again(name):
    module = returned()
    READINGS[name](module)
    first = module.left, module.right, module.mode, module.right.left[0]
    READINGS[name](module)
    again = module.left, module.right, module.mode, module.right.left[0]
    assert all(map(operator.is_, first, again))


@pytest.mark.parametrize("name", READINGS)
def test_partition_of_a_returned_module_is_right_after_reading(name):
    module = returned()
    READINGS[name](module)
    dynamic, structure = get_kept(module)
    fresh, fresh_structure = flatten(copy.copy(module))
    assert [*map(id, dynamic)] == [*map(id, fresh)]
    assert structure is fresh_structure


def test_returned_module_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        returned().left = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        del returned().left


def test_missing_attribute_of_a_returned_module_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'Pair' object has no attribute 'missing'") as raised:
        returned().missing  # noqa: B018
    assert raised.value.name == "missing"


def test_property_of_a_returned_module_that_raises_shows_its_own_error():
    class Fails(Module):
        left: object

        @property
        def broken(self):
            raise AttributeError("of the property")

    module = filter_jit(Fails)(jnp.ones(2))
    with pytest.raises(AttributeError, match="of the property"):
        module.broken  # noqa: B018


def test_getattr_of_a_user_is_asked_for_what_is_missing_alone():
    class Asks(Module):
        left: object

        def __getattr__(self, name):
            return f"no {name}"

    make = filter_jit(Asks)
    make(jnp.ones(2))
    module = make(jnp.ones(2))
    assert module.other == "no other"
    assert (module.left == 1).all()


def test_getattribute_of_a_user_sees_every_field():
    seen = []

    class Watches(Module):
        left: object

        def __getattribute__(self, name):
            seen.append(name)
            return super().__getattribute__(name)

    make = filter_jit(Watches)
    make(jnp.ones(2))
    module = make(jnp.ones(2))
    assert (module.left == 1).all()
    assert "left" in seen


def test_field_that_hides_a_method_of_a_base_is_that_field():
    class Base(Module):
        def act(self):
            return "of the base"

    class Child(Base):
        act: object

    make = filter_jit(Child)
    make(jnp.ones(2))
    assert (make(jnp.ones(2)).act == 1).all()


def test_class_attribute_set_later_does_not_hide_a_field():
    class Late(Module):
        left: object

    make = filter_jit(Late)
    make(jnp.ones(2))
    module = make(jnp.ones(2))
    Late.left = "of the class"
    assert (module.left == 1).all()


def test_threads_that_read_a_returned_module_at_once_get_the_same_objects():
    for _ in range(20):
        module = returned()
        start = threading.Barrier(8, timeout=60)

        def read(_, module=module, start=start):
            start.wait()
            return id(module.right), id(module.right.left), id(module.left), id(vars(module))

        with ThreadPoolExecutor(8) as pool:
            assert len(set(pool.map(read, range(8)))) == 1


def test_returned_module_holds_arrays_and_no_more_than_a_built_one():
    module = returned()
    reference = weakref.ref(module.left)
    inner = module.right
    del module
    gc.collect()
    assert reference() is None
    assert inner.left[1] == "text"
