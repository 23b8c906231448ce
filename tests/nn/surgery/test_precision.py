import io
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest

import eqxlike as eqx
from eqxlike import nn

BFLOAT16 = "params=float32,compute=bfloat16,output=float32"


class Probe(eqx.Module):
    """Says in which dtypes it is called."""

    weight: jax.Array
    seen: list = eqx.field(static=True, default_factory=lambda: Seen())

    def __call__(self, x):
        self.seen.append((self.weight.dtype.name, x.dtype.name))
        return self.weight.astype(x.dtype) * x


class Seen(list):
    """A list that is hashable, as a static field must be."""

    __hash__ = object.__hash__


class KeptProbe(Probe):
    keeps_precision: ClassVar[bool] = True


class Running(eqx.Module):
    keeps_precision: ClassVar[bool] = True
    mean: jax.Array


class Encoder(eqx.Module):
    first: nn.Linear
    norm: nn.LayerNorm
    second: nn.Linear

    def __init__(self, key):
        first, second = jax.random.split(key)
        self.first = nn.Linear(3, 4, key=first)
        self.norm = nn.LayerNorm(4)
        self.second = nn.Linear(4, 2, key=second)

    def encode(self, x):
        return self.norm(self.first(x))

    def __call__(self, x):
        return self.second(self.encode(x))


def dtypes_of(tree):
    return {leaf.dtype.name for leaf in jax.tree.leaves(eqx.filter(tree, eqx.is_inexact_array))}


def squares(model, x):
    return jnp.sum(jax.vmap(model)(x) ** 2)


@pytest.fixture
def model(getkey):
    return Encoder(getkey())


@pytest.fixture
def x(getkey):
    return jax.random.normal(getkey(), (5, 3))


def test_parameters_are_stored_in_one_dtype_and_the_model_computes_in_another(getkey):
    probe = Probe(jnp.ones(2))
    mixed = nn.MixedPrecision(probe, nn.Policy("float32", "float16", "bfloat16"))
    assert mixed(jnp.ones(2)).dtype == jnp.bfloat16
    assert probe.seen == [("float16", "float16")]
    assert mixed.model.weight.dtype == jnp.float32


def test_output_is_that_of_the_model_cast_by_hand(model, x):
    by_hand = eqx.tree_at(
        lambda model: (model.first, model.second),
        model,
        replace_fn=lambda layer: jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), layer),
    )
    expected = jax.vmap(by_hand)(x.astype(jnp.bfloat16)).astype(jnp.float32)
    out = jax.vmap(nn.MixedPrecision(model, BFLOAT16))(x)
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_allclose(out, jax.vmap(model)(x), atol=0.05)


def test_policy_of_float32_changes_nothing(model, x):
    mixed = nn.MixedPrecision(model, "float32")
    outputs = jax.jit(lambda x: (jax.vmap(mixed)(x), jax.vmap(model)(x)))(x)
    np.testing.assert_array_equal(*outputs)


def test_parameters_of_norms_grow_to_the_parameter_dtype():
    norm = nn.MixedPrecision(nn.LayerNorm(2, dtype=jnp.bfloat16), BFLOAT16)
    assert dtypes_of(norm) == {"float32"}


def test_layer_that_says_so_keeps_its_precision():
    probe = KeptProbe(jnp.ones(2))
    nn.MixedPrecision(nn.Sequential([nn.Lambda(probe)]), BFLOAT16)(jnp.ones(2))
    assert probe.seen == [("float32", "bfloat16")]


@pytest.mark.parametrize(
    "keep", [Probe, (Probe, nn.Linear), Probe | None, lambda node: isinstance(node, Probe)]
)
def test_layer_that_is_chosen_keeps_its_precision(keep):
    probe = Probe(jnp.ones(2))
    mixed = nn.MixedPrecision([probe], BFLOAT16, keep=keep)
    mixed.call(lambda layers, x: layers[0](x), jnp.ones(2))
    assert probe.seen == [("float32", "bfloat16")]


