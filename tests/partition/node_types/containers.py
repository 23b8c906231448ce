"""Lists, dicts and classes derived from them."""

import collections

import jax.tree_util as jtu

from tests.partition.node_types.kind import Kind, array, read, text, twice


class RegisteredDict(dict):
    """Registered with JAX: its keys in the order of insertion."""


jtu.register_pytree_node(
    RegisteredDict,
    lambda value: (tuple(value.values()), tuple(value)),
    lambda keys, values: RegisteredDict(zip(keys, values, strict=True)),
)


class HashableList(list):
    """A leaf, as JAX knows no subclasses of lists."""

    __hash__ = object.__hash__  # pyright: ignore
    __eq__ = object.__eq__  # pyright: ignore


class HashableDict(dict):
    """A leaf, as JAX knows no subclasses of dicts."""

    __hash__ = object.__hash__  # pyright: ignore
    __eq__ = object.__eq__  # pyright: ignore


def mutate_list(value):
    value[0] = value[0] + 1
    value.append("more")


def mutate_dict(value):
    value["a"] = value["a"] + 1
    value["c"] = "more"


def reordered(kind):
    """Two of the same keys in different orders."""
    return lambda: [kind(a=array(1), b="text"), kind(b="text", a=array(2))]


CONTAINERS = {
    "none": Kind(lambda: [None, None]),
    "list": Kind(twice(lambda n: [array(n), n, []]), mutate=mutate_list),
    "list-subclass": Kind(lambda: [HashableList([1]), HashableList([1.0])], text),
    "dict": Kind(reordered(dict), mutate=mutate_dict),
    "dict-of-numbers": Kind(lambda: [{1: array(1), 2: "a"}, {1.0: array(2), 2.0: "a"}]),
    "dict-empty": Kind(lambda: [{}, {}]),
    "dict-subclass": Kind(lambda: [HashableDict(a=1), HashableDict(a=1.0)], text),
    "dict-subclass-registered": Kind(reordered(RegisteredDict), mutate=mutate_dict),
    "ordered-dict": Kind(reordered(collections.OrderedDict), mutate=mutate_dict),
    "default-dict": Kind(
        lambda: [collections.defaultdict(kind, a=array(1)) for kind in (int, list)],
        lambda value: (read(value), repr(value.default_factory)),
        mutate_dict,
    ),
}
