"""What changes in place is seen by the next call."""

import array
import collections
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from eqxlike import filter_jit
from tests.transforms.jit_values import (
    Config,
    Holder,
    Pair,
    PrivatelySlotted,
    Slotted,
    describe,
    describe_all,
)


class Calls:
    """A callable with state."""

    def __init__(self, value):
        self.value = value

    def __call__(self, x):
        return describe(self.value), x

    def apply(self, x):
        return describe(self.value), x


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
