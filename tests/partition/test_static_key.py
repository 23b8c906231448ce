"""Keys of static values: two values share a key only if no program could tell them apart."""

import array
import collections
import dataclasses
import datetime
import decimal
import enum
import functools
import gc
import math
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eqxlike import Module, field
from eqxlike._partition import StaticKey


def key(value):
    return StaticKey(value).key


class Colour(enum.Enum):
    RED = 1
    GREEN = 2


class Rank(enum.IntEnum):
    FIRST = 1


class Options(enum.Flag):
    FAST = 1
    EXACT = 2


@dataclasses.dataclass(frozen=True)
class Config:
    size: object
    note: object = dataclasses.field(default="", compare=False)


class InheritedConfig(Config):
    pass


class Point(collections.namedtuple("Point", ["x"])):
    pass


class Number(float):
    pass


class Static(Module):
    value: object
    size: object = field(static=True, default=0)


def power(x, exponent=1):
    return x**exponent


def negative(x):
    return -x


TOLD_APART = {
    "int-float": (1, 1.0),
    "int-bool": (1, True),
    "float-bool": (1.0, True),
    "int-complex": (1, 1 + 0j),
    "zero-false": (0, False),
    "signs-of-zero": (0.0, -0.0),
    "signs-of-complex-zero": (complex(0.0, 0.0), complex(0.0, -0.0)),
    "str-bytes": ("1", b"1"),
    "none-ellipsis": (None, ...),
    "int-enum": (1, Rank.FIRST),
    "enum-members": (Colour.RED, Colour.GREEN),
    "flags": (Options.FAST, Options.FAST | Options.EXACT),
    "in-tuple": ((1,), (1.0,)),
    "in-nested-tuple": (((1,),), ((True,),)),
    "tuple-namedtuple": ((1,), Point(1)),
    "in-namedtuple": (Point(0.0), Point(-0.0)),
    "in-frozenset": (frozenset({1}), frozenset({1.0})),
    "in-dataclass": (Config(1), Config(True)),
    "in-subclass-of-dataclass": (InheritedConfig(1), InheritedConfig(1.0)),
    "dataclass-and-subclass": (Config(1), InheritedConfig(1)),
    "in-partial": (functools.partial(power, 1), functools.partial(power, 1.0)),
    "partial-place-keyword": (functools.partial(power, 1), functools.partial(power, x=1)),
    "functions": (power, negative),
    "in-slice": (slice(0, 1), slice(0, 1.0)),
    "empty-ranges": (range(0), range(2, 2)),
    "in-module": (Static(1), Static(1.0)),
    "in-static-field": (Static(None, 1), Static(None, True)),
    "types": (np.float32, jnp.float32),
    "dtypes": (np.dtype("float32"), np.dtype("int32")),
    "numpy-scalar-zeros": ((np.float64(0.0),), (np.float64(-0.0),)),
    "numpy-scalar-types": ((np.int32(1),), (np.int64(1),)),
    "subclass-of-float": (Number(0.0), Number(-0.0)),
    "signs-of-nan": (math.nan, math.copysign(math.nan, -1.0)),
    "decimals": (decimal.Decimal("1.0"), decimal.Decimal("1.00")),
    "datetimes": (
        datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC),
        datetime.datetime(2020, 1, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=1))),
    ),
    "partition-specs": (jax.P("x"), jax.P("y")),
}


@pytest.mark.parametrize("name", TOLD_APART)
def test_values_that_a_program_tells_apart_have_different_keys(name):
    first, second = TOLD_APART[name]
    assert key(first) != key(second)


def make_text():
    return "".join(["te", "xt"])


class WithMethod:
    def __init__(self, value):
        self.value = value

    def method(self):
        return self.value


INSTANCE = WithMethod(1)
TABLE = {"a": 1}

