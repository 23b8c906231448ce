"""Where a test takes `eqx`, the same program holds on Equinox, whose behaviour is the measure."""

import copy
import dataclasses
import functools
import inspect
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import optax
import pytest

import eqxlike
from eqxlike._transforms._jit._dispatcher import Dispatcher
from tests.beside_equinox import both


def make(eqx):
    class Model(eqx.Module):
        weight: Any

        def scale(self, x: int = 2, /, *, twice: bool = False) -> int:
            """Scales."""
            return self.weight * x * (2 if twice else 1)

        def other(self, x):
            return self.weight + x

    return Model


class Pickled(eqxlike.Module):
    weight: Any

    def scale(self, x):
        return self.weight * x


@both
def test_is_called_with_the_instance(eqx):
    assert make(eqx)(3).scale(2, twice=True) == 12


@both
def test_is_a_module(eqx):
    assert isinstance(make(eqx)(3).scale, eqx.Module)


@both
def test_of_the_class_is_the_plain_function(eqx):
    assert inspect.isfunction(make(eqx).scale)


@both
def test_knows_instance_and_function(eqx):
    Model = make(eqx)
    model = Model(3)
    method = model.scale
    assert method.__self__ is model
    assert method.__func__ is Model.scale


@both
def test_has_the_instance_as_its_only_child(eqx):
    model = make(eqx)(3)
    children, _ = eqx.tree_flatten_one_level(model.scale)
    assert (len(children), children[0] is model, jtu.tree_leaves(model.scale)) == (1, True, [3])


@both
def test_key_paths_lead_through_the_instance(eqx):
    paths = [jtu.keystr(path) for path, _ in jtu.tree_leaves_with_path(make(eqx)(3).scale)]
    assert paths == [".__self__.weight"]


@both
def test_function_is_part_of_the_structure(eqx):
    Model = make(eqx)
    structures = [*map(jtu.tree_structure, (Model(3).scale, Model(4).scale, Model(3).other))]
    assert structures[0] == structures[1] != structures[2]


def test_of_a_transformed_function_has_it_and_the_instance_as_children():
    class Model(eqxlike.Module):
        weight: Any
        method = eqxlike.filter_jit(eqxlike.Partial(lambda array, self: array, jnp.ones(2)))

    model = Model(3)
    children, _ = eqxlike.tree_flatten_one_level(model.method)
    assert children == [Model.method, model]


@both
def test_a_map_reaches_the_arrays_of_the_instance(eqx):
    method = make(eqx)(jnp.array(1.0)).scale
    doubled = jtu.tree_map(lambda leaf: 2 * leaf if eqx.is_array(leaf) else leaf, method)
    assert doubled(3.0) == 6


@both
def test_name_is_that_of_the_function(eqx):
    assert make(eqx)(3).scale.__name__ == "scale"


@both
def test_documentation_is_that_of_the_function(eqx):
    assert make(eqx)(3).scale.__doc__ == "Scales."


@both
def test_qualified_name_is_that_of_the_function(eqx):
    Model = make(eqx)
    assert Model(3).scale.__qualname__ == Model.scale.__qualname__


@both
def test_module_is_that_of_the_function(eqx):
    assert make(eqx)(3).scale.__module__ == __name__


@both
def test_annotations_are_those_of_the_function(eqx):
    Model = make(eqx)
    assert Model(3).scale.__annotations__ == Model.scale.__annotations__


@both
def test_wraps_carries_the_documentation_on(eqx):
    @functools.wraps(make(eqx)(3).scale)
    def wrapper():
        pass

    assert (wrapper.__name__, wrapper.__doc__) == ("scale", "Scales.")


@both
def test_signature_is_that_of_the_function_without_self(eqx):
    signature = inspect.signature(make(eqx)(3).scale)
    assert str(signature) == "(x: int = 2, /, *, twice: bool = False) -> int"


@both
def test_signature_of_a_function_of_arbitrary_arguments_keeps_them(eqx):
    class Model(eqx.Module):
        def method(*args, key=None):
            pass

    assert str(inspect.signature(Model().method)) == "(*args, key=None)"


@both
def test_methods_are_equal_if_function_and_instance_are(eqx):
    Model = make(eqx)
    assert Model(3).scale == Model(3).scale
    assert Model(3).scale != Model(4).scale
    assert Model(3).scale != Model(3).other


@both
def test_equal_methods_have_equal_hashes(eqx):
    Model = make(eqx)
    assert hash(Model(3).scale) == hash(Model(3).scale)


@both
def test_of_an_instance_with_arrays_has_no_hash(eqx):
    with pytest.raises(TypeError, match="unhashable"):
        hash(make(eqx)(jnp.ones(2)).scale)


@both
def test_is_frozen(eqx):
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'tag'"):
        make(eqx)(3).scale.tag = 1


