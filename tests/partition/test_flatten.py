"""What is kept on a Module, for how long, and what a walk over a tree gives and costs."""

import collections
import contextlib
import copy
import dataclasses
import pickle
import sys
import threading

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eqxlike import (
    Module,
    PartitionError,
    checking_partitions,
    field,
    filter_eval_shape,
    filter_jit,
    is_array,
    tree_at,
)
from eqxlike._module import get_kept
from eqxlike._partition import flatten


class Pair(Module):
    left: object
    right: object = None
    mode: object = field(static=True, default="a")


class Empty(Module):
    pass


Point = collections.namedtuple("Point", ["x", "y"])


class Holder:
    def __init__(self, value):
        self.value = value


def is_kept(module):
    """Whether a partition is kept on `module`."""
    return isinstance(get_kept(module), tuple)


def flatten_kept(module):
    """The module, once flattened."""
    flatten(module)
    return module


def assert_kept_is_fresh(module):
    dynamic, structure = get_kept(module)
    arrays, fresh = flatten(jtu.tree_map(lambda leaf: leaf, module))
    assert structure is fresh
    assert [*map(id, dynamic)] == [*map(id, arrays)]


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
    for _ in range(2):  # Afresh, and from what is kept.
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


# What is kept.

KEPT = {
    "nothing-in-it": Empty,
    "jax-array": lambda: Pair(jnp.ones(2)),
    "key": lambda: Pair(jax.random.key(0)),
    "numpy-array": lambda: Pair(np.ones(2)),
    "numpy-scalar": lambda: Pair(np.float32(1)),
    "statics": lambda: Pair(1, "a"),
    "function": lambda: Pair(jnp.sin, lambda: 1),
    "tuple": lambda: Pair((jnp.ones(2), None, ())),
    "namedtuple": lambda: Pair(Point(jnp.ones(2), 1)),
    "module": lambda: Pair(Pair(jnp.ones(2)), Pair(Pair(None))),
    "static-field": lambda: Pair(jnp.ones(2), mode=("a", 1)),
    "bound-method": lambda: Pair(Calls(jnp.ones(2)).call),
}
NOT_KEPT = {
    "list": lambda: Pair([jnp.ones(2)]),
    "empty-list": lambda: Pair([]),
    "dict": lambda: Pair({"a": jnp.ones(2)}),
    "ordered-dict": lambda: Pair(collections.OrderedDict(a=jnp.ones(2))),
    "default-dict": lambda: Pair(collections.defaultdict(int, a=jnp.ones(2))),
    "list-in-tuple": lambda: Pair((1, Point([], 1))),
    "list-in-module": lambda: Pair(Pair(jnp.ones(2)), Pair([])),
    "object": lambda: Pair(Holder(1)),
    "object-in-static-field": lambda: Pair(1, mode=Holder(1)),
    "object-in-tuple-in-static-field": lambda: Pair(1, mode=(Holder(1),)),
}


class Calls(Module):
    weight: object

    def call(self, x):
        return self.weight * x


@pytest.mark.parametrize("name", KEPT)
def test_partition_is_kept_where_nothing_inside_can_change(name):
    module = flatten_kept(KEPT[name]())
    assert_kept_is_fresh(module)


@pytest.mark.parametrize("name", NOT_KEPT)
def test_partition_is_not_kept_where_something_inside_can_change(name):
    assert not is_kept(flatten_kept(NOT_KEPT[name]()))


def test_partition_is_not_kept_over_a_node_that_somebody_registered():
    class Foreign:
        def __init__(self, value):
            self.value = value

    jtu.register_pytree_node(Foreign, lambda it: ((it.value,), None), lambda _, ch: Foreign(*ch))
    assert not is_kept(flatten_kept(Pair(Foreign(jnp.ones(2)))))


def test_partition_is_kept_on_modules_below_a_list():
    inner = Pair(jnp.ones(2))
    flatten(Pair([inner, 1]))
    assert_kept_is_fresh(inner)