INTERCHANGEABLE = {
    "str": make_text,
    "bytes": lambda: bytes([1, 2, 3]),
    "large-int": lambda: int("1" * 30),
    "float": lambda: float("1.5"),
    "nan": lambda: float("nan"),
    "complex-nan": lambda: complex(float("nan"), 1.0),
    "numpy-nan": lambda: (np.float64("nan"),),
    "nan-in-subclass-of-float": lambda: Number("nan"),
    "tuple": lambda: (1, make_text(), (float("nan"),)),
    "namedtuple": lambda: Point(make_text()),
    "frozenset": lambda: frozenset({make_text(), 1.0}),
    "enum": lambda: Colour["RED"],
    "composite-flag": lambda: Options.FAST | Options.EXACT,
    "dataclass": lambda: Config(make_text()),
    "subclass-of-dataclass": lambda: InheritedConfig(make_text()),
    "partial": lambda: functools.partial(power, exponent=make_text()),
    "method": lambda: INSTANCE.method,
    "builtin-method": lambda: TABLE.get,
    "slice": lambda: slice(0, int("1000000")),
    "range": lambda: range(int("1000000")),
    "module": lambda: Static(make_text(), int("1000000")),
    "dtype": lambda: np.dtype("float32").newbyteorder("="),
    "partition-spec": lambda: jax.P("x", None),
}


@pytest.mark.parametrize("name", INTERCHANGEABLE)
def test_equal_values_of_one_type_have_equal_keys(name):
    make = INTERCHANGEABLE[name]
    first, second = make(), make()
    assert key(first) == key(second)


def describe(value):
    """What a program can find out about a scalar or a nest of them."""
    if isinstance(value, tuple):
        return type(value), tuple(map(describe, value))
    if isinstance(value, frozenset):
        return type(value), frozenset(map(describe, value))
    if isinstance(value, float):
        return type(value), repr(value)
    return type(value), str(value)


scalars = st.one_of(
    st.integers(-2, 2),
    st.booleans(),
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, math.nan, math.inf, -math.inf]),
    st.sampled_from([0j, complex(-0.0, 0.0), complex(0.0, -0.0), 1 + 0j]),
    st.sampled_from(["", "1", "a"]),
    st.sampled_from([b"", b"1"]),
    st.none(),
    st.sampled_from([*Colour, *Rank]),
)
nests = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(tuple), st.frozensets(scalars, max_size=3), inner.map(Point)
    ),
    max_leaves=5,
)


@given(nests, nests)
def test_keys_are_equal_just_where_values_are_indistinguishable(first, second):
    assert (key(first) == key(second)) == (describe(first) == describe(second))


@given(nests)
def test_key_is_hashable(value):
    assert hash(key(value)) == hash(key(value))


class Holder:
    """Hashes by identity."""

    def __init__(self, value):
        self.value = value


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


class Items(list):
    pass


class Table(dict):
    pass


