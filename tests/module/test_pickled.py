"""Copies by `copy`, `pickle`, `dataclasses.replace` and a map, also of transformed callables."""

import copy
import dataclasses
import functools
import operator
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from jaxtyping import Array, Float

import eqxlike
from tests.module.models import Inner, StaticAny


class Outer(eqxlike.Module):
    inner: Inner
    others: list
    scale: float = 1.0


class Initialised(eqxlike.Module):
    weight: Any
    doubled: Any

    def __init__(self, weight, /):
        self.weight = weight
        self.doubled = weight * 2


class Empty(eqxlike.Module):
    pass


def make_outer():
    return Outer(Inner(jnp.arange(3.0), "a"), [Inner(np.ones(2), "b"), None], scale=2.0)


COPIES = [
    copy.copy,
    copy.deepcopy,
    *(
        lambda module, protocol=protocol: pickle.loads(pickle.dumps(module, protocol))
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1)
    ),
    lambda module: jtu.tree_map(lambda leaf: leaf, module),
    dataclasses.replace,
]
MAKERS = {
    "nested": make_outer,
    "empty": Empty,
    "bound method": lambda: MODULE.method,
    "static only": lambda: StaticAny((1, "a")),
    "custom init": lambda: Initialised(np.ones(2)),
    "frozen": lambda: eqxlike.nn.freeze(make_outer()),
    "from filter_jit": lambda: eqxlike.filter_jit(lambda x: Inner(Inner(2 * x)))(jnp.ones(2)),
}


@pytest.mark.parametrize("maker", MAKERS)
def test_copy_equals_the_original_and_is_frozen(maker):
    # `replace` passes the fields to `__init__`, which has other parameters in two cases.
    for duplicate in COPIES[: -1 if maker in ("custom init", "bound method") else None]:
        original = MAKERS[maker]()
        copied = duplicate(original)
        assert type(copied) is type(original)
        assert copied is not original
        assert eqxlike.tree_equal(copied, original, typematch=True)
        with pytest.raises(dataclasses.FrozenInstanceError):
            copied.scale = 3.0


def test_cached_partition_is_neither_in_the_dictionary_nor_pickled():
    module = Inner(np.ones(2))
    before = pickle.dumps(module)
    eqxlike.filter_jit(lambda module: module.weight * 2)(module)
    assert pickle.dumps(module) == before
    assert list(vars(module)) == ["weight", "name"]


# --- transformed callables ----------------------------------------------------------------------


class Scale(eqxlike.Module):
    # This annotation cannot be pickled.
    factor: Float[Array, ""]
    shift: jax.Array | None = None

    def __call__(self, x: Float[Array, ""]) -> Float[Array, ""]:
        return self.factor * x**2

    def method(self, x: Float[Array, ""]) -> Float[Array, ""]:
        return self.factor * x**2

    @eqxlike.filter_jit
    def jitted(self, x: Float[Array, ""]) -> Float[Array, ""]:
        return self.factor * x**2

    @eqxlike.filter_grad
    def gradient(self, x: Float[Array, ""]) -> Float[Array, ""]:
        return self.factor * x**2


def square(x: Float[Array, ""]) -> Float[Array, ""]:
    """Squares a number."""
    return x**2


def scaled(factor: Any, x: Float[Array, ""]) -> Float[Array, ""]:
    return factor * x**2


MODULE = Scale(jnp.array(3.0))

TRANSFORMED = {
    "module": eqxlike.filter_jit(MODULE),
    "function": eqxlike.filter_jit(eqxlike.filter_grad(square)),
    "method": eqxlike.filter_jit(MODULE.method),
    "method that is jitted": eqxlike.filter_grad(MODULE.jitted),
    "method that is differentiated": MODULE.gradient,
    "functools.partial": eqxlike.filter_vmap(
        functools.partial(scaled, jnp.array(3.0)), in_axes=None, axis_size=2
    ),
    "jax.tree_util.Partial": eqxlike.filter_jit(keep_unused=True)(
        jtu.Partial(scaled, jnp.array(3.0))
    ),
    "Partial": eqxlike.filter_grad(eqxlike.Partial(scaled, jnp.array(3.0))),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_transformed_callable_survives_pickling(name):
    transformed = TRANSFORMED[name]
    loaded = pickle.loads(pickle.dumps(transformed))
    found, expected = (each(jnp.array(2.0)) for each in (loaded, transformed))
    assert eqxlike.tree_equal(found, expected)
    names = ("__name__", "__qualname__", "__doc__", "__module__", "__annotations__")
    shown = [[getattr(each, name, None) for name in names] for each in (loaded, transformed)]
    assert shown[0] == shown[1]


def test_our_classes_are_pickled_by_their_public_names():
    for each in (
        *(eqxlike.nn.Dropout(), eqxlike.Partial(scaled), eqxlike.bayes.Laplace()),
        eqxlike.filter_jit(scaled, donate="all"),
        *(eqxlike.filter_vmap(scaled), eqxlike.filter_grad(scaled)),
        Inner(eqxlike.filter_jit(eqxlike.filter_checkpoint(scaled))),
        Scale(1.0).jitted,
    ):
        pickled = pickle.dumps(each)
        assert b"._" not in pickled
        assert pickle.loads(pickled) == each
    # The class that `freeze` makes has no public name, but the class of the model has one.
    assert b"eqxlike.nn:PReLU" in pickle.dumps(eqxlike.nn.freeze(eqxlike.nn.PReLU()))


traces: list[int] = []


def count_traces(x):
    traces.append(1)
    return x


def test_unpickled_function_traces_at_most_once():
    loaded = pickle.loads(pickle.dumps(eqxlike.filter_jit(count_traces)))
    before = len(traces)
    for _ in range(3):
        loaded(jnp.array(1.0))
    assert len(traces) - before <= 1


@jax.jit
def squared(x):
    return x * x


def test_jitted_activations_are_copied_and_pickled_by_name():
    activations = [jax.nn.relu, jax.nn.silu, jax.nn.swish, jnp.tanh, jax.lax.square, squared]
    model = StaticAny((*activations, jax.nn.gelu))
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(map(operator.is_, copied.option, model.option))
    assert b"jax._src" not in pickle.dumps([jax.nn.relu, jnp.tanh])
    # A function without a name is copied as in JAX.
    assert copy.deepcopy(jax.jit(functools.partial(pow, 2)))(3) == 8