def test_layer_with_a_policy_of_its_own_keeps_that():
    probe = Probe(jnp.ones(2, jnp.float16))
    inner = nn.MixedPrecision(probe, nn.Policy("float16", "float32", "bfloat16"))
    outer = nn.MixedPrecision([inner], BFLOAT16)
    out = outer.call(lambda layers, x: (x, layers[0](x)), jnp.ones(2))
    assert probe.seen == [("float32", "float32")]
    assert dtypes_of(outer) == {"float16"}
    assert dtypes_of(out) == {"float32"}


def test_model_wrapped_twice_keeps_the_policy_of_the_inner():
    probe = Probe(jnp.ones(2))
    once = nn.MixedPrecision(probe, "p=f32,c=f16,o=bf16")
    twice = nn.MixedPrecision(once, "p=bf16,c=f32,o=f32")
    assert twice(jnp.ones(2)).dtype == jnp.float32
    assert probe.seen == [("float16", "float16")]
    assert twice.model is once


def test_state_that_says_so_stays_float32():
    def step(model, x, state):
        assert x.dtype == jnp.bfloat16
        mean = 0.9 * state.mean + 0.1 * x.astype(jnp.float32)
        return x, Running(mean)

    state = Running(jnp.array([1.001]))
    out, new = nn.MixedPrecision((), BFLOAT16).call(step, jnp.ones(1), state)
    assert out.dtype == new.mean.dtype == jnp.float32
    np.testing.assert_allclose(new.mean, [1.0009], rtol=1e-6)


def test_keyword_arguments_are_cast():
    mixed = nn.MixedPrecision(lambda *, x: (x, x.dtype.name), BFLOAT16)
    out, seen = mixed(x=jnp.ones(2))
    assert (seen, out.dtype.name) == ("bfloat16", "float32")


def test_gradients_and_optimiser_have_the_dtype_of_the_parameters(model, x):
    mixed = nn.MixedPrecision(model, BFLOAT16)
    parameters = eqx.filter(mixed, eqx.is_inexact_array)
    optimiser = optax.sgd(0.1, momentum=0.9)

    @eqx.filter_jit
    def step(mixed, x):
        gradient, exact = (eqx.filter_grad(squares)(each, x) for each in (mixed, mixed.model))
        return exact, gradient, *optimiser.update(gradient, optimiser.init(parameters))

    exact, gradient, *updates_and_state = step(mixed, x)
    assert dtypes_of((gradient, updates_and_state)) == {"float32"}
    assert jax.tree.structure(gradient) == jax.tree.structure(parameters)
    for one, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(exact), strict=True):
        np.testing.assert_allclose(one, other, rtol=0.05, atol=0.05 * float(jnp.abs(other).max()))


def test_is_traced_once_by_jit():
    probe = Probe(jnp.ones(2))
    jitted = eqx.filter_jit(nn.MixedPrecision(probe, BFLOAT16))
    for _ in range(3):
        jitted(jnp.ones(2))
    assert len(probe.seen) == 1


def test_ensemble_is_built_and_called_by_vmap(x, getkey):
    @eqx.filter_vmap
    def make(key):
        return nn.MixedPrecision(nn.Linear(3, 2, key=key), BFLOAT16)

    ensemble = make(jax.random.split(getkey(), 2))
    out = eqx.filter_vmap(lambda mixed, x: mixed(x), in_axes=(0, None))(ensemble, x[0])
    first = jax.tree.map(lambda leaf: leaf[0], ensemble)
    assert dtypes_of(ensemble) == {"float32"}
    np.testing.assert_allclose(out[0], first(x[0]), atol=0.02)


def test_file_is_that_of_the_parameters(model):
    mixed = nn.MixedPrecision(model, BFLOAT16)
    plain, ours = io.BytesIO(), io.BytesIO()
    eqx.tree_serialise_leaves(plain, model)
    eqx.tree_serialise_leaves(ours, mixed)
    assert plain.getvalue() == ours.getvalue()
    plain.seek(0)
    assert eqx.tree_deserialise_leaves(plain, mixed) == mixed