class Unhashable:
    """Compares by value, so that Python makes it unhashable."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return isinstance(other, Unhashable) and self.value == other.value


def set_value(holder, value):
    holder.value = value


EDITS = {
    "attribute": (lambda: Holder(1), lambda it: set_value(it, 2)),
    "attribute-of-equal-value": (lambda: Holder(1), lambda it: set_value(it, 1.0)),
    "new-attribute": (lambda: Holder(1), lambda it: setattr(it, "other", 1)),
    "deleted-attribute": (lambda: Holder(1), lambda it: delattr(it, "value")),
    "slot": (lambda: Slotted(1), lambda it: set_value(it, 2)),
    "private-slot": (lambda: PrivatelySlotted(1), lambda it: it.set(2)),
    "list": (lambda: Holder([1]), lambda it: it.value.append(2)),
    "nested-list": (lambda: Holder({"a": [1]}), lambda it: it.value["a"].append(2)),
    "dict": (lambda: Holder({"a": 1}), lambda it: it.value.update(a=2)),
    "set": (lambda: Holder({1}), lambda it: it.value.add(2)),
    "numpy": (lambda: Holder(np.zeros(2)), lambda it: it.value.fill(1)),
    "numpy-in-tuple": (lambda: Holder((np.zeros(2),)), lambda it: it.value[0].fill(1)),
    "jax-array": (lambda: Holder(jnp.zeros(2)), lambda it: set_value(it, jnp.zeros(2))),
    "subclass-of-list": (lambda: Holder(Items([1])), lambda it: it.value.append(2)),
    "subclass-of-dict": (lambda: Holder(Table(a=1)), lambda it: it.value.update(a=2)),
    "ordered-dict": (
        lambda: Holder(collections.OrderedDict(a=1)),
        lambda it: it.value.update(a=2),
    ),
    "default-dict": (
        lambda: Holder(collections.defaultdict(int, a=1)),
        lambda it: it.value.update(a=2),
    ),
    "counter": (lambda: Holder(collections.Counter("a")), lambda it: it.value.update("a")),
    "deque": (lambda: Holder(collections.deque([1])), lambda it: it.value.append(2)),
    "bytearray": (lambda: Holder(bytearray(b"a")), lambda it: it.value.append(2)),
    "array": (lambda: Holder(array.array("i", [1])), lambda it: it.value.append(2)),
    "unhashable": (lambda: Holder(Unhashable(1)), lambda it: set_value(it.value, 2)),
    "in-partial": (
        lambda: functools.partial(power, exponent=[1]),
        lambda it: it.keywords["exponent"].append(2),
    ),
    "keyword-of-partial": (
        lambda: functools.partial(power, exponent=1),
        lambda it: it.keywords.update(exponent=2),
    ),
    "instance-of-method": (lambda: WithMethod(1).method, lambda it: set_value(it.__self__, 2)),
    "instance-of-builtin-method": (lambda: {"a": 1}.get, lambda it: it.__self__.update(a=2)),
    "in-dataclass": (lambda: Config(Holder(1)), lambda it: set_value(it.size, 2)),
    "in-tuple": (lambda: (Holder(1),), lambda it: set_value(it[0], 2)),
}


@pytest.mark.parametrize("name", EDITS)
def test_key_made_anew_shows_a_change_in_place(name):
    make, edit = EDITS[name]
    value = make()
    before = key(value)
    edit(value)
    assert key(value) != before


@pytest.mark.parametrize("name", EDITS)
def test_value_that_can_change_in_place_is_not_immutable(name):
    make, _ = EDITS[name]
    assert not StaticKey(make()).is_immutable


@pytest.mark.parametrize("name", EDITS)
def test_key_of_what_did_not_change_stays(name):
    make, _ = EDITS[name]
    value = make()
    assert key(value) == key(value)


IMMUTABLE = {
    "int": 1,
    "float": 1.5,
    "str": "text",
    "function": power,
    "builtin": len,
    "type": int,
    "module": math,
    "enum": Colour.RED,
    "tuple": (1, ("a", power)),
    "dataclass": Config(1),
    "jitted": jax.jit(power),
    "jax-function": jax.nn.relu,
    "ufunc": np.add,
    "dtype": np.dtype("float32"),
    "jax-dtype": jnp.float32,
    "partition-spec": jax.P("x"),
}


@pytest.mark.parametrize("name", IMMUTABLE)
def test_value_that_cannot_change_is_immutable(name):
    assert StaticKey(IMMUTABLE[name]).is_immutable


def test_objects_that_hash_by_identity_have_different_keys():
    assert key(Holder(1)) != key(Holder(1))


def test_methods_of_two_instances_have_different_keys():
    assert key(WithMethod(1).method) != key(WithMethod(1).method)


def test_functions_made_twice_have_different_keys():
    first, second = (lambda: 1), (lambda: 1)
    assert key(first) != key(second)


def test_object_in_a_list_of_its_own_has_a_key():
    node = Holder([])
    node.value.append(node)
    assert key(node) == key(node)


def test_objects_that_list_one_another_have_keys():
    parent, child = Holder([]), Holder([])
    parent.value.append(child)
    child.value.append(parent)
    assert key(parent) != key(child)


UNHASHABLE = {
    "list": [1],
    "dict": {"a": 1},
    "set": {1},
    "bytearray": bytearray(b"a"),
    "object": Unhashable(1),
    "array": np.zeros(2),
    "in-tuple": (1, [2]),
    "in-dataclass": Config([1]),
}


@pytest.mark.parametrize("name", UNHASHABLE)
def test_unhashable_value_is_refused(name):
    with pytest.raises(TypeError, match="unhashable"):
        StaticKey(UNHASHABLE[name])


def test_key_alone_does_not_hold_what_it_names():
    def function():
        pass

    reference = weakref.ref(function)
    only_key = key(function)
    del function
    gc.collect()
    assert reference() is None
    assert only_key == only_key


def test_static_key_holds_what_it_names():
    def function():
        pass

    reference = weakref.ref(function)
    static = StaticKey((1, function))
    del function
    gc.collect()
    assert reference() in static.held
