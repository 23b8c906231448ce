"""Bound methods: children, text, hashes, and the fast path of `filter_jit`.

`programs/methods.py` compares the rest with Equinox.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxlike
from eqxlike._transforms._jit._dispatch import Dispatcher


class Scale(eqxlike.Module):
    weight: Any

    def __call__(self, x):
        return self.weight * x

    def scale(self, x):
        return self.weight * x

    def other(self, x):
        return self.weight + x


def test_method_from_a_transformed_function_has_function_and_instance_as_children():
    class Model(eqxlike.Module):
        weight: Any
        method = eqxlike.filter_jit(eqxlike.Partial(lambda array, self: array, jnp.ones(2)))

    model = Model(3)
    children, _ = eqxlike.tree_flatten_one_level(model.method)
    assert children == [Model.method, model]


def test_method_accepts_self_as_keyword_and_its_repr_names_class_and_instance():
    class Model(eqxlike.Module):
        weight: int

        def method(this, self):
            return this.weight, self

        def __call__(this, self):
            return this.weight, self

    assert Model(1).method(self=2) == Model(1)(self=2) == (1, 2)
    assert repr(Scale(3).scale) == "<bound method Scale.scale of Scale(weight=3)>"


def test_bound_method_as_an_argument_takes_the_fast_path(monkeypatch):
    # Disables the checking mode, in which no call takes the fast path.
    monkeypatch.setattr("eqxlike._partition._flatten._depth", 0)
    long_ways = []
    find = Dispatcher.find
    counted = lambda *args, **kwargs: long_ways.append(None) or find(*args, **kwargs)
    monkeypatch.setattr(Dispatcher, "find", counted)
    call = eqxlike.filter_jit(lambda method, x: method(x))
    models = [Scale(jnp.array(weight)) for weight in (1.0, 2.0, 3.0)]
    assert [float(call(model.scale, jnp.array(2.0))) for model in models * 2] == [2, 4, 6] * 2
    assert len(long_ways) == 1
    assert float(call(models[0].other, jnp.array(2.0))) == 3


HASHERS = [
    lambda f: jax.jit(f)(1.0),
    lambda f: jax.lax.scan(f, 1.0, jnp.ones(2)),
    lambda f: jax.jit(lambda g: 1, static_argnums=0)(f),
    lambda f: {f: 1},
]


def test_error_of_an_unhashable_module_names_the_leaf_and_the_fix():
    named = {
        "a Scale is not hashable: its leaf .weight is f32[2].": Scale(jnp.ones(2)),
        "the method Scale.scale is not hashable: its leaf .weight[0] is f64[1](numpy).": Scale(
            [np.ones(1)]
        ).scale,
        "a Partial is not hashable: its leaf .keywords['x'] is {1}.": eqxlike.Partial(max, x={1}),
    }
    for hasher in HASHERS:
        for message, function in named.items():
            with pytest.raises((TypeError, ValueError), match=re.escape(message)) as caught:
                hasher(function)
            for advice in ("filter_jit", "filter_checkpoint", "loops.scan", "lambda *args"):
                assert advice in str(caught.value)
    assert hash(Scale((1, "a")).scale) == hash(Scale([1, "a"]).scale)
