"""Static values of every kind, such as values that compare equal or change in place."""

import array
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import math
import pathlib
import types
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from eqxlike import Module, field


class Colour(enum.Enum):
    RED = 1


class Rank(enum.IntEnum):
    FIRST = 1


class Word(enum.StrEnum):
    A = "a"


class Options(enum.Flag):
    FAST = 1
    EXACT = 2


@dataclasses.dataclass(frozen=True)
class Config:
    size: object
    note: object = dataclasses.field(default="", compare=False)

    def get(self):
        return self.size


class InheritedConfig(Config):
    pass


@dataclasses.dataclass(unsafe_hash=True)
class Settings:
    size: object

    def get(self):
        return self.size


@dataclasses.dataclass
class Unhashable:
    value: object

    def get(self):
        return self.value


@dataclasses.dataclass(frozen=True)
class Listed:
    """A hashable dataclass with an unhashable field."""

    sizes: list
    name: str = "a"

    def __hash__(self):
        return hash(self.name)


@dataclasses.dataclass(frozen=True)
class ByNote:
    """A dataclass with its own `__eq__`."""

    size: object = dataclasses.field(compare=False)
    note: object = dataclasses.field(compare=False)

    def __eq__(self, other):
        return isinstance(other, ByNote) and self.note == other.note

    def __hash__(self):
        return hash(self.note)


class Named:
    """Compared and hashed by its name."""

    def __init__(self, name):
        self.name = name

    def __eq__(self, other):
        return isinstance(other, Named) and self.name == other.name

    def __hash__(self):
        return hash(self.name)

    def get(self):
        return self.name


class InheritedNamed(Named):
    """Compares equal to a `Named`."""


class Point(collections.namedtuple("Point", ["x"])):
    __slots__ = ()


class Size(tuple):
    """A tuple with a `__dict__`."""


class Hidden(tuple):
    def __iter__(self):
        return iter(())


class Number(float):
    """A float with a `__dict__`."""


class Items(list):
    def get(self):
        return [*self]


class Static(Module):
    value: object
    size: object = field(static=True, default=0)


class Holder:
    """Hashed by identity."""

    def __init__(self, value):
        self.value = value

    def get(self):
        return self.value

    def __call__(self):
        return self.value


class EqualHolder(Holder):
    """Compares equal to other instances, but is hashed by identity."""

    def __eq__(self, other):
        return isinstance(other, EqualHolder)

    __hash__ = object.__hash__


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


class OwnPartial(partial):
    pass


def power(x, exponent=1):
    return x**exponent


def negative(x):
    return -x


def takes(*args, **kwargs):
    return args, kwargs


def labelled(value, label):
    """Sets the attribute `label` of `value`, and returns `value`."""
    value.label = label
    return value


def set_value(holder, value):
    holder.value = value


def set_size(settings, size):
    settings.size = size


def set_key(partial, value):
    partial.keywords["key"] = value


HOLDER = Holder(1)
TABLE = {"a": 1}
JITTED = jax.jit(power)


def make_text():
    return "".join(["te", "xt"])


