"""Calls of layers have their paths as names in what filtered functions trace."""

import abc
import concurrent.futures
import copy
import inspect
import pickle
import re
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import pytest

import eqxlike as eqx


class Scale(eqx.Module):
    factor: jax.Array

    def __call__(self, x, *, power=1):
        """Scales."""
        return self.factor * x


class Pair(eqx.Module):
    first: Scale
    second: Scale

    def __call__(self, x):
        return self.second(self.first(x))


def scale():
    return Scale(jnp.array(2.0))


def pair():
    return Pair(scale(), scale())


def scopes(function, *args):
    """The stacks of names in the lowered program, as far as they end in a product."""
    text = eqx.filter_jit(function).lower(*args).as_text(debug_info=True)
    return [
        each.partition("/")[2].removesuffix("/mul")
        for each in re.findall(r'loc\("(.*?/mul)"', text)
    ]


def test_layers_are_named_by_path_from_the_argument():
    assert scopes(lambda models, x: models["a"](x), {"a": pair()}, 3.0 * jnp.ones(())) == [
        "models['a']/.first",
        "models['a']/.second",
    ]


def test_model_that_is_compiled_itself_has_the_name_of_its_class():
    assert scopes(pair(), jnp.ones(())) == ["Pair/.first", "Pair/.second"]


def test_model_inside_a_wrapper_has_the_name_of_its_class():
    assert scopes(eqx.filter_vmap(scale()), jnp.ones(2)) == ["vmap(Scale)"]


def test_layers_of_one_form_are_told_apart_inside_a_gradient():
    def loss(layers, x):
        return layers[1](layers[0](x))

    names = scopes(eqx.filter_value_and_grad(loss), [scale(), scale()], jnp.ones(()))
    assert set(names) == {
        "jvp(layers[0])",
        "jvp(layers[1])",
        "transpose(jvp(layers[1]))",
        "transpose(jvp(layers[0]))",
    }


def test_rebuilt_layer_is_found_by_its_form():
    def run(model, x):
        return jax.grad(lambda model: model(x))(model)

    assert "jvp(model)/.first" in scopes(run, pair(), jnp.ones(()))


def test_rebuilt_layers_of_one_form_have_the_name_of_their_class():
    def run(layers, x):
        return jax.grad(lambda layers: layers[1](layers[0](x)))(layers)

    names = scopes(run, [scale(), scale()], jnp.ones(()))
    assert set(names) == {"jvp(Scale)", "transpose(jvp(Scale))"}


def test_layer_that_the_function_makes_has_the_name_of_its_class():
    assert scopes(lambda x: Scale(x)(x), jnp.ones(())) == ["Scale"]


def test_call_of_the_base_class_is_part_of_the_same_call():
    class More(Scale):
        def __call__(self, x, *, power=1):
            return super().__call__(x) + 1

    assert scopes(lambda model, x: model(x), More(jnp.array(2.0)), jnp.ones(())) == ["model"]


def test_call_that_was_replaced_is_named():
    class Mine(Scale):
        pass

    replacement: Any = lambda self, x: x * self.factor
    Mine.__call__ = replacement
    assert scopes(lambda model, x: model(x), Mine(jnp.array(2.0)), jnp.ones(())) == ["model"]


def test_separators_in_a_key_are_no_scopes():
    names = scopes(lambda models, x: models["a/(b)"](x), {"a/(b)": scale()}, jnp.ones(()))
    assert names == ["models['a__b_']"]


def test_nothing_is_named_after_a_trace_that_failed():
    def fails(model):
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        eqx.filter_jit(fails)(scale())
    jaxpr = jax.make_jaxpr(lambda x: scale()(x))(1.0)
    assert [str(each.source_info.name_stack) for each in jaxpr.eqns] == [""]


def test_program_is_that_without_names():
    model, x = pair(), jnp.ones(())
    with_names = jax.make_jaxpr(eqx.filter_jit(pair()))(x).eqns[0].params["jaxpr"].jaxpr
    without = jax.make_jaxpr(lambda first, second, x: second * (first * x))(
        model.first.factor, model.second.factor, x
    )
    assert str(with_names) == str(without.jaxpr)


def test_call_of_a_class_is_the_function_that_was_written():
    function = inspect.getattr_static(Scale, "__call__").__wrapped__
    assert Scale.__call__ is function
    assert Scale.__call__.__doc__ == "Scales."


def test_signature_stays_inside_a_trace_and_outside():
    outside = inspect.signature(scale())
    inside = []

    def look(model):
        inside.extend([inspect.signature(model), inspect.signature(model.__call__)])
        inside.append(inspect.signature(model.__call__, follow_wrapped=False))

    eqx.filter_jit(look)(scale())
    assert str(outside) == "(x, *, power=1)"
    assert inside == [outside] * 3


def test_model_that_was_traced_is_as_before():
    model = pair()
    before = jtu.tree_structure(model)
    eqx.filter_jit(model)(jnp.ones(()))
    assert jtu.tree_structure(model) == before
    assert jtu.tree_structure(pickle.loads(pickle.dumps(model))) == before


class Broken(eqx.Module):
    def __call__(self, x):
        raise RuntimeError("broken")


@pytest.mark.parametrize("call", [Broken(), eqx.filter_jit(lambda x: Broken()(x))])
def test_traceback_shows_no_frame_of_the_naming(call):
    with pytest.raises(RuntimeError, match="broken") as caught:
        call(1.0)
    files = [each.filename for each in traceback.extract_tb(caught.tb)]
    assert set(files) == {__file__}


def test_call_taken_from_vars_is_called_as_the_function():
    found = vars(Scale)["__call__"]
    assert found(scale(), jnp.ones(())) == 2.0
    assert inspect.signature(found) == inspect.signature(Scale.__call__)


def test_call_that_was_named_can_be_pickled_by_value():
    eqx.filter_jit(scale())(jnp.ones(()))
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
    assert eqx.filter_jit(run)(scale(), Concrete(3.0)) == 6.0


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
        model = Many([Labelled(jnp.ones(())) for _ in range(num_layers)])
        Label.comparisons = 0
        assert set(scopes(model, jnp.ones(()))) == {"Many/checkpoint/Labelled"}
        return Label.comparisons

    few, more, most = map(comparisons, (4, 8, 16))
    assert most - more <= 2 * (more - few)


def test_call_that_is_abstract_stays_so():
    class Abstract(eqx.Module):
        @abc.abstractmethod
        def __call__(self, x): ...

    with pytest.raises(TypeError, match="abstract"):
        Abstract()  # pyright: ignore[reportAbstractUsage]


def test_no_tracer_is_kept():
    def run(model, x):
        return eqx.filter_grad(lambda model: eqx.filter_checkpoint(model)(x))(model)

    with jax.checking_leaks():
        eqx.filter_jit(run)(pair(), jnp.ones(()))


def test_threads_name_their_own_traces():
    def run(name):
        return scopes(lambda models, x: models[name](x), {name: pair()}, jnp.ones(()))

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = list(pool.map(run, "abcd"))
    assert found == [[f"models['{name}']/.first", f"models['{name}']/.second"] for name in "abcd"]
