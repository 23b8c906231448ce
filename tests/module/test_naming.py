"""The name stack of a traced operation contains the path of its layer."""

import concurrent.futures
import copy
import inspect
import re
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import pytest

import eqxlike as eqx

ONE = jnp.ones(())


class Scale(eqx.Module):
    factor: jax.Array

    def __call__(self, x, *, power=1):
        """Scales."""
        return self.factor * x


class More(Scale):
    def __call__(self, x, *, power=1):
        return super().__call__(x) + 1


class Replaced(Scale):
    pass


replacement: Any = lambda self, x: x * self.factor
Replaced.__call__ = replacement


class Pair(eqx.Module):
    first: Scale
    second: Scale

    def __call__(self, x):
        return self.second(self.first(x))


def scale(cls=Scale):
    return cls(jnp.array(2.0))


def pair():
    return Pair(scale(), scale())


def call(model):
    return model(ONE)


def call_both(layers):
    return layers[1](layers[0](ONE))


def scopes(function, *args):
    """The name stacks of the multiplications in the lowered program."""
    text = eqx.filter_jit(function).lower(*args).as_text(debug_info=True)
    return [
        each.partition("/")[2].removesuffix("/mul")
        for each in re.findall(r'loc\("(.*?/mul)"', text)
    ]


class Concrete:
    """A node that cannot be flattened if it contains tracers."""

    def __init__(self, value):
        self.value = value


jtu.register_pytree_node(
    Concrete,
    lambda node: ((jnp.asarray(float(node.value)),), None),
    lambda _, children: Concrete(*children),
)


LAYERS = [scale(), scale()]
FORWARD = ["jvp(layers[0])", "jvp(layers[1])"]
BACKWARD = ["transpose(jvp(layers[0]))", "transpose(jvp(layers[1]))"]
# Tuples (function, argument, expected names).
NAMES = [
    (lambda m: m["a"](ONE), {"a": pair()}, ["m['a']/.first", "m['a']/.second"]),
    (lambda m: m["a/(b)"](ONE), {"a/(b)": scale()}, ["m['a__b_']"]),
    (pair(), ONE, ["Pair/.first", "Pair/.second"]),
    (eqx.filter_vmap(scale()), jnp.ones(2), ["vmap(Scale)"]),
    (lambda x: Scale(x)(x), ONE, ["Scale"]),
    (call, scale(More), ["model"]),
    (call, scale(Replaced), ["model"]),
    (lambda node: scale()(node.value), Concrete(1.0), ["Scale"]),
    # `filter_value_and_grad` distinguishes equal layers. `jax.grad` rebuilds the layers.
    (eqx.filter_value_and_grad(call_both), LAYERS, [*FORWARD, *BACKWARD]),
    (lambda layers: jax.grad(call_both)(layers), LAYERS, ["jvp(Scale)", "transpose(jvp(Scale))"]),
]


@pytest.mark.parametrize(("function", "arg", "expected"), NAMES)
def test_layers_are_named_by_path_in_an_argument_or_by_class(function, arg, expected):
    assert sorted(set(scopes(function, arg))) == expected


def test_equal_layers_have_the_name_of_the_shallowest():
    names = scopes(lambda state, model: jax.grad(call)(model), {"a": LAYERS}, scale())
    assert set(names) == {"transpose(jvp(model))"}


def test_failed_trace_removes_its_names():
    def fails(model):
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        eqx.filter_jit(fails)(scale())
    jaxpr = jax.make_jaxpr(lambda x: scale()(x))(1.0)
    assert [str(each.source_info.name_stack) for each in jaxpr.eqns] == [""]


def test_call_of_a_class_is_the_original_function_and_pickles_by_value():
    found = vars(Scale)["__call__"]
    assert Scale.__call__ is found.function
    assert Scale.__call__.__doc__ == found.__doc__ == "Scales."
    assert found(scale(), ONE) == 2.0
    assert inspect.signature(found) == inspect.signature(Scale.__call__)
    eqx.filter_jit(scale()).lower(ONE)
    # Tools that pickle functions by value read their globals.
    functions = [each for each in vars(copy.copy(found)).values() if inspect.isfunction(each)]
    assert functions == [Scale.__call__]


def test_signature_is_the_same_inside_and_outside_a_trace():
    outside = inspect.signature(scale())
    inside = []

    def look(model):
        inside.extend([inspect.signature(model), inspect.signature(model.__call__)])
        inside.append(inspect.signature(model.__call__, follow_wrapped=False))

    eqx.filter_jit(look)(scale())
    assert str(outside) == "(x, *, power=1)"
    assert inside == [outside] * 3


class Label:
    """A static value that counts its comparisons."""

    comparisons = 0

    def __eq__(self, other):
        Label.comparisons += 1
        return isinstance(other, Label)

    def __hash__(self):
        return 0


class Labelled(Scale):
    label: Label = eqx.field(static=True, default_factory=Label)


def call_checkpointed(layers):
    return [jax.checkpoint(call)(layer) for layer in layers]


def test_finding_rebuilt_layers_takes_linear_time():
    def comparisons(num_layers):
        layers = [Labelled(ONE) for _ in range(num_layers)]
        Label.comparisons = 0
        assert set(scopes(call_checkpointed, layers)) == {"checkpoint/Labelled"}
        return Label.comparisons

    few, more, most = map(comparisons, (2, 4, 8))
    assert most - more <= 2 * (more - few)


def test_names_keep_no_tracer_alive():
    def run(model, x):
        return eqx.filter_grad(lambda model: eqx.filter_checkpoint(model)(x))(model)

    with jax.checking_leaks():
        eqx.filter_jit(run).lower(pair(), ONE)


def test_threads_name_their_own_traces():
    def run(name):
        return scopes(lambda models, x: models[name](x), {name: scale()}, ONE)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, "abcd")) == [[f"models['{name}']"] for name in "abcd"]
