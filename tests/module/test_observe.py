"""Copies of models that report the calls of their layers."""

import contextlib

import jax
import jax.numpy as jnp

import eqxlike as eqx
from eqxlike import nn
from eqxlike._module import observe_calls


def observed(tree):
    """An observed copy of a tree, and the list of the calls that it reports, with their paths."""
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
    scale: jax.Array = eqx.field(default_factory=lambda: jnp.array(2.0))

    def __call__(self, x):
        return self.scale * x


class Copying(eqx.Module):
    scale: float

    def __call__(self):
        return Copying(1.0) if self.scale == 2.0 else type(self)(2.0)()


def test_calls_are_reported_with_arguments_and_output_and_inner_calls_come_first():
    module, calls = observed({"a": nn.Lambda(abs)})
    assert module["a"](-3, key="key") == 3
    ((path, caller, args, kwargs, output),) = calls
    assert (path, args, kwargs, output) == ("['a']", (-3,), {"key": "key"}, 3)
    assert caller is module["a"]
    model, calls = observed(nn.Sequential([nn.Lambda(abs), nn.Lambda(str)]))
    assert model(-3) == "3"
    assert [call[0] for call in calls] == [".layers[0]", ".layers[1]", ""]


def test_observed_copy_is_an_instance_of_the_class():
    module = Tagged()
    copy, calls = observed(module)
    assert isinstance(copy, Tagged)
    assert (type(copy).__name__, type(copy).__qualname__) == ("Tagged", "Tagged")
    assert copy.scale is module.scale
    assert type(module) is Tagged
    assert copy(3.0) == 6.0
    assert len(calls) == 1


def test_calls_are_reported_after_flattening_and_under_transformations():
    copy, calls = observed(Tagged())
    again = jax.tree.map(lambda leaf: leaf, copy)
    eqx.filter_jit(lambda model, x: jax.vmap(model)(x))(again, jnp.ones(4))
    assert len(calls) == 1


def test_frozen_module_stays_frozen():
    frozen = nn.freeze(Tagged())
    copy, calls = observed([frozen])
    assert eqx.filter(copy, eqx.is_inexact_array)[0].scale is None
    assert copy[0](3.0) == frozen(3.0) == 6.0
    assert len(calls) == 1


def test_layer_that_its_parent_unfreezes_is_observed():
    class Unfreezing(eqx.Module):
        inner: Tagged

        def __call__(self, x):
            return nn.unfreeze(self.inner)(x)

    copy, calls = observed(Unfreezing(nn.freeze(Tagged())))
    assert copy(3.0) == 6.0
    assert [call[0] for call in calls] == [".inner", ""]


def test_shared_layers_stay_shared_and_layers_in_wrappers_are_observed():
    shared = nn.Identity()
    copy, calls = observed([shared, {"a": shared}])
    assert copy[0] is copy[1]["a"]
    copy[1]["a"](1)
    assert calls[0][0] == "[0]"
    copy, calls = observed([eqx.filter_jit(nn.Lambda(jnp.abs)), Tagged().__call__])
    assert copy[0](jnp.array(-1.0)) == 1
    assert [call[0] for call in calls] == ["[0]"]


def test_layers_made_in_a_call_or_without_a_call_are_not_observed():
    copy, calls = observed(Copying(1.0))
    assert isinstance(copy(), Copying)
    assert len(calls) == 1

    class Settings(eqx.Module):
        inner: nn.Identity

    copy, calls = observed(Settings(nn.Identity()))
    assert type(copy) is Settings
    copy.inner(1)
    assert len(calls) == 1
