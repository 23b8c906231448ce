"""Many nodes of one Structure side by side, which are asked for and built in a loop."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqxlike import Module, field, filter_jit
from eqxlike._partition import flatten

NUM = 20


class WithList(Module):
    items: list
    size: int = field(static=True, default=1)


class Layer(Module):
    weight: jax.Array
    bias: object = None


class Pair(collections.namedtuple("Pair", ["left", "right"])):
    pass


def nodes(make):
    return [make(float(number)) for number in range(NUM)]


ELEMENTS = {
    "module": lambda number: Layer(jnp.array(number)),
    "module-with-list": lambda number: WithList([jnp.array(number), jnp.array(2 * number)]),
    "tuple": lambda number: (jnp.array(number), "text"),
    "namedtuple": lambda number: Pair(jnp.array(number), None),
    "dict": lambda number: {"b": jnp.array(number), "a": np.float32(number)},
    "foreign": lambda number: collections.OrderedDict(x=jnp.array(number), a=jnp.array(1.0)),
    "static": lambda number: ("only", ("static", 1)),
    "run": lambda number: [(jnp.array(number), i, "x") for i in [0] * 17],
}
CONTAINERS = {
    "list": list,
    "tuple": tuple,
    "dict": lambda elements: {f"key{i}": each for i, each in enumerate(elements)},
    "ordered-dict": lambda elements: collections.OrderedDict(enumerate(elements)),
    "in-module": lambda elements: WithList(list(elements)),
    "in-cached-module": lambda elements: Layer(jnp.zeros(()), tuple(elements)),
}


def same(first, second):
    leaves, treedef = jax.tree_util.tree_flatten(first)
    others, other_treedef = jax.tree_util.tree_flatten(second)
    assert treedef == other_treedef
    for leaf, other in zip(leaves, others, strict=True):
        assert leaf == other


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("element", ELEMENTS)
def test_calls_give_back_what_they_are_given(element, container):
    def make(shift):
        elements = nodes(lambda number: ELEMENTS[element](number + shift))
        return CONTAINERS[container](elements)

    jitted = filter_jit(lambda tree: tree)
    for shift in (0.0, 1.0, 2.0):
        same(jitted(make(shift)), make(shift))


@pytest.mark.parametrize("place", [0, 7, NUM - 1])
@pytest.mark.parametrize("element", ["module", "module-with-list", "tuple", "dict", "foreign"])
def test_one_that_differs_is_another_call(element, place):
    count = 0

    @filter_jit
    def structure(tree):
        nonlocal count
        count += 1
        return str(jax.tree_util.tree_structure(tree))

    elements = nodes(ELEMENTS[element])
    changed = [*elements]
    changed[place] = (jnp.zeros(()), "other")
    for tree in (elements, changed, elements, changed, elements[:-1], [*elements, elements[0]]):
        assert structure(tree) == str(jax.tree_util.tree_structure(tree))
    assert count == 4


def test_static_field_of_one_that_differs_is_seen():
    modules = [WithList([jnp.ones(())], size=1) for _ in range(NUM)]
    total = filter_jit(lambda modules: sum(module.size for module in modules))
    assert total(modules) == NUM
    modules[9] = WithList([jnp.ones(())], size=5)
    assert total(modules) == NUM + 4


@pytest.mark.parametrize("element", ["module-with-list", "dict", "foreign", "tuple"])
def test_source_does_not_grow_with_their_number(element):
    sizes = set()
    for count in (100, 300):
        elements = [ELEMENTS[element](float(number)) for number in range(count)]
        arrays, structure = flatten(elements)
        rebuild = structure.rebuilder(cache=True)
        sizes.add(len(rebuild.__code__.co_code))
        same(rebuild(tuple(arrays)), elements)
    assert len(sizes) == 1
