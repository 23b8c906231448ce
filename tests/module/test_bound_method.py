"""Bound methods: copies, text, and what `filter_jit` makes of them.

What else they are is compared with Equinox in `programs/methods.py`.
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

    def scale(self, x):
        return self.weight * x

    def other(self, x):
        return self.weight + x


def test_of_a_transformed_function_has_it_and_the_instance_as_children():
    class Model(eqxlike.Module):
        weight: Any
        method = eqxlike.filter_jit(eqxlike.Partial(lambda array, self: array, jnp.ones(2)))

    model = Model(3)
    children, _ = eqxlike.tree_flatten_one_level(model.method)
    assert children == [Model.method, model]


def test_repr_names_class_method_and_instance():
    assert repr(Scale(3).scale) == "<bound method Scale.scale of Scale(weight=3)>"


def test_a_parameter_named_self_may_be_passed_by_keyword():
    class Model(eqxlike.Module):
        weight: int

        def method(this, self):
            return this.weight, self

        def __call__(this, self):
            return this.weight, self

    assert Model(1).method(self=2) == Model(1)(self=2) == (1, 2)


def test_as_an_argument_of_filter_jit_takes_the_fast_path_though_it_is_made_anew(monkeypatch):
    # The checking mode, in which every call goes the long way, is off for this test.
    monkeypatch.setattr("eqxlike._partition._flatten._depth", 0)
    long_ways = []
    find = Dispatcher.find
    monkeypatch.setattr(
        Dispatcher,
        "find",
        lambda *args, **kwargs: (long_ways.append(None), find(*args, **kwargs))[1],
    )
    call = eqxlike.filter_jit(lambda method, x: method(x))
    models = [Scale(jnp.array(weight)) for weight in (1.0, 2.0, 3.0)]
    assert [float(call(model.scale, jnp.array(2.0))) for model in models * 2] == [2, 4, 6] * 2
    assert len(long_ways) == 1
    assert float(call(models[0].other, jnp.array(2.0))) == 3


HASHERS = {
    "jit": lambda f: jax.jit(f)(1.0),
    "scan": lambda f: jax.lax.scan(f, 1.0, jnp.ones(2)),
    "static": lambda f: jax.jit(lambda g: 1, static_argnums=0)(f),
    "dict": lambda f: {f: 1},
}


class Called(Scale):
    def __call__(self, x):
        return self.weight * x


def test_the_error_of_a_module_without_a_hash_says_which_leaf_and_what_to_write():
    named = {
        "a Called is not hashable: its leaf .weight is f32[2].": Called(jnp.ones(2)),
        "the method Scale.scale is not hashable: its leaf .weight[0] is f64[1](numpy).": Scale(
            [np.ones(1)]
        ).scale,
        "a Partial is not hashable: its leaf .keywords['x'] is {1}.": eqxlike.Partial(max, x={1}),
    }
    for hasher in HASHERS.values():
        for message, function in named.items():
            with pytest.raises((TypeError, ValueError), match=re.escape(message)) as caught:
                hasher(function)
            for advice in ("filter_jit", "filter_checkpoint", "loops.scan", "lambda *args"):
                assert advice in str(caught.value)
    assert hash(Scale((1, "a")).scale) == hash(Scale([1, "a"]).scale)
