import contextlib

import jax
import jax.numpy as jnp
import numpy as np

import eqxlike as eqx
from eqxlike import nn
from eqxlike._module import observe_calls


def observed(tree):
    """A tree, and the list to which the calls in it are reported, by path."""
    calls = []

    def reporter(path, module):
        @contextlib.contextmanager
        def report(*call):
            yield lambda output: calls.append((jax.tree_util.keystr(path), *call, output))

        return report

    return observe_calls(tree, reporter), calls


class Registered(eqx.Module):
    def __init_subclass__(cls, *, tag, **kwargs):
        super().__init_subclass__(**kwargs)


class Tagged(Registered, tag="a"):
    def __call__(self):
        return "called"


class Copying(eqx.Module):
    scale: float

    def __call__(self):
        return Copying(1.0) if self.scale == 2.0 else type(self)(2.0)()


def test_call_is_reported_with_arguments_and_output():
    module, calls = observed({"a": nn.Lambda(abs)})
    assert module["a"](-3, key="key") == 3
    ((path, caller, args, kwargs, output),) = calls
    assert (path, args, kwargs, output) == ("['a']", (-3,), {"key": "key"}, 3)
    assert caller is module["a"]


def test_inner_call_is_reported_before_the_outer_one():
    model, calls = observed(nn.Sequential([nn.Lambda(abs), nn.Lambda(str)]))
    assert model(-3) == "3"
    assert [call[0] for call in calls] == [".layers[0]", ".layers[1]", ""]


def test_class_and_fields_are_those_of_the_module(getkey):
    linear = nn.Linear(2, 3, key=getkey())
    copy, _ = observed(linear)
    assert isinstance(copy, nn.Linear)
    assert type(copy).__name__ == "Linear"
    assert copy.weight is linear.weight
    assert copy.in_features == 2
    assert type(linear) is nn.Linear


def test_report_goes_through_flattening_and_transformations(getkey):
    copy, calls = observed(nn.Linear(2, 3, key=getkey()))
    again = jax.tree.map(lambda leaf: leaf, copy)
    eqx.filter_jit(lambda model, x: jax.vmap(model)(x))(again, jnp.ones((4, 2)))
    assert len(calls) == 1


def test_frozen_module_stays_frozen(getkey):
    linear = nn.freeze(nn.Linear(2, 3, key=getkey()), lambda linear: linear.weight)
    copy, calls = observed([linear])
    assert eqx.filter(copy, eqx.is_inexact_array)[0].weight is None
    np.testing.assert_array_equal(copy[0](jnp.ones(2)), linear(jnp.ones(2)))
    assert len(calls) == 1


def test_shared_module_stays_shared():
    shared = nn.Identity()
    copy, calls = observed([shared, {"a": shared}])
    assert copy[0] is copy[1]["a"]
    copy[1]["a"](1)
    assert calls[0][0] == "[0]"


def test_wrapper_is_looked_through():
    copy, calls = observed([eqx.filter_jit(nn.Lambda(jnp.abs))])
    assert copy[0](jnp.array(-1.0)) == 1
    assert [call[0] for call in calls] == ["[0]"]


def test_any_class_may_be_observed():
    copy, calls = observed(Tagged())
    assert copy() == "called"
    assert len(calls) == 1


def test_module_that_the_model_makes_itself_is_not_reported():
    copy, calls = observed(Copying(1.0))
    assert isinstance(copy(), Copying)
    assert len(calls) == 1


def test_module_that_cannot_be_called_is_left_as_it_is():
    class Settings(eqx.Module):
        inner: nn.Identity

    copy, calls = observed(Settings(nn.Identity()))
    assert type(copy) is Settings
    copy.inner(1)
    assert len(calls) == 1
