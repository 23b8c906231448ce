"""Nodes and leaves of every kind, and functions that read them."""

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

import eqxlike
from eqxlike import Module, field, is_array
from tests.partition.models import Point
from tests.partition.statics import DISTINGUISHABLE


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of node or leaf.

    - `make`: returns several similar values.
    - `read`: converts a value to a pytree of arrays and strings with its whole content.
    - `mutate`: changes a value in place.
    - `is_returned`: whether a function may return a value of this kind.
    """

    make: Callable[[], list[Any]]
    read: Callable[[Any], Any] = lambda value: read(value)
    mutate: Callable[[Any], None] | None = None
    is_returned: bool = True


def array(number):
    return jnp.full(2, number, jnp.float32)


def twice(make):
    """A function that returns `[make(1), make(2)]`."""
    return lambda: [make(1), make(2)]


def read(value):
    """The arrays of a pytree, the text of each static leaf, and the text of the structure."""
    leaves, treedef = jtu.tree_flatten(value)
    return [leaf if is_array(leaf) else repr(leaf) for leaf in leaves], str(treedef)


def read_fields(*names):
    """A function that reads attributes of a value without flattening it."""

    def read(value):
        found = [getattr(value, name) for name in names]
        return [each if is_array(each) else repr(each) for each in found]

    return read


class Box(Module):
    content: object
    mode: object = field(static=True, default="a")


class WithList(Module):
    items: list
    scale: jax.Array

    def __init__(self, number):
        self.items = [array(number)]
        self.scale = array(10 * number)

    def read(self):
        return self.scale, self.items[0], str(len(self.items))

    def append(self):
        self.items[0] = self.items[0] + 1
        self.items.append("more")


class OwnGetattribute(WithList):
    def __getattribute__(self, name):
        value = super().__getattribute__(name)
        return 10 * value if name == "scale" else value


class Wraps(Module):
    items: list

    @property
    def __wrapped__(self):
        return None

    def read(self):
        return self.items[0], self.__name__, self.__doc__  # pyright: ignore


def wrapping(number):
    def function():
        pass

    function.__name__ = f"name{number}"
    function.__doc__ = f"doc{number}"
    function.__annotations__ = {"unhashable": []}
    return eqxlike.module_update_wrapper(Wraps([array(number)]), function)


class Filled(Module):
    """The instance stores one field. The other is a default of the class."""

    first: object = "none"
    second: object = "none"

    def __init__(self, number):
        if number == 1:
            self.first = array(number)
        else:
            self.second = array(number)

    def read(self):
        return self.first, self.second


MODULES = {
    "module": Kind(twice(lambda n: Box(array(n), mode=f"mode{n}"))),
    "module-of-statics": Kind(lambda: [Box(each, mode=each) for each in (1, 1.0, True)]),
    "module-with-list": Kind(twice(WithList), WithList.read, WithList.append),
    "module-own-getattribute": Kind(twice(OwnGetattribute), WithList.read, WithList.append),
    "module-with-metadata": Kind(twice(wrapping), Wraps.read),
    "module-with-missing-fields": Kind(twice(Filled), Filled.read),
    "bound-method": Kind(twice(lambda n: WithList(n).read), lambda method: method()),
    "our-partial": Kind(
        twice(lambda n: eqxlike.Partial(jnp.add, array(n))), lambda partial: partial(1.0)
    ),
}


class OwnIter(Point):
    __slots__ = ()

    def __iter__(self):
        return iter((self.y, self.x))


class OwnNew(Point):
    __slots__ = ()

    def __new__(cls, x, y):
        return super().__new__(cls, x, y if is_array(y) else f"{y}!")


class Registered(Point):
    """A registered pytree node with a note in addition to its fields."""

    note = "made by another"

    def __new__(cls, x, y):
        self = super().__new__(cls, x, y)
        self.note = f"made with {y}"
        return self


jtu.register_pytree_node(
    Registered, lambda value: ((value.x,), value.y), lambda y, x: Registered(*x, y)
)


class WithAttribute(Point):
    """A namedtuple whose instances have a `__dict__`."""


read_point = read_fields("x", "y")

TUPLES = {
    "tuple": Kind(twice(lambda n: (array(n), n, (), None))),
    "namedtuple": Kind(twice(lambda n: Point(array(n), n)), read_point),
    "namedtuples-of-two-classes": Kind(
        lambda: [cls(array(1), array(2)) for cls in (Point, WithAttribute)],
        lambda value: (read_point(value), type(value).__name__),
    ),
    "namedtuple-registered": Kind(
        lambda: [Registered(array(1), "a"), Registered(array(2), "b")],
        read_fields("x", "y", "note"),
    ),
    **{
        name: Kind(twice(lambda n, cls=cls: cls(array(n), array(10 * n))), read_point)
        for name, cls in {
            "namedtuple-subclass": WithAttribute,
            "namedtuple-own-iter": OwnIter,
            "namedtuple-own-new": OwnNew,
        }.items()
    },
}


def mutate_list(value):
    value[0] = value[0] + 1
    value.append("more")


def mutate_dict(value):
    value["a"] = value["a"] + 1
    value["c"] = "more"


def reordered(kind):
    """Two mappings with the same keys in different orders."""
    return lambda: [kind(a=array(1), b="text"), kind(b="text", a=array(2))]


CONTAINERS = {
    "list": Kind(twice(lambda n: [array(n), n, []]), mutate=mutate_list),
    "dict": Kind(reordered(dict), mutate=mutate_dict),
    "dict-of-numbers": Kind(lambda: [{1: array(1), 2: "a"}, {1.0: array(2), 2.0: "a"}]),
    "dict-empty": Kind(lambda: [{}, {}]),
    "ordered-dict": Kind(reordered(collections.OrderedDict), mutate=mutate_dict),
    "default-dict": Kind(
        lambda: [collections.defaultdict(kind, a=array(1)) for kind in (int, list)],
        lambda value: (read(value), repr(value.default_factory)),
        mutate_dict,
    ),
}


class Foreign:
    """A node whose aux data may change."""

    def __init__(self, content, mode="a"):
        self.content = content
        self.mode = mode


class OtherForeign(Foreign):
    """Has the same children and aux data as a `Foreign`."""


for cls in (Foreign, OtherForeign):
    jtu.register_pytree_node(
        cls,
        lambda value: ((value.content,), value.mode),
        lambda mode, children, cls=cls: cls(*children, mode),
    )


read_content = read_fields("content", "mode")


def read_boxes(value):
    """The content of the innermost box, and the modes of all boxes."""
    modes = []
    while hasattr(value, "content"):
        modes.append(repr(value.mode))
        value = value.content
    return read(value), modes


def set_mode(value):
    value.mode = f"{value.mode} changed"


def set_inner_mode(value):
    value.content.content.content.mode = "changed"


def nested(number):
    """Nested registered nodes and Modules, alternately."""
    inner = Foreign(Box([array(number), number]), f"mode{number}")
    return Foreign(Box(Foreign(inner, mode=("b", number))))


FOREIGN = {
    "foreign-of-two-classes": Kind(
        lambda: [cls(array(1)) for cls in (Foreign, OtherForeign)],
        lambda value: (read_content(value), type(value).__name__),
    ),
    "foreign-equal-modes": Kind(
        lambda: [Foreign(array(1), mode) for mode in (1, 1.0, True)], read_content
    ),
    "foreign": Kind(twice(lambda n: Foreign(array(n), f"mode{n}")), read_content, set_mode),
    "foreign-of-modules": Kind(twice(nested), read_boxes, set_inner_mode),
    "jax-partial": Kind(
        lambda: [jtu.Partial(jnp.add, array(1)), jtu.Partial(jnp.subtract, array(1))],
        lambda partial: partial(1.0),
    ),
}


ARRAYS = {
    "jax-arrays": Kind(lambda: [jnp.ones(2), jnp.zeros(2), jnp.ones(3), jnp.ones(2, jnp.int32)]),
    "weak-types": Kind(lambda: [jnp.asarray(1), jnp.asarray(1.0), jnp.asarray(True)]),
    "numpy-arrays": Kind(
        lambda: [np.ones(2, np.float32), np.zeros(2, np.float32), np.ones((1, 2), np.int32)],
        mutate=lambda value: value.__iadd__(value.dtype.type(1)),
    ),
    "numpy-scalars": Kind(
        lambda: [np.float32(1), np.float32(-0.0), np.float32(0), np.int32(1), np.bool_(True)]
    ),
    "keys": Kind(lambda: [jax.random.key(0), jax.random.key(1), jax.random.key(0, impl="rbg")]),
    "refs": Kind(
        lambda: [jax.new_ref(array(1)), jax.new_ref(array(2))],
        lambda ref: ref[...],
        lambda ref: ref.__setitem__(..., 2 * ref[...]),
        is_returned=False,
    ),
}

# Static leaves that compare equal. `test_static_key.py` tests other leaves.
STATICS = {
    name: Kind(lambda name=name: [*DISTINGUISHABLE[name]], repr) for name in ("ones", "zeros")
}

KINDS = {**MODULES, **TUPLES, **CONTAINERS, **FOREIGN, **STATICS, **ARRAYS}