def test_methods_are_called_under_the_policy(model, x):
    mixed = nn.MixedPrecision(model, BFLOAT16)
    out = mixed.call(Encoder.encode, x[0])
    expected = nn.Policy.parse("bfloat16").cast_to_compute(model).encode(x[0].astype(jnp.bfloat16))
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(out, expected.astype(jnp.float32))


def test_frozen_arrays_stay_frozen_and_are_cast():
    probe, asked = Probe(jnp.ones(2)), set()
    mixed = nn.MixedPrecision(nn.freeze(probe), BFLOAT16, keep=lambda node: asked.add(type(node)))
    mixed(jnp.ones(2))
    assert probe.seen == [("bfloat16", "bfloat16")]
    assert {kind.__name__ for kind in asked} == {"Probe", "ArrayImpl", "tuple", "dict"}
    assert not jax.tree.leaves(eqx.filter(mixed, eqx.is_inexact_array))


def test_inference_mode_reaches_the_model():
    mixed = nn.inference_mode(nn.MixedPrecision(nn.Dropout(), BFLOAT16))
    np.testing.assert_array_equal(mixed(jnp.ones(2)), jnp.ones(2))


def test_summary_shows_the_layers_in_the_compute_dtype(model, x):
    rows = {row.path: row for row in nn.summary(nn.MixedPrecision(model, BFLOAT16), x[0]).rows}
    shown = {path: row.outputs[0].dtype.name for path, row in rows.items() if row.outputs}
    layers = {".model", ".model.first", ".model.norm", ".model.second"}
    assert shown == {"": "float32"} | dict.fromkeys(layers, "bfloat16")
    assert rows[""].num_bytes == rows[".model"].num_bytes == 4 * rows[""].num_parameters


def test_kl_and_samples_are_those_of_the_parameters_as_stored(getkey):
    layer, key = nn.BayesianLinear(3, 2, key=getkey()), getkey()
    mixed = nn.MixedPrecision(layer, "c=f16,o=f32")
    kl, sample = map(eqx.filter_jit, (nn.kl_divergence, nn.sample_posterior))
    assert kl(mixed).dtype == jnp.float32
    assert kl(mixed) == kl(layer)
    assert sample(mixed, key).model == sample(layer, jr.clone(key))


def test_layers_inside_are_made_bayesian(model):
    mixed = nn.to_bayesian(nn.MixedPrecision(model, BFLOAT16))
    assert type(mixed.model.first) is type(mixed.model.second) is nn.BayesianLinear
    assert dtypes_of(mixed) == {"float32"}


class Block(eqx.Module):
    """A transformer's block, without the second half."""

    norm: nn.RMSNorm
    attention: nn.MultiheadAttention

    def __init__(self, key):
        self.norm = nn.RMSNorm(3)
        self.attention = nn.MultiheadAttention(1, 3, key=key)

    def __call__(self, x, *, key=None):
        y = jax.vmap(self.norm)(x)
        return x + self.attention(y, y, y)


def test_stack_of_layers_computes_in_the_compute_dtype(x, getkey):
    # Under strict promotion, as the tests run, a float32 anywhere beside would be an error.
    mixed = nn.MixedPrecision(nn.ScanStack(Block, depth=2, key=getkey()), BFLOAT16)
    out, exact = eqx.filter_jit(lambda mixed, x: (mixed(x), mixed.model(x)))(mixed, x)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, exact, atol=0.1)


def test_norm_is_exact_in_float16():
    # The squares overflow in float16.
    x = jnp.array([1000.0, 2000.0, 4000.0])
    mixed = nn.MixedPrecision(nn.LayerNorm(3), "c=f16,o=f32")
    np.testing.assert_allclose(mixed(x), nn.LayerNorm(3)(x), atol=1e-3)


