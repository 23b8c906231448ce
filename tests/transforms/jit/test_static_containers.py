"""Lists, dicts and other values that are not hashable, in static fields: compared by value."""

import collections
import copy
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxlike
from eqxlike import Module, filter_jit


class Model(Module):
    x: Any
    static: Any = eqxlike.field(static=True)


@dataclasses.dataclass
class Mutable:
    value: Any = 1


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: Any = 1


@dataclasses.dataclass(slots=True)
class Slotted:
    value: Any = 1


@dataclasses.dataclass(slots=True)
class Fieldless:
    pass


class Example(NamedTuple):
    """`change` writes into a value from `make`; `make_other` gives one that differs."""

    make: Any
    make_other: Any
    change: Any


def set_value(static):
    static.value = 5


EXAMPLES = {
    "list": Example(lambda: [1, 2], lambda: [1, 3], lambda s: s.append(3)),
    "nested": Example(lambda: [[1]], lambda: [[1.0]], lambda s: s[0].append(2)),
    "dict": Example(lambda: {"a": 1}, lambda: {"a": True}, lambda s: s.update(a=2)),
    "order": Example(lambda: {1: 1, 2: 2}, lambda: {2: 2, 1: 1}, lambda s: s.update({3: 3})),
    "set": Example(lambda: {1}, lambda: {2}, lambda s: s.add(4)),
    "bytes": Example(lambda: bytearray(b"a"), lambda: bytearray(b"b"), lambda s: s.append(3)),
    "in-a-tuple": Example(lambda: ([1], 2), lambda: ([True], 2), lambda s: s[0].append(1)),
    "deque": Example(
        lambda: collections.deque([1]),
        lambda: collections.deque([1], 3),
        lambda s: s.append(1),
    ),
    "mutable-dataclass": Example(Mutable, lambda: Mutable(True), set_value),
    "frozen-dataclass": Example(
        lambda: Frozen([1]), lambda: Frozen([True]), lambda s: s.value.append(2)
    ),
    "slice": Example(lambda: [slice(2)], lambda: [slice(2.0)], lambda s: s.insert(0, slice(None))),
    "slots": Example(Slotted, lambda: Slotted(1.0), set_value),
    "without-fields": Example(
        lambda: [Fieldless(), 1], lambda: [Fieldless(), True], lambda s: s.append(Fieldless())
    ),
    "of-treedefs": Example(
        lambda: [jax.tree.structure((1, 2))],
        lambda: [jax.tree.structure([1, 2])],
        lambda s: s.append(1),
    ),
}


def counting():
    """A jitted function that says what it saw, and the list of what its traces saw."""
    seen = []

    @filter_jit
    def function(model):
        seen.append(repr(model.static))
        return model, repr(model.static)

    return function, seen


def test_equal_values_and_copies_share_a_trace_and_others_have_their_own():
    for example in EXAMPLES.values():
        function, seen = counting()
        model = Model(jnp.ones(2), example.make())
        for each in (model, Model(jnp.ones(2), example.make()), copy.copy(model)):
            returned, _ = function(each)
            assert repr(returned.static) == repr(each.static)
            assert returned.static is model.static
        assert len(seen) == 1
        other = example.make_other()
        for _ in range(2):
            assert function(Model(jnp.ones(2), other))[1] == repr(other)


def test_a_change_in_place_is_seen():
    for example in EXAMPLES.values():
        function, _ = counting()
        model = Model(jnp.ones(2), example.make())
        for _ in range(2):
            function(model)
        example.change(model.static)
        for _ in range(2):
            assert function(model)[1] == repr(model.static)
        # What was traced first is another now, and its equals are served still.
        again = Model(jnp.ones(2), example.make())
        for _ in range(2):
            returned, seen = function(again)
            assert (repr(returned.static), seen) == (repr(again.static), repr(again.static))


def test_an_array_that_was_put_there_later_is_an_error_with_the_path():
    model = Model(jnp.ones(2), [1])
    model.static.append(np.ones(2))
    with pytest.raises(TypeError, match=r"static part of model, of type Model, is not hashable"):
        filter_jit(lambda model: model.x)(model)
