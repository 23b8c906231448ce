"""Precision policies: the dtypes of parameters, computations and outputs."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqxlike as eqx
from eqxlike import nn
from tests.nn.arrays import normal
from tests.nn.mistakes import each_mistake

BFLOAT16 = "params=float32,compute=bfloat16,output=float32"


class Probe(eqx.Module):
    """Records the dtypes of its weight and its input."""

    weight: jax.Array
    seen: list = eqx.field(static=True, default_factory=lambda: Seen())

    def __call__(self, x):
        self.seen.append((self.weight.dtype.name, x.dtype.name))
        return self.weight.astype(x.dtype) * x


class Seen(list):
    """A hashable list, for a static field."""

    __hash__ = object.__hash__


class KeptProbe(Probe):
    keeps_precision: ClassVar[bool] = True


def dtypes_of(tree):
    return {leaf.dtype.name for leaf in jax.tree.leaves(eqx.filter(tree, eqx.is_inexact_array))}


@pytest.fixture
def x(getkey):
    return normal(getkey(), (5, 3))


def test_parameters_are_stored_in_one_dtype_and_the_model_computes_in_another():
    probe = Probe(jnp.ones(2))
    mixed = nn.MixedPrecision(probe, nn.Policy("float32", "float16", "bfloat16"))
    for out in (mixed(jnp.ones(2)), mixed(x=jnp.ones(2))):
        assert out.dtype == jnp.bfloat16
    assert probe.seen == [("float16", "float16")] * 2
    assert mixed.model.weight.dtype == jnp.float32


def test_layer_that_keeps_its_precision_or_is_chosen_is_not_cast():
    probe = KeptProbe(jnp.ones(2))
    nn.MixedPrecision(nn.Sequential([nn.Lambda(probe)]), BFLOAT16)(jnp.ones(2))
    assert probe.seen == [("float32", "bfloat16")]
    probe = Probe(jnp.ones(2))
    mixed = nn.MixedPrecision([probe], "p=f32,c=bf16", keep=(Probe, nn.Linear))
    out, kept = mixed.call(lambda layers, x: (layers[0](x), layers[0]), jnp.ones(2))
    assert probe.seen == [("float32", "bfloat16")]
    assert (dtypes_of(out), dtypes_of(kept)) == ({"bfloat16"}, {"float32"})


def test_layer_keeps_its_own_policy():
    probe = Probe(jnp.ones(2, jnp.float16))
    inner = nn.MixedPrecision(probe, nn.Policy("float16", "float32", "bfloat16"))
    outer = nn.MixedPrecision([inner], BFLOAT16)
    out = outer.call(lambda layers, x: (x, layers[0](x)), jnp.ones(2))
    assert probe.seen == [("float32", "float32")]
    assert dtypes_of(outer) == {"float16"}
    assert dtypes_of(out) == {"float32"}


def test_frozen_arrays_stay_frozen_and_are_cast():
    probe, asked = Probe(jnp.ones(2)), set()
    mixed = nn.MixedPrecision(nn.freeze(probe), BFLOAT16, keep=lambda node: asked.add(type(node)))
    mixed(jnp.ones(2))
    assert probe.seen == [("bfloat16", "bfloat16")]
    assert {kind.__name__ for kind in asked} == {"Probe", "ArrayImpl", "tuple", "dict"}
    assert not jax.tree.leaves(eqx.filter(mixed, eqx.is_inexact_array))


def test_policy_may_store_float64_and_compute_in_float32():
    with jax.enable_x64(True):
        norm = nn.LayerNorm(2, dtype=jnp.float64)
        x = jnp.array([1.0, 2.0])
        mixed = nn.MixedPrecision((norm, Probe(jnp.ones(2))), "p=f64,c=f32,o=f64")
        out = mixed.call(lambda layers, x: layers[1](x), x)
        kept = nn.MixedPrecision(norm, BFLOAT16)
        assert dtypes_of((x, out)) == dtypes_of(mixed) == dtypes_of(kept) == {"float64"}
        assert mixed.model[1].seen == [("float32", "float32")]


def make_stateful(key):
    first, second = jax.random.split(key)
    norm = nn.BatchNorm(4, "batch", mode="batch")
    layers = [nn.Linear(3, 4, key=first), norm, nn.Linear(4, 2, key=second)]
    return nn.MixedPrecision(nn.Sequential(layers), "c=f16,o=f32")


def apply(mixed, x, state):
    axes = {"in_axes": (0, None), "out_axes": (0, None), "axis_name": "batch"}
    return jax.vmap(mixed, **axes)(x, state)


def test_running_statistics_stay_float32(x, getkey):
    mixed, state = nn.make_with_state(make_stateful)(getkey())
    traces = []

    @eqx.filter_jit
    @eqx.filter_value_and_grad(has_aux=True)
    def step(mixed, x, state):
        traces.append(None)
        out, state = apply(mixed, x, state)
        return jnp.mean(out**2), state

    for _ in range(2):
        (_, state), gradient = step(mixed, x, state)
    weight, bias = map(np.asarray, (mixed.model[0].weight, mixed.model[0].bias))
    hidden = np.asarray(x) @ weight.T + bias
    mean, _ = state.get(mixed.model[1].batch_state_index)
    assert dtypes_of((state, gradient)) == {"float32"}
    assert len(traces) == 1
    np.testing.assert_allclose(np.asarray(mean) / (1 - 0.99**2), hidden.mean(0), atol=2e-3)


def test_sequential_passes_the_state_to_a_model_with_a_policy(x, getkey):
    make = lambda key: nn.Sequential([make_stateful(key)])
    whole, state = nn.make_with_state(make)(getkey())
    out, state = eqx.filter_jit(apply)(whole, x, state)
    assert out.dtype == jnp.float32
    assert state.get(whole[0].model[1].batch_counter) == 1
    assert not nn.MixedPrecision(nn.Identity(), BFLOAT16).is_stateful()


def test_parameters_of_norms_are_cast_to_more_precise_dtypes_only():
    norms = (nn.LayerNorm(2), nn.RMSNorm(2), nn.GroupNorm(1, 2))
    policy = nn.Policy("float16", "bfloat16", "float16")
    assert dtypes_of(policy.cast_to_parameter(norms)) == {"float32"}
    assert dtypes_of(policy.cast_to_compute(norms)) == {"float32"}
    norm = nn.MixedPrecision(nn.LayerNorm(2, dtype=jnp.bfloat16), BFLOAT16)
    assert dtypes_of(norm) == {"float32"}


def test_only_floating_arrays_are_cast(getkey):
    arrays = [jnp.arange(2), jnp.array(True), jnp.ones(2, jnp.complex64), getkey()]
    tree = [*arrays, 1.5, "a", None]
    policy = nn.Policy.parse(BFLOAT16)
    assert eqx.tree_equal(policy.cast_to_compute(tree), tree)
    cast = policy.cast_to_compute([np.ones(2, np.float32), np.float32(1)])
    assert dtypes_of(cast) == {"bfloat16"}


def test_policy_is_read_from_a_string():
    for text, dtypes in {
        BFLOAT16: ("float32", "bfloat16", "float32"),
        "output=float32, compute=float16": ("float32", "float16", "float32"),
        "p=f32,c=bf16": ("float32", "bfloat16", "bfloat16"),
        "params=bfloat16": ("bfloat16",) * 3,
        "f16": ("float16",) * 3,
    }.items():
        assert nn.Policy.parse(text) == nn.Policy(*dtypes)


MISTAKES = {
    ValueError: {
        "compute_dtype.*got int8": lambda: nn.Policy("float32", "int8", "float32"),
        "parameter_dtype.*got None": lambda: nn.Policy(None, "float32", "float32"),
        "got 'weights=float32'": lambda: nn.Policy.parse("weights=float32"),
        "got 'params=f32' in": lambda: nn.Policy.parse("p=f32,params=f32"),
        "compute_dtype.*got 'float17'": lambda: nn.Policy.parse("c=float17"),
        "parameter_dtype.*got float": lambda: nn.Policy(np.longdouble, "f32", "f32"),
        "output_dtype.*got 32": lambda: nn.Policy("f32", "f32", 32),
    },
    TypeError: {
        "nn.Policy or a string .* got None": lambda: nn.MixedPrecision(nn.Identity(), None),
        "`keep` must be .* got 'norm'": lambda: nn.MixedPrecision(
            nn.Identity(), "f16", keep="norm"
        ),
    },
}


@each_mistake(MISTAKES)
def test_mistakes_are_refused(error, words, call):
    with pytest.raises(error, match=words):
        call()
