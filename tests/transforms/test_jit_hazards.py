"""What could make a cached call wrong: each gives what the plain function, or `jax.jit`, gives."""

import array
import collections
import copy
import dataclasses
import enum
import functools
import math
import pickle

import hypothesis
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import strategies as st

from eqxlike import Module, field, filter_jit, is_array, tree_at


class Pair(Module):
    left: object
    right: object = None
    mode: object = field(static=True, default="a")


class OtherPair(Module):
    left: object
    right: object = None
    mode: object = field(static=True, default="a")


Point = collections.namedtuple("Point", ["x", "y"])


class Colour(enum.Enum):
    RED = 1
    GREEN = 2


class Rank(enum.IntEnum):
    FIRST = 1


@dataclasses.dataclass(frozen=True)
class Config:
    size: object


class InheritedConfig(Config):
    pass


class Holder:
    """Hashes by identity, and changes in place."""

    def __init__(self, value):
        self.value = value

    def get(self):
        return self.value

    def __call__(self):
        return describe(self.value)


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


class PrivatelySlotted:
    __slots__ = ("__value",)

    def __init__(self, value):
        self.__value = value

    def set(self, value):
        self.__value = value

    def get(self):
        return self.__value


class Calls:
    """A callable with state."""

    def __init__(self, value):
        self.value = value

    def __call__(self, x):
        return describe(self.value), x

    def apply(self, x):
        return describe(self.value), x


def describe(value):
    """A text that tells apart what Python can tell apart."""
    if isinstance(value, functools.partial):
        return f"partial({describe((value.func, value.args, value.keywords))})"
    if isinstance(value, Holder | Slotted):
        return f"{type(value).__name__}({describe(value.value)})"
    if isinstance(value, PrivatelySlotted):
        return f"PrivatelySlotted({describe(value.get())})"
    if isinstance(value, dict):
        return f"{type(value).__name__}{[(key, describe(each)) for key, each in value.items()]}"
    if isinstance(value, tuple | list | collections.deque):
        return f"{type(value).__name__}{[*map(describe, value)]}"
    if isinstance(value, Config):
        return f"{type(value).__name__}({describe(value.size)})"
    if callable(value) and hasattr(value, "__self__") and not isinstance(value, type(len)):
        return f"method of {describe(value.__self__)}"
    return f"{type(value).__name__} {value!r}"


# Cached equals uncached.

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


def assert_same(outcome, expected):
    assert jtu.tree_structure(outcome) == jtu.tree_structure(expected)
    for ours, plain in zip(jtu.tree_leaves(outcome), jtu.tree_leaves(expected), strict=True):
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


@hypothesis.settings(
    max_examples=40, suppress_health_check=[hypothesis.HealthCheck.too_slow], deadline=None
)
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


@pytest.mark.parametrize("name", sorted(EDITS))
@hypothesis.settings(max_examples=4, deadline=None)
@hypothesis.given(modules, st.data())
def test_cached_equals_uncached_through(name, tree, data):
    jitted = filter_jit(summarise)
    assert_same(jitted(tree), summarise(tree))
    edited = EDITS[name](tree, data)
    for _ in range(2):
        assert_same(jitted(edited), summarise(edited))


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(trees)
def test_returned_tree_passed_again_is_what_it_says(tree):
    identity = filter_jit(lambda tree: tree)
    once = identity(identity(Pair(tree)))
    assert_same(filter_jit(summarise)(once), summarise(once))


# In-place changes.


def set_value(holder, value):
    holder.value = value


