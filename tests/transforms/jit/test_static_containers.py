"""Lists, dicts and other values that are not hashable, in static fields: compared by value."""

import collections
import copy
import dataclasses
import threading
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxlike
from eqxlike import Module, filter_jit
from eqxlike._transforms._jit._dispatch import Dispatcher


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
        lambda: collections.deque([1]), lambda: collections.deque([1], 3), lambda s: s.append(1)
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


class Net(Module):
    layers: Any
    config: Any = eqxlike.field(static=True)

    @property
    def configs(self):
        return [self.config, *(layer.static for layer in self.layers)]


def make_config():
    return {"a": 1, "b": [1, {"c": 2}], "d": {3}, "e": (4, [5]), "f": Mutable(Frozen([6]))}


def reorder(config):
    config["a"] = config.pop("a")


def replace_attributes(config):
    config["f"].__dict__ = {"value": 7}


CHANGES = {
    "added": lambda c: c.update(new=1),
    "changed": lambda c: c.update(a=2),
    "reordered": reorder,
    "nested": lambda c: c["b"][1].update(c=3),
    "in-a-list": lambda c: c["b"].append(1),
    "in-a-set": lambda c: c["d"].add(4),
    "in-a-tuple": lambda c: c["e"][1].append(6),
    "attribute": lambda c: setattr(c["f"], "value", 7),
    "in-an-attribute": lambda c: c["f"].value.value.append(7),
    "attributes": replace_attributes,
    "in-a-thread": lambda c: in_thread(lambda: c.update(a=2)),
}


def in_thread(change):
    thread = threading.Thread(target=change)
    thread.start()
    thread.join()


@pytest.mark.parametrize("sequence", [tuple, list])
def test_unchanged_containers_take_the_fast_path_and_each_change_is_seen(sequence, monkeypatch):
    # The checking mode, in which every call goes the long way, is off for this test.
    monkeypatch.setattr("eqxlike._partition._flatten._depth", 0)
    long_ways, find = [], Dispatcher.find
    monkeypatch.setattr(Dispatcher, "find", lambda *a, **k: long_ways.append(1) or find(*a, **k))
    for name, change in CHANGES.items():
        traces = []

        @filter_jit
        def step(nets, traces=traces):
            traces.append(repr([net.configs for net in nets]))
            return jax.tree.map(lambda x: x + 1, nets)

        config = make_config()
        configs = [config, config, make_config()]
        net = Net(sequence(Model(jnp.ones(2), each) for each in configs), config)
        # As a model and its gradient; and as a model that its own Python code makes at each call.
        nets = first = (net, jax.tree.map(lambda x: x, net))
        for _ in range(3):
            nets = step(nets)
            step(jax.tree.map(lambda x: x, first))
        assert (len(traces), len(long_ways)) == (1, 1), name
        assert all(a is b for a, b in zip(nets[1].configs, net.configs, strict=True))
        change(config)
        for _ in range(3):
            nets = step(nets)
            step(first)
        assert traces[1:] == [repr([each.configs for each in nets])], name
        assert len(long_ways) <= 4, name
        assert float(nets[0].layers[0].x[0]) == 7
        # Equal containers share the trace, and are watched by themselves.
        other = copy.deepcopy(net)
        step((other, other))
        assert len(traces) == 2
        other.layers[2].static["a"] = "other"
        step((other, other))
        assert len(traces) == 3, name
        del long_ways[:]


def test_a_container_is_not_taken_for_one_that_was_there_before():
    read = filter_jit(lambda model: repr(model.static))
    for number in range(8):
        config = {"value": [float(number)]}
        model = Model(jnp.ones(2), config)
        assert read(model) == read(model) == repr(config)
        config["value"] = [float(number + 100)]
        assert read(model) == repr(config)


def test_an_array_that_was_put_there_later_is_an_error_with_the_path():
    model = Model(jnp.ones(2), [1])
    model.static.append(np.ones(2))
    with pytest.raises(TypeError, match=r"static part of model, of type Model, is not hashable"):
        filter_jit(lambda model: model.x)(model)