def test_repr_names_class_method_and_instance():
    text = repr(make(eqxlike)(3).scale)
    assert text.startswith("<bound method Model.scale of ")
    assert text.endswith("Model(weight=3)>")


@pytest.mark.parametrize(
    "duplicate",
    [copy.copy, copy.deepcopy, lambda method: pickle.loads(pickle.dumps(method))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_a_copy_is_equal_and_callable(duplicate):
    method = Pickled(3).scale
    assert duplicate(method) == method
    assert duplicate(method)(2) == 6


TRANSFORMED = {
    "grad": lambda eqx, f: jax.grad(f)(3.0),
    "vmap": lambda eqx, f: jax.vmap(f)(jnp.array([3.0, 4.0])),
    "scan": lambda eqx, f: jax.lax.scan(lambda c, x: (c, f(x)), 0, jnp.array([3.0]))[1],
    "partial": lambda eqx, f: jax.jit(functools.partial(f, 3.0))(),
    "filter_jit": lambda eqx, f: eqx.filter_jit(f)(jnp.array(3.0)),
    "filter_jit argument": lambda eqx, f: eqx.filter_jit(lambda f, x: f(x))(f, jnp.array(3.0)),
    "filter_grad": lambda eqx, f: eqx.filter_grad(f)(jnp.array(3.0)),
    "filter_vmap": lambda eqx, f: eqx.filter_vmap(f)(jnp.array([3.0, 4.0])),
}


@both
@pytest.mark.parametrize("transform", TRANSFORMED)
def test_may_be_transformed_like_a_function(eqx, transform):
    method = make(eqx)(jnp.array(2.0)).scale
    output = TRANSFORMED[transform](eqx, method)
    expected = TRANSFORMED[transform](eqx, lambda x: 2.0 * x)
    assert output.tolist() == expected.tolist()


ARGUMENT_OF = {
    "jit": lambda f: jax.jit(lambda f: f(3.0))(f),
    "returned by jit": lambda f: jax.jit(lambda f: f)(f)(3.0),
    "grad": lambda f: jax.grad(lambda f: f(3.0))(f).__self__.weight,
    "vmap": lambda f: jax.vmap(lambda f: f(3.0))(jtu.tree_map(lambda leaf: leaf[None], f)),
    "scan": lambda f: jax.lax.scan(lambda f, x: (f, f(x)), f, jnp.arange(3.0))[1],
    "while_loop": lambda f: jax.lax.while_loop(
        lambda f: f(1.0) < 9, lambda f: jtu.tree_map(lambda leaf: leaf + 1, f), f
    )(1.0),
    "cond": lambda f: jax.lax.cond(True, lambda f: f, lambda f: f, f)(3.0),
    "eval_shape": lambda f: jnp.ones(jax.eval_shape(lambda f: f(3.0), f).shape),
    "tree_map": lambda f: jtu.tree_map(lambda leaf: 2 * leaf, f)(3.0),
    "optax": lambda f: optax.apply_updates(f, f)(3.0),
}


@both
@pytest.mark.parametrize("name", ARGUMENT_OF)
def test_may_be_an_argument_of_what_knows_no_modules(eqx, name):
    model = make(eqx)(jnp.array(2.0))
    expected = {
        "grad": 3.0,
        "vmap": [6.0],
        "scan": [0.0, 2.0, 4.0],
        "while_loop": 9.0,
        "eval_shape": 1.0,
        "tree_map": 12.0,
        "optax": 12.0,
    }
    assert ARGUMENT_OF[name](model.scale).tolist() == expected.get(name, 6.0)


@both
def test_has_its_shape_evaluated_like_a_function(eqx):
    struct = eqx.filter_eval_shape(make(eqx)(jnp.ones((2, 3))).scale, jnp.ones((2, 3)))
    assert (struct.shape, struct.dtype) == ((2, 3), jnp.float32)


@both
def test_as_an_argument_is_differentiated_with_respect_to_the_instance(eqx):
    gradient = eqx.filter_grad(lambda method: method(3.0))(make(eqx)(jnp.array(2.0)).scale)
    assert gradient.__self__.weight == 3


@both
def test_as_an_argument_of_filter_jit_is_traced_once_for_all_weights(eqx):
    traces = []

    @eqx.filter_jit
    def call(method):
        traces.append(None)
        return method(2.0)

    Model = make(eqx)
    outputs = [float(call(Model(jnp.array(weight)).scale)) for weight in (1.0, 2.0, 3.0)]
    assert (outputs, len(traces)) == ([2.0, 4.0, 6.0], 1)


def test_as_an_argument_of_filter_jit_takes_the_fast_path_though_it_is_made_anew(monkeypatch):
    # The checking mode, in which every call goes the long way, is off for this test.
    monkeypatch.setattr("eqxlike._checking._depth", 0)
    long_ways = []
    find = Dispatcher.find
    monkeypatch.setattr(
        Dispatcher,
        "find",
        lambda *args, **kwargs: (long_ways.append(None), find(*args, **kwargs))[1],
    )
    call = eqxlike.filter_jit(lambda method, x: method(x))
    Model = make(eqxlike)
    models = [Model(jnp.array(weight)) for weight in (1.0, 2.0, 3.0)]
    assert [float(call(model.scale, jnp.array(2.0))) for model in models * 2] == [2, 4, 6] * 2
    assert len(long_ways) == 1
    assert float(call(models[0].other, jnp.array(2.0))) == 3


@both
def test_a_lambda_in_the_body_of_a_class_is_one(eqx):
    class Model(eqx.Module):
        weight: Any
        method = lambda self: self.weight

    assert isinstance(Model(1).method, eqx.Module)


@both
def test_a_function_assigned_to_a_class_is_one(eqx):
    class Model(eqx.Module):
        weight: Any

    Model.method = lambda self: self.weight
    assert isinstance(Model(1).method, eqx.Module)


def make_with_mixin(eqx):
    class Mixin:
        def scale(self, x):
            return self.weight * x

    class Model(Mixin, eqx.Module):
        weight: Any

    return Model


@both
def test_a_method_of_a_plain_mixin_is_one(eqx):
    assert isinstance(make_with_mixin(eqx)(1).scale, eqx.Module)


@both
def test_a_method_of_a_plain_mixin_is_differentiated_with_respect_to_the_instance(eqx):
    method = make_with_mixin(eqx)(jnp.array(1.0)).scale
    gradient = eqx.filter_grad(lambda method: method(2.0))(method)
    assert [leaf for leaf in jtu.tree_leaves(gradient) if eqx.is_array(leaf)] == [2.0]


@both
def test_a_method_of_a_plain_mixin_may_be_an_argument_of_filter_jit(eqx):
    method = make_with_mixin(eqx)(jnp.array(3.0)).scale
    assert eqx.filter_jit(lambda method: method(2.0))(method) == 6


@both
def test_a_call_method_is_a_plain_method(eqx):
    class Model(eqx.Module):
        def __call__(self):
            return 1

    assert inspect.ismethod(Model().__call__)


@both
def test_super_reaches_the_method_above(eqx):
    class Model(make(eqx)):
        def other(self, x):
            return super().other(x) + 100

    assert Model(1).other(2) == 103


@both
def test_a_method_of_another_module_may_be_a_field(eqx):
    class Holder(eqx.Module):
        function: Any

    holder = Holder(make(eqx)(jnp.array(2.0)).scale)
    doubled = jtu.tree_map(lambda leaf: 2 * leaf if eqx.is_array(leaf) else leaf, holder)
    assert doubled.function(3.0) == 12


@both
def test_partial_and_single_dispatch_methods_work(eqx):
    class Model(eqx.Module):
        weight: int

        def scale(self, x):
            return self.weight * x

        triple = functools.partialmethod(scale, 3)

        @functools.singledispatchmethod
        def kind(self, value):
            return "object"

        @kind.register
        def _(self, value: int):
            return "int"

    model = Model(2)
    assert (model.triple(), model.kind(1), model.kind("a")) == (6, "int", "object")


@both
def test_a_generator_method_yields(eqx):
    class Model(eqx.Module):
        weight: int

        def items(self):
            yield self.weight

    assert list(Model(2).items()) == [2]


def test_a_parameter_named_self_may_be_passed_by_keyword():
    class Model(eqxlike.Module):
        weight: int

        def method(this, self):
            return this.weight, self

    assert Model(1).method(self=2) == (1, 2)


@both
@pytest.mark.parametrize("name", ["filter_jit", "filter_grad", "filter_value_and_grad"])
def test_a_filtered_function_in_the_body_of_a_class_is_a_method(eqx, name):
    class Model(eqx.Module):
        weight: Any

        @getattr(eqx, name)
        def square(self, factor):
            return factor * self.weight**2

    expected = {"filter_jit": 18.0, "filter_grad": Model(jnp.array(12.0))}
    expected["filter_value_and_grad"] = (18.0, expected["filter_grad"])
    output = Model(jnp.array(3.0)).square(2.0)
    assert jtu.tree_map(float, output) == jtu.tree_map(float, expected[name])


@both
def test_a_vmapped_function_in_the_body_of_a_class_is_a_method(eqx):
    class Model(eqx.Module):
        weight: Any

        @eqx.filter_vmap(in_axes=(None, 0))
        def scale(self, x):
            return self.weight * x

    assert Model(jnp.array(2.0)).scale(jnp.array([1.0, 3.0])).tolist() == [2, 6]