IN_PLACE = {
    "list": (lambda: [1], lambda it: it.append(2)),
    "list-item": (lambda: [1], lambda it: it.__setitem__(0, 1.0)),
    "list-in-tuple": (lambda: ([1],), lambda it: it[0].append(2)),
    "dict": (lambda: {"a": 1}, lambda it: it.update(a=2)),
    "dict-key": (lambda: {"a": 1}, lambda it: it.update(b=2)),
    "ordered-dict": (lambda: collections.OrderedDict(a=1), lambda it: it.update(a=2)),
    "object": (lambda: Holder(1), lambda it: set_value(it, 2)),
    "object-to-equal": (lambda: Holder(1), lambda it: set_value(it, True)),
    "object-with-list": (lambda: Holder([1]), lambda it: it.value.append(2)),
    "object-with-dict": (lambda: Holder({"a": 1}), lambda it: it.value.update(a=2)),
    "object-with-numpy": (lambda: Holder(np.zeros(2)), lambda it: it.value.fill(1)),
    "object-with-deque": (
        lambda: Holder(collections.deque([1])),
        lambda it: it.value.append(2),
    ),
    "object-with-ordered-dict": (
        lambda: Holder(collections.OrderedDict(a=1)),
        lambda it: it.value.update(a=2),
    ),
    "object-with-bytearray": (lambda: Holder(bytearray(b"a")), lambda it: it.value.append(2)),
    "object-with-array": (lambda: Holder(array.array("i", [1])), lambda it: it.value.append(2)),
    "slots": (lambda: Slotted(1), lambda it: set_value(it, 2)),
    "private-slots": (lambda: PrivatelySlotted(1), lambda it: it.set(2)),
    "method": (lambda: Holder(1).get, lambda it: set_value(it.__self__, 2)),
    "partial-of-list": (
        lambda: functools.partial(max, [1]),
        lambda it: it.args[0].append(2),
    ),
    "keyword-of-partial": (
        lambda: functools.partial(max, key=1),
        lambda it: it.keywords.update(key=2),
    ),
    "object-in-tuple": (lambda: (Holder(1),), lambda it: set_value(it[0], 2)),
    "object-in-dataclass": (lambda: Config(Holder(1)), lambda it: set_value(it.size, 2)),
}
# A static field holds nothing that has no hash.
IN_STATIC_FIELD = [name for name in IN_PLACE if "list" not in name and "dict" not in name] + [
    "object-with-list",
    "object-with-dict",
    "object-with-ordered-dict",
    "partial-of-list",
]
PLACES = {
    "argument": lambda value: value,
    "field": lambda value: Pair(jnp.ones(2), value),
    "inner-field": lambda value: Pair(Pair((1, value)), jnp.ones(2)),
}


def describe_all(tree):
    if isinstance(tree, Pair):
        return describe_all(tree.left), describe_all(tree.right), describe(tree.mode)
    return describe(tree) if not is_array(tree) else "array"


def assert_change_is_seen(tree, edit):
    jitted = filter_jit(describe_all)
    for _ in range(3):
        assert jitted(tree) == describe_all(tree)
    edit()
    for _ in range(3):
        assert jitted(tree) == describe_all(tree)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", IN_PLACE)
def test_change_in_place_is_seen(name, place):
    make, edit = IN_PLACE[name]
    value = make()
    tree = PLACES[place](value)
    assert_change_is_seen(tree, lambda: edit(value))


@pytest.mark.parametrize("name", IN_STATIC_FIELD)
def test_change_in_place_in_a_static_field_is_seen(name):
    make, edit = IN_PLACE[name]
    value = make()
    assert_change_is_seen(Pair(jnp.ones(2), mode=value), lambda: edit(value))


def test_change_in_place_between_two_equal_objects_is_seen_in_the_one_changed():
    first, second = (functools.partial(max, [1]) for _ in range(2))
    jitted = filter_jit(lambda function, x: (describe(function), x))
    jitted(first, jnp.ones(2))
    first.args[0].append(2)
    # A new trace, and the structure that `first` had when it was equal.
    assert jitted(second, jnp.ones(3))[0] == describe(second)


def test_returned_object_holds_what_the_one_passed_holds():
    first, second = (functools.partial(max, [1]) for _ in range(2))
    jitted = filter_jit(lambda function: function)
    jitted(first)
    first.args[0].append(2)
    assert describe(jitted(second)) == describe(second)


def test_function_is_returned_as_itself():
    first, second = (lambda: 1), (lambda: 1)
    jitted = filter_jit(lambda function, x: function)
    for function in (first, second, first, second):
        assert jitted(function, jnp.ones(2)) is function


def test_change_in_place_back_and_forth_is_seen():
    holder = Holder(1)
    jitted = filter_jit(describe_all)
    for value in (1, 2, 1, 2.0, 2, True):
        holder.value = value
        assert jitted(Pair(holder)) == describe_all(Pair(holder))


def test_change_in_place_while_another_shape_is_traced_is_seen():
    holder = Holder(1)
    jitted = filter_jit(lambda holder, x: (holder.value, x))
    for size, value in ((2, 1), (3, 1), (3, 2), (2, 2), (4, 1)):
        holder.value = value
        assert jitted(holder, jnp.ones(size))[0] == value