def test_partition_is_kept_on_modules_beside_a_list():
    inner = Pair(jnp.ones(2))
    flatten(Pair([1], (inner,)))
    assert_kept_is_fresh(inner)


def test_partition_is_kept_on_the_outermost_module_alone():
    inner = Pair(jnp.ones(2))
    flatten(Pair(inner))
    assert not is_kept(inner)


def test_partition_kept_on_an_inner_module_serves_the_outer_one():
    inner = flatten_kept(Pair(jnp.ones(2)))
    outer = flatten_kept(Pair((inner, np.ones(3)), inner))
    assert_kept_is_fresh(outer)


def test_module_without_all_fields_gives_the_arrays_it_has():
    module = object.__new__(Pair)
    module.__dict__["right"] = jnp.ones(2)
    assert flatten(module)[0] == [module.right]


def test_nothing_is_kept_while_init_runs():
    class Grows(Module):
        left: object
        right: object

        def __init__(self):
            self.left = jnp.ones(2)
            flatten(self)
            self.right = jnp.ones(3)
            flatten(self)
            self.left = jnp.ones(4)

    assert [array.size for array in flatten(Grows())[0]] == [4, 3]


# What drops it.

COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "replace": lambda module: dataclasses.replace(module, left=module.left),
    "replace-static": lambda module: dataclasses.replace(module, mode="b"),
    "unflatten": lambda module: jtu.tree_unflatten(*reversed(jtu.tree_flatten(module))),
    "tree_map": lambda module: jtu.tree_map(lambda leaf: leaf, module),
    "tree_at": lambda module: tree_at(lambda it: it.left, module, module.left),
    "unflatten-without-leaves": lambda module: jtu.tree_structure(module).unflatten([None, None]),
}


@pytest.mark.parametrize("name", COPIES)
def test_partition_is_dropped_by(name):
    module = flatten_kept(Pair(np.ones(2), np.ones(3)))
    assert not is_kept(COPIES[name](module))


@pytest.mark.parametrize("name", COPIES)
def test_partition_of_the_original_stays_through(name):
    module = flatten_kept(Pair(np.ones(2), np.ones(3)))
    COPIES[name](module)
    assert_kept_is_fresh(module)


@pytest.mark.parametrize("name", COPIES)
def test_partition_made_anew_is_right_after(name):
    module = flatten_kept(Pair(np.ones(2), np.ones(3)))
    assert_kept_is_fresh(flatten_kept(COPIES[name](module)))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_partition_is_in_no_pickle(protocol):
    module = Pair(1, "a")
    before = pickle.dumps(module, protocol)
    assert pickle.dumps(flatten_kept(module), protocol) == before


def test_partition_is_invisible():
    module = Pair(jnp.ones(2))
    before = dir(module), {**vars(module)}, repr(module), dataclasses.asdict(Pair(1))
    flatten_kept(module)
    assert (dir(module), {**vars(module)}, repr(module), dataclasses.asdict(Pair(1))) == before


def test_getattr_of_a_user_does_not_see_the_slot():
    asked = []

    class Asks(Module):
        left: object

        def __getattr__(self, name):
            asked.append(name)
            raise AttributeError(name)

    flatten_kept(flatten_kept(Asks(jnp.ones(2))))
    filter_jit(lambda module: module.left)(Asks(jnp.ones(2)))
    assert [name for name in asked if "kept" in name] == []


# It never holds tracers.

TRACES = {
    "jit": lambda f: jax.jit(f)(jnp.ones(2)),
    "filter_jit": lambda f: filter_jit(f)(jnp.ones(2)),
    "grad": lambda f: jax.grad(f)(jnp.ones(2)),
    "jvp": lambda f: jax.jvp(f, (jnp.ones(2),), (jnp.ones(2),)),
    "vmap": lambda f: jax.vmap(f)(jnp.ones((3, 2))),
    "eval_shape": lambda f: filter_eval_shape(f, jnp.ones(2)),
    "scan": lambda f: jax.lax.scan(lambda c, x: (c + f(x), None), 0.0, jnp.ones((3, 2))),
    "under-grad-of-jit": lambda f: jax.grad(filter_jit(f))(jnp.ones(2)),
}