# All values in a row have different keys.
DISTINGUISHABLE = {
    "ones": [1, True, 1.0, 1 + 0j, "1", b"1", Rank.FIRST, Options.FAST, (1,), [*range(1)].count],
    "words": ["a", Word.A, Named("a"), pathlib.PurePath("a"), ..., jax.P("x"), jax.P("y")],
    "zeros": [0, False, 0.0, -0.0, 0j, -0j, complex(0.0, -0.0), "", b"", (), frozenset(), None],
    "infinities": [math.inf, -math.inf, math.nan, -math.nan, complex(math.nan, 1), 2.0**1023],
    "numpy-numbers": [(np.int32(1),), (np.int64(1),), (np.float64(0.0),), (np.float64(-0.0),)],
    "tuples": [(1,), (True,), (1.0,), (1, 1), ((1,),), ((True,),), Point(1), Size((1,))],
    "zeros-in-tuples": [(0.0,), (-0.0,), Point(0.0), Point(-0.0), Number(0.0), Number(-0.0)],
    "long-tuples": [
        *((number,) * 40 for number in (1, True, 1.0, "1", None, (1,), (True,), 0.0, -0.0)),
        *((*[0] * 31, number) for number in (1, True, math.nan, -math.nan, 0.0, -0.0, 1j)),
        Size((1,) * 40),
    ],
    "tuples-with-their-own-iteration": [Hidden((1,)), Hidden((2,))],
    "frozensets": [frozenset({1}), frozenset({1.0}), frozenset({True}), frozenset({(1,)})],
    "attributes-of-tuples": [labelled(Size((1,)), 1), labelled(Size((1,)), True), Size((1,))],
    "dataclasses": [Config(1), Config(True), Config(1.0), InheritedConfig(1), InheritedConfig(1.0)],
    "dataclasses-that-may-change": [Settings(1), Settings(True), Settings(Settings(1.0))],
    "dataclasses-with-lists": [Listed([1]), Listed([True]), Listed([1.0]), Listed([1, 1])],
    "dataclasses-with-dicts": [Listed({"a": 1}), Listed({"a": True}), Listed({"b": 1})],  # pyright: ignore
    "dataclasses-with-their-own-equality": [ByNote(1, "a"), ByNote(1, "b")],
    "own-equality": [InheritedNamed("a"), *map(Named, ("a", "b", 1, True, (1.0,)))],
    "own-equality-of-numpy-numbers": [Named(np.int8(1)), Named(np.int16(1)), Named(1)],
    "modules": [Static(1), Static(True), Static(1.0), Static(None, 1), Static(None, True)],
    "partials": [
        *(partial(power), partial(power, 1), partial(power, True), partial(power, x=1)),
        *(partial(power, x=1.0), partial(power, 1, exponent=2), partial(negative, 1)),
        *(labelled(partial(power, 1), "a"), OwnPartial(power, 1)),
    ],
    "functions": [power, negative, lambda: 1, lambda: 1, JITTED, jax.jit(negative), len, max],
    "methods": [HOLDER.get, Holder(1).get, Config(1).get, Config(True).get, Unhashable(1).get],
    "builtin-methods": [TABLE.get, TABLE.pop, {"a": 1}.get, [1].pop, [1].pop, str.maketrans],
    "objects": [HOLDER, Holder(1), Holder(1.0), EqualHolder(1), EqualHolder(1), Slotted(1)],
    "slices-and-ranges": [slice(0, 1), slice(0, 1.0), range(0), range(2, 2), range(1), range(2)],
    "dtypes": [np.dtype("float32"), np.dtype("int32"), np.dtype(">f4"), jnp.dtype("bfloat16")],
    "decimals": [decimal.Decimal("1.0"), decimal.Decimal("1.00"), fractions.Fraction(1), 1],
    "times": [
        datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC),
        datetime.datetime(2020, 1, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=1))),
        *(datetime.datetime(2020, 1, 1, fold=1), datetime.datetime(2020, 1, 1)),
        *(datetime.date(2020, 1, 1), datetime.timedelta(1)),
    ],
}

# Functions that make equal values, which no program can distinguish.
INTERCHANGEABLE = {
    "zero": lambda: float("0.0"),
    "nan": lambda: float("nan"),
    "complex-nan": lambda: complex(float("nan"), 1.0),
    "numpy-nan": lambda: (np.float64("nan"),),
    "nan-in-subclass-of-float": lambda: Number("nan"),
    "tuple": lambda: (1, make_text(), (float("nan"),)),
    "long-tuple": lambda: (*(float(i) for i in range(40)), float("nan"), make_text()),
    "namedtuple": lambda: Point(make_text()),
    "frozenset": lambda: frozenset({make_text(), 1.0}),
    "composite-flag": lambda: Options.FAST | Options.EXACT,
    "dataclass": lambda: Config(make_text(), note=object()),
    "dataclass-with-list": lambda: Listed([make_text(), float("nan"), [1]]),
    "dataclass-with-its-own-equality": lambda: ByNote(object(), make_text()),
    "own-equality": lambda: Named(make_text()),
    "partial": lambda: partial(takes, key=make_text()),
    "method": lambda: HOLDER.get,
    "method-of-dataclass": lambda: Config(make_text()).get,
    "builtin-method": lambda: TABLE.get,
    "slice": lambda: slice(0, int("1000000")),
    "range": lambda: range(int("1000000")),
    "module": lambda: Static(make_text(), int("1000000")),
    "path": lambda: pathlib.PurePath(make_text()),
    "datetime": lambda: datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC),
}