CALLABLES = {
    "callable": lambda it: it,
    "method": lambda it: it.apply,
    "partial": lambda it: functools.partial(it),
}


@pytest.mark.parametrize("name", CALLABLES)
def test_change_in_place_of_what_is_wrapped_is_seen(name):
    calls = Calls(1)
    jitted = filter_jit(CALLABLES[name](calls))
    for value in (1, 2, 1.0, [1]):
        calls.value = value
        assert jitted(jnp.ones(2))[0] == describe(value)


def test_array_of_a_wrapped_callable_replaced_is_seen():
    class Scale:
        def __init__(self, factor):
            self.factor = factor

        def __call__(self, x):
            return self.factor * x

    scale = Scale(jnp.array(2.0))
    jitted = filter_jit(scale)
    jitted(jnp.ones(2))
    scale.factor = jnp.array(3.0)
    assert (jitted(jnp.ones(2)) == 3).all()


def test_numpy_array_changed_in_place_is_seen():
    array = np.zeros(2, np.float32)
    module = Pair((array, 1))
    jitted = filter_jit(lambda module: module.left[0] + 1)
    for value in range(4):
        array.fill(value)
        assert (jitted(module) == value + 1).all()


def test_numpy_array_that_changed_its_shape_in_place_is_seen():
    array = np.zeros((2, 3), np.float32)
    module = Pair(array)
    jitted = filter_jit(lambda module: module.left + 1)
    assert jitted(module).shape == (2, 3)
    array.resize((4,), refcheck=False)
    assert jitted(module).shape == (4,)


def test_array_bound_by_partial_replaced_in_place_is_seen():
    function = functools.partial(lambda x, y: x + y, y=jnp.zeros(2))
    jitted = filter_jit(function)
    jitted(jnp.ones(2))
    with_other = filter_jit(functools.partial(function, y=jnp.ones(2)))
    assert (with_other(jnp.ones(2)) == 2).all()


# Static values that are equal and not the same.

