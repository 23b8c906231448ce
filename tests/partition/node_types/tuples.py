"""Tuples and namedtuples of every kind."""

import collections

import jax.tree_util as jtu

from eqxlike import is_array
from tests.partition.node_types.kind import Kind, array, read_fields, twice

Point = collections.namedtuple("Point", ["x", "y"])


class OwnIter(Point):
    __slots__ = ()

    def __iter__(self):
        return iter((self.y, self.x))


class OwnItems(Point):
    __slots__ = ()

    def __getitem__(self, index):
        return Point.__getitem__(self, 1 - index)

    def __len__(self):
        return 1


class OwnNew(Point):
    __slots__ = ()

    def __new__(cls, x, y):
        return super().__new__(cls, x, y if is_array(y) else f"{y}!")


class Registered(Point):
    """Registered with JAX by its owner, who makes each with a note beside its fields."""

    note = "made by another"

    def __new__(cls, x, y):
        self = super().__new__(cls, x, y)
        self.note = f"made with {y}"
        return self


jtu.register_pytree_node(
    Registered, lambda value: ((value.x,), value.y), lambda y, x: Registered(*x, y)
)


class WithAttribute(Point):
    """A namedtuple of which every instance has a `__dict__`."""


def of_point(kind):
    return twice(lambda n: kind(array(n), array(10 * n)))


read_point = read_fields("x", "y")

TUPLES = {
    "tuple": Kind(twice(lambda n: (array(n), n, (), None))),
    "namedtuple": Kind(twice(lambda n: Point(array(n), n)), read_point),
    "namedtuple-subclass": Kind(of_point(WithAttribute), read_point),
    "namedtuple-own-iter": Kind(of_point(OwnIter), read_point),
    "namedtuple-own-items": Kind(of_point(OwnItems), read_point),
    "namedtuple-own-new": Kind(of_point(OwnNew), read_point),
    "namedtuple-registered": Kind(
        lambda: [Registered(array(1), "a"), Registered(array(2), "b")],
        read_fields("x", "y", "note"),
    ),
}
