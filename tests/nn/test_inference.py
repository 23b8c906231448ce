"""`inference_mode` sets every flag. Its result or error equals Equinox."""

from typing import Any, NamedTuple

import equinox
import pytest

import eqxlike
from eqxlike import Module, nn
from tests.nn.arrays import filled


class Outer(Module):
    inference: bool
    inner: Module
    others: dict


class Named(NamedTuple):
    inference: bool
    other: int


class Foreign:
    inference = False


def test_sets_every_flag_at_every_depth(getkey):
    linear = filled(nn.Linear, 2, 2, key=getkey())
    bayesian = filled(nn.BayesianLinear, 2, 2, key=getkey())
    others = {"a": [Outer(False, bayesian, {})], "b": nn.Dropout()}
    model = Outer(False, nn.Sequential([nn.Dropout(), linear]), others)
    switched = nn.inference_mode(model)
    outer = switched.others["a"][0]
    flagged = switched, switched.inner[0], outer, outer.inner, switched.others["b"]
    assert [each.inference for each in flagged] == [True] * 5
    assert model.inner[0].inference is False
    assert switched.inner[1] == model.inner[1]
    assert eqxlike.tree_inference(linear) is linear


def make_nodes(eqx):
    class Flagged(eqx.Module):
        inference: Any
        x: Any = None

    class Static(eqx.Module):
        inference: bool = eqx.field(static=True)

    class Derived(eqx.Module):
        x: Any

        @property
        def inference(self):
            return 3

    class Delegating(eqx.Module):
        inner: Any

        @property
        def inference(self):
            return self.inner.inference

    return Flagged, Static, Derived, Delegating


# Functions that make a tree from the library and from the classes of `make_nodes`.
TREES = {
    "a flag below a flag": lambda eqx, flagged, *_: flagged(False, [flagged(False, 1)]),
    "a flag that is None": lambda eqx, flagged, *_: flagged(None, 1),
    "a flag that is a list": lambda eqx, flagged, *_: flagged([True, False]),
    "a flag that is an empty tuple": lambda eqx, flagged, *_: flagged(()),
    "one Module twice": lambda eqx, flagged, *_: [flagged(False)] * 2,
    "a named tuple": lambda eqx, *_: Named(False, 1),
    "a property that hands a flag on": lambda eqx, flagged, *rest: rest[2](flagged(False)),
    "a static flag": lambda eqx, flagged, static, *_: static(False),
    "a property": lambda eqx, flagged, static, derived, *_: derived(1),
}


@pytest.mark.parametrize("tree", TREES)
def test_result_or_error_is_the_same_as_in_equinox(tree):
    outputs = {eqxlike: [], equinox: []}
    for eqx, ends in outputs.items():
        for value in (True, False, 7):
            try:
                switched = eqx.tree_inference(TREES[tree](eqx, *make_nodes(eqx)), value)
                ends.append(repr(switched))
            except Exception as error:
                ends.append(type(error))
    assert outputs[eqxlike] == outputs[equinox]


# Equinox raises at these trees.
def test_leaves_with_the_attribute_are_unchanged_and_none_is_a_flag():
    flagged, *_ = make_nodes(eqxlike)
    for first in (Foreign(), Foreign):
        switched = nn.inference_mode([first, flagged(False)])
        assert switched[0] is first
        assert switched[1].inference is True
    both = nn.inference_mode([flagged(None), flagged(None)])
    assert [each.inference for each in both] == [True, True]


def test_flag_that_cannot_be_set_is_refused_with_its_path():
    class WithMethod(Module):
        x: Any

        def inference(self):
            return self.x

    with pytest.raises(ValueError, match="must be an ordinary field"):
        nn.inference_mode(WithMethod(1))
    _, static, *_ = make_nodes(eqxlike)
    with pytest.raises(TypeError, match="must be an ordinary field") as caught:
        nn.inference_mode([nn.Dropout(), static(False)])
    assert "the static field `inference` of the Static at tree[1]" in str(caught.value)