ROWS = {
    "numbers": [1, 1.0, True, 1 + 0j],
    "zeros": [0, 0.0, -0.0, False, complex(0.0, -0.0)],
    "not-numbers": [float("nan"), float("inf"), float("-inf")],
    "text": ["1", b"1", 1],
    "enums": [Colour.RED, Colour.GREEN, Rank.FIRST, 1],
    "tuples": [(1,), (1.0,), (True,), ((1,),)],
    "zeros-in-tuples": [(0.0,), (-0.0,), (0,)],
    "namedtuples": [Point(1, 0.0), Point(1, -0.0), Point(True, 0.0)],
    "dataclasses": [Config(1), Config(1.0), Config(True)],
    "subclasses-of-dataclasses": [InheritedConfig(1), InheritedConfig(1.0), Config(1)],
    "partials": [functools.partial(max, 1), functools.partial(max, 1.0)],
    "empty": [None, (), False, 0, ""],
}
WAYS = {
    "argument": lambda jitted, value: jitted(value),
    "keyword": lambda jitted, value: jitted(value=value),
    "field": lambda jitted, value: jitted(Pair(1, value)),
    "static-field": lambda jitted, value: jitted(Pair(1, mode=value)),
    "list": lambda jitted, value: jitted([value]),
    "dict": lambda jitted, value: jitted({"a": value}),
    "tuple-of-static-field": lambda jitted, value: jitted(Pair(1, mode=(value,))),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("row", ROWS)
def test_equal_statics_are_told_apart(row, way):
    def plain(value):
        return describe_all(value)

    jitted = filter_jit(plain)
    for value in ROWS[row] * 2:
        assert WAYS[way](jitted, value) == WAYS[way](plain, value)


@pytest.mark.parametrize("row", ROWS)
def test_equal_statics_bound_by_partial_are_told_apart(row):
    for value in ROWS[row] * 2:
        assert filter_jit(functools.partial(describe, value))() == describe(value)


@pytest.mark.parametrize("row", ROWS)
def test_equal_statics_of_a_wrapped_module_are_told_apart(row):
    class Describes(Module):
        value: object

        def __call__(self):
            return describe(self.value)

    for value in ROWS[row] * 2:
        assert filter_jit(Describes(value))() == describe(value)


def test_numpy_zeros_in_a_static_tuple_are_told_apart():
    jitted = filter_jit(lambda module: math.copysign(1.0, module.mode[0]))
    signs = [jitted(Pair(1, mode=(np.float64(zero),))) for zero in (0.0, -0.0)]
    assert signs == [1.0, -1.0]


def test_dict_keys_that_are_equal_are_told_apart():
    jitted = filter_jit(lambda tree: [type(key).__name__ for key in tree])
    assert [jitted({key: "a"}) for key in (1, True, 1.0)] == [["int"], ["bool"], ["float"]]


def test_static_leaf_in_place_of_an_array_is_told_apart():
    jitted = filter_jit(lambda module: is_array(module.left))
    assert [jitted(Pair(value)) for value in (1.0, jnp.array(1.0), np.float32(1), 1.0)] == [
        False,
        True,
        True,
        False,
    ]


# Arrays: as `jax.jit` takes them.


def split():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.sharding.NamedSharding(mesh, jax.P("x"))


def deleted():
    array = jnp.ones(4)
    array.delete()
    return array


KINDS = {
    "float": lambda: jnp.ones(4),
    "weak": lambda: jnp.asarray(1.0),
    "weak-int": lambda: jnp.asarray(1),
    "strong-0d": lambda: jnp.asarray(1.0, jnp.float32),
    "int8": lambda: jnp.ones(4, jnp.int8),
    "uint32": lambda: jnp.ones(4, jnp.uint32),
    "bool": lambda: jnp.ones(4, bool),
    "bfloat16": lambda: jnp.ones(4, jnp.bfloat16),
    "int4": lambda: jnp.ones(4, jnp.int4),
    "complex": lambda: jnp.ones(4, jnp.complex64),
    "zero-size": lambda: jnp.zeros((0, 4)),
    "zero-size-matrix": lambda: jnp.zeros((4, 0)),
    "key": lambda: jax.random.key(0),
    "keys": lambda: jax.random.split(jax.random.key(0), 4),
    "rbg-key": lambda: jax.random.key(0, impl="rbg"),
    "old-key": lambda: jax.random.PRNGKey(0),
    "float0": lambda: np.zeros(4, jax.dtypes.float0),
    "numpy": lambda: np.ones(4, np.float32),
    "numpy-float64": lambda: np.ones(4),
    "numpy-int64": lambda: np.ones(4, np.int64),
    "numpy-scalar": lambda: np.float32(1),
    "numpy-float64-scalar": lambda: np.float64(1),
    "numpy-bool-scalar": lambda: np.bool_(True),
    "numpy-0d": lambda: np.array(1, np.int32),
    "numpy-zero-size": lambda: np.ones((0, 4), np.float32),
    "numpy-strided": lambda: np.ones((4, 4), np.float32)[:, ::2],
    "numpy-fortran": lambda: np.asfortranarray(np.ones((4, 2), np.float32)),
    "numpy-big-endian": lambda: np.ones(4, ">f4"),
    "numpy-read-only": lambda: np.broadcast_to(np.float32(1), (4,)),
    "numpy-text": lambda: np.array(["a"]),
    "numpy-objects": lambda: np.array([None]),
    "numpy-records": lambda: np.zeros(4, [("a", np.float32)]),
    "numpy-masked": lambda: np.ma.masked_array(np.ones(4, np.float32), [True, False] * 2),
    "numpy-matrix-free-subclass": lambda: np.ones(4, np.float32).view(np.recarray),
    "committed": lambda: jax.device_put(jnp.ones(4), jax.devices()[1]),
    "committed-to-the-default": lambda: jax.device_put(jnp.ones(4), jax.devices()[0]),
    "sharded": lambda: jax.device_put(jnp.ones(4), split()),
    "replicated": lambda: jax.device_put(
        jnp.ones(4), jax.sharding.NamedSharding(split().mesh, jax.P())
    ),
    "sharded-keys": lambda: jax.device_put(jax.random.split(jax.random.key(0), 4), split()),
    "deleted": deleted,
}
HOLDS = {
    "argument": (lambda array: array, lambda tree: tree),
    "module": (lambda array: Pair(array, "a"), lambda tree: tree.left),
    "module-with-list": (lambda array: Pair([array]), lambda tree: tree.left[0]),
    "dict": (lambda array: {"a": array}, lambda tree: tree["a"]),
}


def describe_array(array):
    if not isinstance(array, jax.Array):
        return type(array), array.shape, array.dtype
    values = (
        jax.random.key_data(array) if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else array
    )
    place = array.sharding, array.committed
    return array.shape, array.dtype, array.aval.weak_type, place, np.asarray(values).tolist()


def outcome_of(call):
    """What came, described so that two can be compared; or the type of the error."""
    try:
        return [*map(describe_array, call())]
    except Exception as error:
        return type(error)


@pytest.mark.parametrize("hold", HOLDS)
@pytest.mark.parametrize("kind", KINDS)
def test_array_is_taken_as_by_jax(kind, hold):
    wrap, unwrap = HOLDS[hold]
    theirs = jax.jit(lambda array: (array, array.reshape(-1)))
    ours = filter_jit(lambda tree: (unwrap(tree), unwrap(tree).reshape(-1)))
    array = KINDS[kind]()
    tree = wrap(array)
    expected = outcome_of(lambda: theirs(array))
    for _ in range(3):
        assert outcome_of(lambda: ours(tree)) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_array_is_taken_as_by_jax_in_a_warm_call(kind):
    theirs = jax.jit(lambda array: (array, array.reshape(-1)))
    ours = filter_jit(lambda tree: (tree.left, tree.left.reshape(-1)))
    for _ in range(3):
        theirs(jnp.ones(4)), ours(Pair(jnp.ones(4)))
    array = KINDS[kind]()
    expected = outcome_of(lambda: theirs(array))
    tree = Pair(array)
    for _ in range(2):
        assert outcome_of(lambda: ours(tree)) == expected
    assert outcome_of(lambda: ours(Pair(jnp.ones(4)))) == outcome_of(lambda: theirs(jnp.ones(4)))


PAIRS = {
    "two-devices": ("committed", "committed-to-the-default"),
    "committed-and-not": ("committed", "float"),
    "not-and-committed": ("float", "committed"),
    "sharded-and-not": ("sharded", "float"),
    "sharded-and-committed": ("sharded", "committed"),
    "weak-and-strong": ("weak", "int8"),
    "numpy-and-committed": ("numpy", "committed"),
    "deleted-second": ("float", "deleted"),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_two_arrays_are_taken_as_by_jax(pair):
    first, second = (KINDS[kind]() for kind in PAIRS[pair])
    function = lambda x, y: (x, y, x.astype(jnp.float32) + y.astype(jnp.float32))
    theirs, ours = jax.jit(function), filter_jit(lambda tree: function(tree.left, tree.right))
    expected = outcome_of(lambda: theirs(first, second))
    tree = Pair(first, second)
    for _ in range(2):
        assert outcome_of(lambda: ours(tree)) == expected


def test_model_that_was_donated_is_an_error_as_of_jax():
    model = Pair(jnp.ones(4))
    filter_jit(lambda model: model.left + 1, donate="all")(model)
    x = jnp.ones(4)
    jax.jit(lambda x: x + 1, donate_argnums=0)(x)
    for _ in range(2):
        ours = outcome_of(lambda: [filter_jit(lambda model: model.left)(model)])
        assert ours == outcome_of(lambda: [jax.jit(lambda x: x)(x)])


def test_array_donated_twice_is_an_error_as_of_jax():
    def donate_twice(jit, **options):
        x = jnp.ones(4)
        return outcome_of(lambda: jit(lambda x, y: (x + 1, y + 1), **options)(x, x))

    assert donate_twice(filter_jit, donate="all") == donate_twice(jax.jit, donate_argnums=(0, 1))


def test_model_put_elsewhere_is_computed_there():
    jitted = filter_jit(lambda model: model.left + 1)
    model = Pair(jnp.ones(4))
    first, second = jax.devices()[:2]
    for device in (first, second, first, second):
        assert jitted(jax.device_put(model, device)).devices() == {device}


def test_mutable_array_is_changed_as_by_jax():
    def add_one(ref):
        ref[...] = ref[...] + 1
        return ref[...]

    theirs, ours = jax.new_ref(jnp.zeros(2)), jax.new_ref(jnp.zeros(2))
    for _ in range(3):
        assert (filter_jit(add_one)(ours) == jax.jit(add_one)(theirs)).all()
    assert (ours[...] == theirs[...]).all()


def test_mutable_array_is_no_constant_of_the_trace():
    count = 0

    @filter_jit
    def read(ref):
        nonlocal count
        count += 1
        return ref[...]

    for value in range(3):
        assert (read(jax.new_ref(jnp.full(2, value))) == value).all()
    assert count == 1