@pytest.mark.parametrize("name", TRACES)
def test_partition_with_a_tracer_is_not_kept(name):
    modules = []

    def function(x):
        module = Pair(jnp.ones(2), (x,))
        filter_jit(lambda module: module.right[0])(module)
        flatten(module)
        modules.append(module)
        return x.sum()

    TRACES[name](function)
    assert modules
    assert not any(map(is_kept, modules))


@pytest.mark.parametrize("name", TRACES)
def test_argument_of_a_traced_function_keeps_no_tracer(name):
    seen = []

    @filter_jit
    def inner(module):
        seen.append(module)
        flatten(module)
        return module.left.sum()

    TRACES[name](lambda x: inner(Pair(x)))
    assert seen
    assert not any(map(is_kept, seen))


def test_outcome_that_is_a_tracer_is_not_kept():
    outcomes = []

    def function(x):
        outcomes.append(filter_jit(Pair)(x))
        return outcomes[-1].left.sum()

    jax.grad(function)(jnp.ones(2))
    assert not is_kept(outcomes[0])


def test_outcome_that_is_partly_a_tracer_is_not_kept():
    outcomes = []
    make = filter_jit(lambda x, y: Pair(x, y))
    make(jnp.ones(2), jnp.ones(2))

    def function(x):
        outcomes.append(make(jnp.ones(2), x))
        return outcomes[-1].right.sum()

    jax.grad(function)(jnp.ones(2))
    assert not is_kept(outcomes[0])


def test_constant_module_met_inside_a_trace_keeps_its_own_arrays():
    constant = Pair(jnp.ones(2))
    jax.jit(lambda x: x * flatten_kept(constant).left)(jnp.ones(2))
    assert_kept_is_fresh(constant)


# The checking mode.

EDITS = {
    "array": lambda it: it.__dict__.update(left=jnp.ones(2)),
    "static-leaf": lambda it: it.__dict__.update(right="c"),
    "equal-static-leaf": lambda it: it.__dict__.update(right=1.0),
    "static-field": lambda it: it.__dict__.update(mode="b"),
    "setattr": lambda it: object.__setattr__(it, "left", jnp.ones(2)),
    "to-another-type": lambda it: it.__dict__.update(left=[jnp.ones(2)]),
    "to-static": lambda it: it.__dict__.update(left=1.0),
    "equal-array": lambda it: it.__dict__.update(left=it.left + 0),
}
WHERE = {
    "itself": lambda it: it,
    "in-a-tuple": lambda it: (1, it),
    "in-a-list": lambda it: [1, it],
    "in-a-module-with-a-list": lambda it: Pair([], it),
}


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("where", WHERE)
def test_checking_finds_an_edit(name, where):
    module = flatten_kept(Pair(jnp.ones(2), 1))
    tree = WHERE[where](module)
    EDITS[name](module)
    with checking_partitions(), pytest.raises(PartitionError, match="Pair was changed"):
        flatten(tree)


@pytest.mark.parametrize("name", EDITS)
def test_checking_finds_an_edit_inside_a_module_that_is_inside(name):
    inner = Pair(jnp.ones(2), 1)
    outer = flatten_kept(Pair((inner, "b")))
    EDITS[name](inner)
    with checking_partitions(), pytest.raises(PartitionError, match="Pair was changed"):
        flatten(outer)


def test_checking_finds_an_edit_in_a_warm_call():
    function = filter_jit(lambda module: module.left)
    pair = Pair(jnp.ones(2))
    function(pair)
    function(pair)
    pair.__dict__["left"] = jnp.zeros(2)
    with checking_partitions(), pytest.raises(PartitionError):
        function(pair)