# Values compared by identity, so that a change in place is not detected.
BY_IDENTITY = {
    "attribute": (lambda: Holder(1), lambda it: set_value(it, 2)),
    "method": (lambda: Holder(1).get, lambda it: set_value(it.__self__, 2)),
    "method-of-unhashable": (lambda: Unhashable([1]).get, lambda it: set_value(it.__self__, 2)),
    "builtin-method-of-dict": (lambda: {"a": 1}.get, lambda it: it.__self__.update(a=2)),
    "subclass-of-partial": (lambda: OwnPartial(takes, [1]), lambda it: it.args[0].append(2)),
    "in-dataclass": (lambda: Config(Holder(1)), lambda it: set_value(it.size, 2)),
}


def in_partial(make, edit):
    """A partial with the argument `make()`, and a function that changes the argument in place."""
    return lambda: partial(takes, make()), lambda it: edit(it.args[0])


# Values whose parts or hash are read at each call, so that a change in place is detected.
CHANGING = {
    "list-in-partial": in_partial(lambda: [1], lambda it: it.append(2)),
    "list-in-partial-to-equal": in_partial(lambda: [1], lambda it: it.__setitem__(0, True)),
    "set-in-partial": in_partial(lambda: {1}, lambda it: it.add(2)),
    "deque-in-partial": in_partial(lambda: collections.deque([1]), lambda it: it.append(2)),
    "bytearray-in-partial": in_partial(lambda: bytearray(b"a"), lambda it: it.append(2)),
    "array-in-partial": in_partial(lambda: array.array("i", [1]), lambda it: it.append(2)),
    "attribute-of-list-in-partial": in_partial(lambda: Items([1]), lambda it: labelled(it, "a")),
    "keyword-to-equal-numpy": (
        *(lambda: partial(takes, key=np.float32(1)), lambda it: set_key(it, np.float64(1))),
    ),
    "new-keyword": (lambda: partial(takes, key=1), lambda it: it.keywords.update(a=1)),
    "attribute-of-partial": (lambda: partial(takes), lambda it: labelled(it, "a")),
    "partial-in-dataclass": (lambda: Config(partial(takes, key=1)), lambda it: set_key(it.size, 2)),
    "dataclass-in-dataclass": (lambda: Settings(Settings(1)), lambda it: set_size(it.size, 2)),
    "method-of-dataclass": (lambda: Settings(1).get, lambda it: set_size(it.__self__, True)),
    "list-in-dataclass": (lambda: Listed([1]), lambda it: it.sizes.append(2)),
    "list-in-dataclass-to-equal": (lambda: Listed([1]), lambda it: it.sizes.__setitem__(0, True)),
    "own-hash": (lambda: Named("a"), lambda it: setattr(it, "name", "b")),
    "own-hash-to-equal": (lambda: Named(1), lambda it: setattr(it, "name", True)),
    "own-hash-to-equal-tuple": (lambda: Named((1,)), lambda it: setattr(it, "name", (True,))),
    "method-of-own-hash": (lambda: Named("a").get, lambda it: setattr(it.__self__, "name", "b")),
    "attribute-of-tuple": (lambda: Size((1,)), lambda it: labelled(it, "a")),
}


def show(value):
    """All content of a value as text, without the identity of objects."""
    if isinstance(value, types.MethodType):
        return f"method of {show(value.__self__)}"
    attributes = getattr(value, "__dict__", {})
    if isinstance(value, partial):
        content = show((value.args, value.keywords))
    elif isinstance(value, dict):
        content = [(key, show(each)) for key, each in value.items()]
    elif isinstance(value, tuple | list | set | collections.deque):
        content = [*map(show, value)]
    else:
        content = "" if attributes else repr(value)
    shown = [(name, show(each)) for name, each in attributes.items()]
    return f"{type(value).__name__} {content} {shown}"