def test_shared_layers_stay_shared_and_inputs_may_be_integers(getkey):
    class Tied(eqx.Module):
        shared: nn.Shared

        def __init__(self, key):
            keys = jr.split(key)
            pair = nn.Embedding(5, 3, key=keys[0]), nn.Linear(3, 5, use_bias=False, key=keys[1])
            self.shared = nn.Shared(pair, lambda pair: pair[1].weight, lambda pair: pair[0].weight)

        def __call__(self, token):
            embedding, linear = self.shared()
            return linear(embedding(token))

    def loss(mixed, token):
        out = mixed(token)
        return jnp.sum(out**2), (out, mixed.model(token))

    mixed = nn.MixedPrecision(Tied(getkey()), BFLOAT16)
    differentiate = eqx.filter_jit(eqx.filter_grad(loss, has_aux=True))
    gradient, (out, exact) = differentiate(mixed, jnp.array(2))
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, exact, atol=0.05)
    assert [leaf.shape for leaf in jax.tree.leaves(gradient)] == [(5, 3)]


def test_float64_is_stored_and_computed_in_where_the_policy_says_so():
    with jax.enable_x64(True):
        norm = nn.LayerNorm(2, dtype=jnp.float64)
        x = jnp.array([1.0, 2.0])
        mixed = nn.MixedPrecision((norm, Probe(jnp.ones(2))), "p=f64,c=f32,o=f64")
        out = mixed.call(lambda layers, x: layers[1](x), x)
        kept = nn.MixedPrecision(norm, BFLOAT16)
        assert dtypes_of((x, out)) == dtypes_of(mixed) == dtypes_of(kept) == {"float64"}
        assert mixed.model[1].seen == [("float32", "float32")]


class TestState:
    @staticmethod
    def make(key):
        first, second = jax.random.split(key)
        norm = nn.BatchNorm(4, "batch", mode="batch")
        layers = [nn.Linear(3, 4, key=first), norm, nn.Linear(4, 2, key=second)]
        return nn.MixedPrecision(nn.Sequential(layers), "c=f16,o=f32")

    @staticmethod
    def apply(mixed, x, state):
        axes = {"in_axes": (0, None), "out_axes": (0, None), "axis_name": "batch"}
        return jax.vmap(mixed, **axes)(x, state)

    def test_running_statistics_stay_float32(self, x, getkey):
        mixed, state = nn.make_with_state(self.make)(getkey())
        traces = []

        @eqx.filter_jit
        @eqx.filter_value_and_grad(has_aux=True)
        def step(mixed, x, state):
            traces.append(None)
            out, state = self.apply(mixed, x, state)
            return jnp.mean(out**2), state

        for _ in range(2):
            (_, state), gradient = step(mixed, x, state)
        hidden = jax.vmap(mixed.model[0])(x)
        mean, _ = state.get(mixed.model[1].batch_state_index)
        assert dtypes_of((state, gradient)) == {"float32"}
        assert len(traces) == 1
        np.testing.assert_allclose(mean / (1 - 0.99**2), jnp.mean(hidden, 0), atol=2e-3)

    def test_sequential_hands_the_state_to_a_model_with_a_policy(self, x, getkey):
        whole, state = nn.make_with_state(lambda key: nn.Sequential([self.make(key)]))(getkey())
        out, state = self.apply(whole, x, state)
        assert out.dtype == jnp.float32
        assert state.get(whole[0].model[1].batch_counter) == 1
        assert not nn.MixedPrecision(nn.Identity(), BFLOAT16).is_stateful()


def wrap(policy: Any, **options: Any) -> nn.MixedPrecision:
    return nn.MixedPrecision(nn.Identity(), policy, **options)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: wrap(jnp.float16), TypeError, "nn.Policy, or a string"),
        (lambda: wrap(None), TypeError, "nn.Policy, or a string .* got None"),
        (lambda: wrap("float16", keep="norm"), TypeError, "`keep` must be .* got 'norm'"),
        (lambda: wrap("float16", keep=(nn.Linear, 3)), TypeError, "`keep` must be .* 3"),
    ],
)
def test_errors_name_what_was_expected_and_what_came(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_wrong_shape_is_an_error_that_names_the_layer(model):
    with pytest.raises(ValueError, match=r"Linear at Encoder.first expected x"):
        nn.MixedPrecision(model, BFLOAT16)(jnp.ones(4))