@pytest.mark.parametrize("name", EDITS)
def test_checking_finds_an_edit_of_a_module_that_a_filtered_function_returned(name):
    make = filter_jit(lambda x: Pair(x, 1))
    make(jnp.ones(2))
    module = make(jnp.ones(2))
    EDITS[name](module)
    with checking_partitions(), pytest.raises(PartitionError, match="Pair was changed"):
        filter_jit(lambda module: module.left)(module)


def test_checking_accepts_what_was_not_changed():
    module = flatten_kept(Pair(jnp.ones(2), np.ones(2)))
    with checking_partitions():
        assert flatten(module)[0] == [module.left, module.right]


def test_checking_accepts_a_numpy_array_changed_in_place():
    module = flatten_kept(Pair(np.zeros(2)))
    module.left.fill(1)
    with checking_partitions():
        assert flatten(module)[0][0] is module.left


def test_checking_accepts_a_copy_that_was_changed_before_use():
    module = flatten_kept(Pair(np.zeros(2)))
    copied = copy.copy(module)
    copied.__dict__["left"] = np.ones(3)
    with checking_partitions():
        assert flatten(copied)[0][0].shape == (3,)


def test_checking_does_not_change_what_is_returned():
    module = Pair(jnp.ones(2), (1, "a"))
    function = filter_jit(lambda module: (module.right, module.left * 2))
    expected = function(module)
    with checking_partitions():
        outcome = function(module)
    assert outcome[0] == expected[0]
    assert (outcome[1] == expected[1]).all()


def test_checking_ends_with_its_context(monkeypatch):
    monkeypatch.setattr("eqxlike._checking._depth", 0)
    module = flatten_kept(Pair(jnp.ones(2)))
    with checking_partitions():
        pass
    module.__dict__["left"] = jnp.zeros(2)
    assert flatten(module)[0][0] is not module.left


def test_checking_sees_that_partitions_kept_at_each_level_of_1_000_are_right():
    module = Pair(jnp.ones(2))
    for _ in range(1_000):
        module = flatten_kept(Pair(module))
    with checking_partitions(), contextlib.suppress(RecursionError):
        arrays = flatten(module)[0]
        assert len(arrays) == 1
        return
    pytest.fail("the check takes the stack of Python at each level")


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
    small, large = (flatten_kept(Pair((jnp.ones(2),) * size)) for size in (1, 100_000))
    assert count_calls(lambda: flatten(large)) == count_calls(lambda: flatten(small))


def test_threads_that_flatten_at_once_keep_one_right_partition():
    for _ in range(20):
        module = Pair((jnp.ones(2), Pair(np.ones(2))))
        start = threading.Barrier(8)

        def walk(module=module, start=start):
            start.wait()
            flatten(module)

        threads = [threading.Thread(target=walk) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert_kept_is_fresh(module)


# Errors name the path.

UNHASHABLE = {
    "root": (lambda: {1}, r"tree,"),
    "in-a-tuple": (lambda: (1, {1}), r"tree\[1\],"),
    "in-a-dict": (lambda: {"a": {1}}, r"tree\['a'\],"),
    "in-a-module": (lambda: Pair(1, {1}), r"tree\.right,"),
    "deep": (lambda: Pair([1, {"b": Pair({1})}]), r"tree\.left\[1\]\['b'\]\.left,"),
}


@pytest.mark.parametrize("name", UNHASHABLE)
def test_error_for_an_unhashable_leaf_names_its_path(name):
    make, path = UNHASHABLE[name]
    with pytest.raises(TypeError, match=path + " of type set, is not hashable"):
        flatten(make())


def test_error_for_a_static_field_that_became_unhashable_names_its_path():
    module = Pair(1)
    module.__dict__["mode"] = [1]
    with pytest.raises(TypeError, match=r"tree\[0\]\.left.*not hashable"):
        flatten((Pair(module),))
