from typing import Any, NamedTuple

import equinox
import jax
import jax.numpy as jnp
import pytest

import eqxlike
from eqxlike import Module, nn


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
    model = Outer(
        False,
        nn.Sequential([nn.Dropout(), nn.Linear(2, 2, key=getkey())]),
        {"a": [Outer(False, nn.BayesianLinear(2, 2, key=getkey()), {})], "b": nn.Dropout()},
    )
    switched = nn.inference_mode(model)
    flags = [
        switched.inference,
        switched.inner[0].inference,
        switched.others["a"][0].inference,
        switched.others["a"][0].inner.inference,
        switched.others["b"].inference,
    ]
    assert flags == [True] * 5
    assert model.inner[0].inference is False
    assert switched.inner[1] == model.inner[1]


def test_there_and_back_is_the_same_model(getkey):
    model = nn.Sequential(
        [nn.Dropout(), nn.Lambda(jnp.tanh), nn.BayesianLinear(2, 2, key=getkey())]
    )
    assert nn.inference_mode(nn.inference_mode(model), value=False) == model


def test_any_pytree_node_with_the_attribute_counts():
    assert nn.inference_mode([Named(False, 1)]) == [Named(True, 1)]


@pytest.mark.parametrize("leaf", [Foreign(), Foreign, 3, None])
def test_leaves_stay_as_they_are(leaf):
    tree = [leaf, nn.Dropout()]
    switched = nn.inference_mode(tree)
    assert switched[0] is leaf
    assert switched[1].inference


def test_tree_without_flags_comes_back(getkey):
    model = nn.Linear(2, 2, key=getkey())
    assert nn.inference_mode(model) is model


def test_flag_switches_what_the_model_does(getkey):
    model = nn.Sequential([nn.Dropout(0.5), nn.BayesianLinear(3, 2, key=getkey())])
    call = jax.jit(lambda x: nn.inference_mode(model)(x))
    assert call(jnp.ones(3)).shape == (2,)
    with pytest.raises(RuntimeError, match="needs a key"):
        model(jnp.ones(3))


# --- beside Equinox -------------------------------------------------------------------------------


def test_tree_inference_is_inference_mode_as_on_equinox():
    assert eqxlike.tree_inference is eqxlike.nn.inference_mode
    assert equinox.tree_inference is equinox.nn.inference_mode


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

    class WithMethod(eqx.Module):
        x: Any

        def inference(self):
            return self.x

    return Flagged, Static, Derived, Delegating, WithMethod


# Each is a function from the library, and from the classes above made with it, to a tree.
TREES = {
    "a flag": lambda eqx, flagged, *_: flagged(False),
    "a flag below a flag": lambda eqx, flagged, *_: flagged(False, [flagged(False, 1)]),
    "a flag that is None": lambda eqx, flagged, *_: flagged(None, 1),
    "a flag that is an array": lambda eqx, flagged, *_: flagged(jnp.array(True)),
    "a flag that is a list": lambda eqx, flagged, *_: flagged([True, False]),
    "a flag that is an empty tuple": lambda eqx, flagged, *_: flagged(()),
    "one Module twice": lambda eqx, flagged, *_: [flagged(False)] * 2,
    "a named tuple": lambda eqx, *_: Named(False, 1),
    "a layer": lambda eqx, *_: {"a": eqx.nn.Dropout(0.1)},
    "leaves without a flag": lambda eqx, *_: [jnp.ones(2), len],
    "a leaf": lambda eqx, *_: 1,
    "nothing": lambda eqx, *_: None,
    "a property that hands a flag on": lambda eqx, flagged, *rest: rest[2](flagged(False)),
    "a static flag": lambda eqx, flagged, static, *_: static(False),
    "a property": lambda eqx, flagged, static, derived, *_: derived(1),
}


@pytest.mark.parametrize("tree", TREES)
def test_ends_as_on_equinox(tree):
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
BETTER = {
    "a leaf with the attribute": lambda flagged: [Foreign, flagged(False)],
    "two flags that are None": lambda flagged: [flagged(None), flagged(None)],
}


@pytest.mark.parametrize("tree", BETTER)
def test_switches_where_equinox_cannot(tree):
    flagged, *_ = make_nodes(eqxlike)
    assert nn.inference_mode(BETTER[tree](flagged))[1].inference is True
    flagged, *_ = make_nodes(equinox)
    with pytest.raises(ValueError, match="`where`"):
        equinox.nn.inference_mode(BETTER[tree](flagged))


def test_a_method_of_that_name_is_an_error_as_on_equinox():
    *_, with_method = make_nodes(eqxlike)
    with pytest.raises(
        ValueError, match=r"(?s)`where` does not specify .* must be an ordinary field"
    ):
        nn.inference_mode(with_method(1))
    *_, with_method = make_nodes(equinox)
    with pytest.raises(ValueError, match="`where`"):
        equinox.nn.inference_mode(with_method(1))


def test_the_error_of_a_flag_that_cannot_be_set_says_what_it_must_be():
    _, static, *_ = make_nodes(eqxlike)
    with pytest.raises(TypeError, match="must be an ordinary field") as caught:
        nn.inference_mode([nn.Dropout(), static(False)])
    assert "the static field `inference` of the Static at tree[1]" in str(caught.value)
