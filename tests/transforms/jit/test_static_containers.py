"""Unhashable values in static fields, such as lists and dicts, are compared by value."""

import copy
import dataclasses
import itertools
import threading
from collections import deque
from typing import Any

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


FIELD = [("value", Any, 1)]
Mutable = dataclasses.make_dataclass("Mutable", FIELD)
Frozen = dataclasses.make_dataclass("Frozen", FIELD, frozen=True)
Slotted = dataclasses.make_dataclass("Slotted", FIELD, slots=True)
Fieldless = dataclasses.make_dataclass("Fieldless", [], slots=True)


def set_value(static):
    static.value = 5


# Tuples (function that makes a value, function that makes a different value, change in place).
EXAMPLES = {
    "list": (lambda: [1, 2], lambda: [1, 3], lambda s: s.append(3)),
    "nested": (lambda: [[1]], lambda: [[1.0]], lambda s: s[0].append(2)),
    "dict": (lambda: {"a": 1}, lambda: {"a": True}, lambda s: s.update(a=2)),
    "order": (lambda: {1: 1, 2: 2}, lambda: {2: 2, 1: 1}, lambda s: s.update({3: 3})),
    "set": (lambda: {1}, lambda: {2}, lambda s: s.add(4)),
    "bytes": (lambda: bytearray(b"a"), lambda: bytearray(b"b"), lambda s: s.append(3)),
    "tuple": (lambda: ([1], 2), lambda: ([True], 2), lambda s: s[0].append(1)),
    "deque": (lambda: deque([1]), lambda: deque([1], 3), lambda s: s.append(1)),
    "mutable": (Mutable, lambda: Mutable(True), set_value),
    "frozen": (lambda: Frozen([1]), lambda: Frozen([True]), lambda s: s.value.append(2)),
    "slice": (lambda: [slice(2)], lambda: [slice(2.0)], lambda s: s.insert(0, slice(None))),
    "slots": (Slotted, lambda: Slotted(1.0), set_value),
    "without fields": (
        lambda: [Fieldless(), 1],
        lambda: [Fieldless(), True],
        lambda s: s.append(Fieldless()),
    ),
    "treedef": (lambda: [TUPLE], lambda: [jax.tree.structure([1, 2])], lambda s: s.append(1)),
}
TUPLE = jax.tree.structure((1, 2))


def counting():
    """A jitted function that returns the text of a static field, and the list of traced texts."""
    seen = []

    @filter_jit
    def function(model):
        seen.append(repr(model.static))
        return model, repr(model.static)

    return function, seen


def test_equal_static_values_share_a_trace_and_others_do_not():
    for make, make_other, _ in EXAMPLES.values():
        function, seen = counting()
        model = Model(jnp.ones(2), make())
        for each in (model, Model(jnp.ones(2), make()), copy.copy(model)):
            returned, _ = function(each)
            assert repr(returned.static) == repr(each.static)
            assert returned.static is model.static
        assert len(seen) == 1
        other = make_other()
        for _ in range(2):
            assert function(Model(jnp.ones(2), other))[1] == repr(other)


def test_next_call_sees_a_change_in_place():
    for make, _, change in EXAMPLES.values():
        function, _ = counting()
        model = Model(jnp.ones(2), make())
        for _ in range(2):
            function(model)
        change(model.static)
        for _ in range(2):
            assert function(model)[1] == repr(model.static)
        # The first trace is still used for values that equal the original value.
        again = Model(jnp.ones(2), make())
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


def test_unchanged_containers_take_the_fast_path_and_changed_ones_do_not(monkeypatch):
    # In the checking mode, no call takes the fast path.
    monkeypatch.setattr("eqxlike._partition._flatten._depth", 0)
    long_ways, find = [], Dispatcher.find
    monkeypatch.setattr(Dispatcher, "find", lambda *a, **k: long_ways.append(1) or find(*a, **k))
    for (name, change), sequence in zip(CHANGES.items(), itertools.cycle([tuple, list])):
        traces = []

        @filter_jit
        def step(nets, traces=traces):
            traces.append(repr([net.configs for net in nets]))
            return jax.tree.map(lambda x: x + 1, nets)

        config = make_config()
        configs = [config, config, make_config()]
        net = Net(sequence(Model(jnp.ones(2), each) for each in configs), config)
        # A model and its gradient, both returned by the last call or made by `jax.tree.map`.
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
        # Equal containers share the trace, but changing one container does not change the others.
        other = copy.deepcopy(net)
        step((other, other))
        assert len(traces) == 2
        other.layers[2].static["a"] = "other"
        step((other, other))
        assert len(traces) == 3, name
        del long_ways[:]


def test_new_container_at_the_address_of_a_deleted_container_is_distinguished():
    read = filter_jit(lambda model: repr(model.static))
    for number in range(8):
        config = {"value": [float(number)]}
        model = Model(jnp.ones(2), config)
        assert read(model) == read(model) == repr(config)
        config["value"] = [float(number + 100)]
        assert read(model) == repr(config)


def test_array_added_to_a_static_container_is_an_error_with_its_path():
    model = Model(jnp.ones(2), [1])
    model.static.append(np.ones(2))
    with pytest.raises(TypeError, match=r"static part of model, of type Model, is not hashable"):
        filter_jit(lambda model: model.x)(model)
