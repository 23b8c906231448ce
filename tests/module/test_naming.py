"""Calls of layers have their paths as names in what filtered functions trace."""

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


def call(model, x):
    return model(x)


def call_both(layers, x):
    return layers[1](layers[0](x))


def scopes(function, *args):
    """The stacks of names in the lowered program, as far as they end in a product."""
    text = eqx.filter_jit(function).lower(*args).as_text(debug_info=True)
    return [
        each.partition("/")[2].removesuffix("/mul")
        for each in re.findall(r'loc\("(.*?/mul)"', text)
    ]


@pytest.mark.parametrize(
    ("function", "args", "expected"),
    [
        (
            lambda models, x: models["a"](x),
            ({"a": pair()}, ONE),
            ["models['a']/.first", "models['a']/.second"],
        ),
        (pair(), (ONE,), ["Pair/.first", "Pair/.second"]),
        (eqx.filter_vmap(scale()), (jnp.ones(2),), ["vmap(Scale)"]),
        (lambda x: Scale(x)(x), (ONE,), ["Scale"]),
        (call, (scale(More), ONE), ["model"]),
        (call, (scale(Replaced), ONE), ["model"]),
        (lambda models, x: models["a/(b)"](x), ({"a/(b)": scale()}, ONE), ["models['a__b_']"]),
    ],
    ids=["argument", "itself", "wrapped", "made inside", "super", "replaced", "separators"],
)
def test_layers_are_named_by_path_from_the_argument_or_else_by_class(function, args, expected):
    assert scopes(function, *args) == expected


def test_layers_of_one_form_are_told_apart_inside_a_gradient():
    names = scopes(eqx.filter_value_and_grad(call_both), [scale(), scale()], ONE)
    forward = {"jvp(layers[0])", "jvp(layers[1])"}
    assert set(names) == forward | {f"transpose({name})" for name in forward}


def test_rebuilt_layers_of_one_form_have_the_name_of_their_class():
    def run(layers, x):
        return jax.grad(lambda layers: call_both(layers, x))(layers)

    names = scopes(run, [scale(), scale()], ONE)
    assert set(names) == {"jvp(Scale)", "transpose(jvp(Scale))"}


def test_shallowest_of_one_form_is_the_one_that_is_meant():
    def run(state, model, x):
        return jax.grad(lambda model: model(x))(model)

    assert "transpose(jvp(model))" in scopes(run, {"a": [scale(), scale()]}, scale(), ONE)


def test_nothing_is_named_after_a_trace_that_failed():
    def fails(model):
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        eqx.filter_jit(fails)(scale())
    jaxpr = jax.make_jaxpr(lambda x: scale()(x))(1.0)
    assert [str(each.source_info.name_stack) for each in jaxpr.eqns] == [""]


def test_call_of_a_class_is_the_function_that_was_written():
    found = vars(Scale)["__call__"]
    assert Scale.__call__ is found.function
    assert Scale.__call__.__doc__ == found.__doc__ == "Scales."
    assert found(scale(), ONE) == 2.0
    assert inspect.signature(found) == inspect.signature(Scale.__call__)


def test_signature_stays_inside_a_trace_and_outside():
    outside = inspect.signature(scale())
    inside = []

    def look(model):
        inside.extend([inspect.signature(model), inspect.signature(model.__call__)])
        inside.append(inspect.signature(model.__call__, follow_wrapped=False))

    eqx.filter_jit(look)(scale())
    assert str(outside) == "(x, *, power=1)"
    assert inside == [outside] * 3


def test_call_that_was_named_can_be_pickled_by_value():
    eqx.filter_jit(scale()).lower(ONE)
    again = copy.copy(vars(Scale)["__call__"])
    # What tools that pickle functions by value read: the globals of each function.
    functions = [each for each in vars(again).values() if inspect.isfunction(each)]
    assert functions == [Scale.__call__]


class Concrete:
    """A node that cannot be flattened with tracers in it."""

    def __init__(self, value):
        self.value = value


jtu.register_pytree_node(
    Concrete,
    lambda node: ((jnp.asarray(float(node.value)),), None),
    lambda _, children: Concrete(*children),
)


def test_node_that_cannot_be_flattened_again_is_traced_without_names():
    def run(model, node):
        return model(node.value)

    assert scopes(run, scale(), Concrete(1.0)) == ["model"]


class Label:
    """A static value that counts how often it is compared."""

    comparisons = 0

    def __eq__(self, other):
        Label.comparisons += 1
        return isinstance(other, Label)

    def __hash__(self):
        return 0


class Labelled(Scale):
    label: Label = eqx.field(static=True, default_factory=Label)


class Many(eqx.Module):
    layers: list

    def __call__(self, x):
        for layer in self.layers:
            x = jax.checkpoint(lambda layer, x: layer(x))(layer, x)
        return x


def test_rebuilt_layers_are_found_without_comparing_each_with_each():
    def comparisons(num_layers):
        model = Many([Labelled(ONE) for _ in range(num_layers)])
        Label.comparisons = 0
        assert set(scopes(model, ONE)) == {"Many/checkpoint/Labelled"}
        return Label.comparisons

    few, more, most = map(comparisons, (2, 4, 8))
    assert most - more <= 2 * (more - few)


def test_no_tracer_is_kept():
    def run(model, x):
        return eqx.filter_grad(lambda model: eqx.filter_checkpoint(model)(x))(model)

    with jax.checking_leaks():
        eqx.filter_jit(run).lower(pair(), ONE)


def test_threads_name_their_own_traces():
    def run(name):
        return scopes(lambda models, x: models[name](x), {name: scale()}, ONE)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, "abcd")) == [[f"models['{name}']"] for name in "abcd"]
