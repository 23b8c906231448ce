"""Frequent mistakes: warnings show the user's line, and errors show the correct code."""

import linecache
import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqxlike as eqx
from eqxlike import nn
from tests.nn.mistakes import each_mistake


class Block(nn.StatefulLayer):
    norm: nn.BatchNorm

    def __init__(self, key=None):
        self.norm = nn.BatchNorm(3, "batch")  # Here.

    def __call__(self, x, state, *, key=None):
        return self.norm(x, state)


DROPOUT = nn.Dropout(0.5)
X, KEYS = jnp.ones((2, 3)), jr.split(jr.key(0), 2)
ATTENTION = nn.MultiheadAttention(1, 3, dropout_p=0.5, key=jr.key(0))


class Called(eqx.Module):
    def __call__(self, x, *, key=None):
        return DROPOUT(x, deterministic=True)  # Here.


WARNERS = {
    "BatchNorm": lambda: nn.BatchNorm(3, "batch"),  # Here.
    "BatchNorm in a block": Block,
    "BatchNorm in a stack": lambda: nn.ScanStack(Block, 2, key=jr.key(0)),
    "BatchNorm by filter_vmap": lambda: eqx.filter_vmap(
        lambda key: nn.BatchNorm(3, "batch", key=key)  # Here.
    )(KEYS),
    "BatchNorm by filter_jit": lambda: eqx.filter_jit(nn.BatchNorm)(3, "batch"),  # Here.
    "LayerNorm": lambda: nn.LayerNorm(3, elementwise_affine=False),  # Here.
    "Dropout": lambda: nn.Dropout(0.5, deterministic=True),  # Here.
    "Dropout called": lambda: DROPOUT(X, deterministic=True),  # Here.
    "Dropout in a model": lambda: nn.Sequential([Called()])(X),
    "Dropout under vmap": lambda: jax.vmap(lambda x: DROPOUT(x, deterministic=True))(X),  # Here.
    "Dropout in attention": lambda: ATTENTION(X, X, X, deterministic=True),  # Here.
}


@pytest.mark.parametrize("name", WARNERS)
def test_warning_is_at_the_line_of_the_user(name):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        WARNERS[name]()
    assert caught
    for warning in caught:
        assert warning.filename == __file__
        assert linecache.getline(warning.filename, warning.lineno).rstrip().endswith("# Here.")


KEY = jr.key(0)

TAKERS = {
    "summary": nn.summary,
    "freeze": nn.freeze,
    "fuse": nn.fuse,
    "unfuse": nn.unfuse,
    "unfreeze": nn.unfreeze,
    "replace_layers": lambda model: nn.replace_layers(model, nn.Linear, lambda layer: layer),
    "to_bayesian": nn.to_bayesian,
    "inference_mode": nn.inference_mode,
    "reinitialise": lambda model: nn.reinitialise(model, lambda path, array: None, key=KEY),
    "kl_divergence": nn.kl_divergence,
    "sample_posterior": lambda model: nn.sample_posterior(model, KEY),
    "posterior_mean": nn.posterior_mean,
    "with_perturbation": lambda model: nn.with_perturbation(model, KEY),
    "from_parts: mean": lambda model: nn.BayesianLinear.from_parts(model, model),
    "MixedPrecision": lambda model: nn.MixedPrecision(model, "bfloat16"),
    "Shared": lambda model: nn.Shared(model, lambda model: model, lambda model: model),
    "State": nn.State,
    "delete_init_state": nn.delete_init_state,
    "WeightNorm": nn.WeightNorm,
    "SpectralNorm": lambda model: nn.SpectralNorm(model, "weight", key=KEY),
    "LoRALinear": lambda model: nn.LoRALinear(model, 2, key=KEY),
    "BayesianLinear.around": nn.BayesianLinear.around,
    "BayesianConv": nn.BayesianConv,
    r"Sequential: layers\[1\]": lambda model: nn.Sequential([nn.Identity(), model]),
    r"Parallel: branches\[1\]": lambda model: nn.Parallel([nn.Identity(), model]),
    "Parallel: join": lambda model: nn.Parallel([nn.Identity()], model),
    r"ScanStack.stack: layers\[0\]": lambda model: nn.ScanStack.stack([model]),
}


class OfTwo(eqx.Module):
    layers: list

    def __init__(self, key: Any = None):
        first, second = jr.split(key)
        self.layers = [nn.Linear(2, 2, key=first), nn.Linear(2, 2, key=second)]


class OfOne(eqx.Module):
    layer: nn.Linear

    def __init__(self, *, seed):
        self.layer = nn.Linear(2, 2, key=seed)


KEY_TAKERS = {
    "Linear": lambda key: nn.Linear(2, 1, key=key),
    "MLP": lambda key: nn.MLP(2, 1, 4, 1, key=key),
    "GRUCell": lambda key: nn.GRUCell(2, 2, key=key),
    "OfTwo": OfTwo,
    "Linear of a model": lambda key: OfOne(seed=key),
    "MLP by filter_jit": lambda key: eqx.filter_jit(nn.MLP)(2, 1, 4, 1, key=key),
    "Dropout": lambda key: DROPOUT(X, key=key),
    "Dropout by filter_jit": lambda key: eqx.filter_jit(DROPOUT)(X, key=key),
}


@pytest.mark.parametrize("name", KEY_TAKERS)
def test_number_or_several_keys_instead_of_a_key_are_refused(name):
    layer = name.split()[0]
    # Dropout may omit the key, and under `filter_jit` an array is a tracer.
    takes_only_ints = layer == "Dropout" or "filter_jit" in name
    for key in [0] if takes_only_ints else [0, None, np.int32(0), jnp.array(0)]:
        says = f"{layer} expected a key, as `jax.random.key(0)` makes it; got {key!r}."
        with pytest.raises(TypeError, match=f"^{re.escape(says)}"):
            KEY_TAKERS[name](key)
    says = rf"^{layer} expected one key; got 3 keys, as from `jax\.random\.split`"
    for make_key in (jr.key, jr.PRNGKey):
        with pytest.raises(ValueError, match=says):
            KEY_TAKERS[name](jr.split(make_key(0), 3))


class DrawsOther(eqx.Module):
    array: jax.Array

    def __init__(self, seed, *, key):
        self.array = jr.normal(seed, (2,))


def test_error_of_another_argument_does_not_mention_the_key():
    with pytest.raises(TypeError, match="JAX encountered invalid PRNG key data"):
        DrawsOther(0, key=KEY)


def test_class_instead_of_a_model_is_refused():
    says = r"expected an instance, got the class Linear: call it, `Linear\(\.\.\.\)`\.$"
    for name, take in TAKERS.items():
        with pytest.raises(TypeError, match=f"^{name} {says}"):
            take(nn.Linear)


class OfInner(eqx.Module):
    layer: nn.Linear

    def __init__(self, size, *, key):
        self.layer = nn.Linear(size, size, key)  # pyright: ignore


class Forward(eqx.Module):
    def forward(self, x):
        return x


ARGUMENTS = {
    TypeError: {
        r"Linear\(in_features, .*, key\)`\. .* `key=...`": lambda: nn.Linear(2, 3, KEY),
        r"Write `Dropout\(p=\.\.\., .*after `\*` by name": lambda: nn.Dropout(0.5, False, KEY),
        r"`Sequential\(\[\.\.\.\]\)`\.$": lambda: nn.Sequential(DROPOUT, DROPOUT),
        "Did you mean `use_bias` instead": lambda: nn.Linear(2, 3, bias=False, key=KEY),
        "Did you mean `learning_rate` instead of `lr`": lambda: eqx.bayes.Laplace(lr=0.1),
        r"Sequential.*rename `Forward\.forward`\.$": lambda: nn.Sequential([Forward()]),
        r"rename `Forward\.forward`\.$": lambda: eqx.filter_jit(Forward()),
    }
}


@each_mistake(ARGUMENTS)
def test_error_of_wrong_arguments_shows_the_signature(error, words, call):
    with pytest.raises(error, match=words):
        call()


def test_error_of_wrong_arguments_names_the_inner_layer():
    with pytest.raises(TypeError, match=r"^Linear.*Write `Linear\(") as caught:
        OfInner(2, key=KEY)
    assert "OfInner" not in str(caught.value)


LINEAR = nn.Linear(2, 1, key=jr.key(0))
OF_FOUR = nn.MultiheadAttention(2, 4, key=jr.key(0))

MISUSES = {
    ValueError: {
        r"Linear expected x of shape \(2,\), got shape \(\)": lambda: LINEAR(1.0),
        "MLP: activation is called on one unit at a time.*: axis -1 is out of bounds": (
            lambda: nn.MLP(2, 1, 4, 2, jax.nn.softmax, key=jr.key(0))(jnp.ones(2))
        ),
        r"final_activation is called on one .* LayerNorm expected .*\n.*`jax\.nn\.softmax\(mlp\(": (
            lambda: nn.MLP(2, 1, 4, 0, final_activation=nn.LayerNorm(1), key=jr.key(0))(X[0, :2])
        ),
        r"LSTMCell expected hidden to be a pair, .* got f32\[3\]": (
            lambda: nn.LSTMCell(2, 3, key=jr.key(0))(jnp.ones(2), jnp.ones(3))
        ),
    },
    TypeError: {
        r"Linear at Sequential\.layers\[1\] expected x to be an array, got a list of length 2: ": (
            lambda: nn.Sequential([nn.Identity(), LINEAR])([1.0, 2.0])
        ),
        "Linear expected x to be an array, got None": lambda: LINEAR(None),
        r"MultiheadAttention expected mask to be an array, got a node of type Linear": (
            lambda: OF_FOUR(*[jnp.ones((3, 4))] * 3, mask=LINEAR)
        ),
        "`where` must be a fun.*; got 'weight'": lambda: nn.freeze(LINEAR, "weight"),
        r"`where` must be a fun.*; got f32\[1,2\]": lambda: nn.freeze(LINEAR, LINEAR.weight),
        "Lambda expected a layer, or a fun.* 'relu'": lambda: nn.Lambda("relu"),
        r"Embedding expected x to be an integer, .* float32\. Convert it: `x\.astype\(int\)`": (
            lambda: nn.Embedding(3, 4, key=jr.key(0))(jnp.array(1.0))
        ),
        r"MLP: activation expected .* `jax\.nn\.relu`; got 'relu'\.$": (
            lambda: nn.MLP(2, 2, 3, 1, activation="relu", key=jr.key(0))
        ),
        r"Sequential: layers\[1\] expected a layer.*3\.$": lambda: nn.Sequential([LINEAR, 3]),
        r"Sequential expected a list of layers, .*; got Linear\.$": lambda: nn.Sequential(LINEAR),
        r"Parallel expected a list of layers, .*Linear\.$": lambda: nn.Parallel(LINEAR, LINEAR),
        r"ScanStack expected a function from a key .*; got Linear\. .*ScanStack\.stack": (
            lambda: nn.ScanStack(LINEAR, 3, key=jr.key(0))
        ),
    },
}


@each_mistake(MISUSES)
def test_misuse_is_explained(error, words, call):
    with pytest.raises(error, match=words):
        call()


class Recurrent(eqx.Module):
    cell: nn.GRUCell

    def __call__(self, x):
        return self.cell(x, x)


ENSEMBLES = {
    "Linear": lambda key: nn.Linear(3, 3, key=key),
    "MLP": lambda key: nn.MLP(3, 3, 3, 1, key=key),
    "ScanStack": lambda key: nn.ScanStack(lambda key: nn.Linear(3, 3, key=key), 3, key=key),
    "FusedLinear": lambda key: nn.FusedLinear([nn.Linear(3, 3, key=key)]),
    "LoRALinear": lambda key: nn.LoRALinear(
        nn.Linear(3, 3, key=key), 3, train_base=True, key=jr.clone(key)
    ),
    "Conv": lambda key: nn.Conv1d(3, 3, 1, key=key),
    "ConvTranspose": lambda key: nn.ConvTranspose1d(3, 3, 1, key=key),
    "LayerNorm": lambda key: nn.LayerNorm(3),
    "RMSNorm": lambda key: nn.RMSNorm(3),
    "GroupNorm": lambda key: nn.GroupNorm(3, 3),
    "GRUCell": lambda key: Recurrent(nn.GRUCell(3, 3, key=key)),
    "Embedding": lambda key: nn.Embedding(3, 3, key=key),
}


@pytest.mark.parametrize("name", ENSEMBLES)
def test_ensemble_called_as_one_network_is_refused(name):
    """All sizes are 3, so that products over the wrong axes would be possible."""
    ensemble = eqx.filter_vmap(ENSEMBLES[name], axis_size=3)(jr.split(jr.key(0), 3))
    shape = {"Embedding": (), "Conv": (3, 3), "ConvTranspose": (3, 3)}.get(name, (3,))
    x = jnp.ones(shape, float if shape else int)
    with pytest.raises(ValueError, match=r"has a weight of shape \(3, .*`eqx\.filter_vmap\("):
        ensemble(x)
    call = eqx.filter_vmap(lambda model, x: model(x), in_axes=(eqx.if_array(0), None))
    assert jax.tree.leaves(call(ensemble, x))[0].shape == (3, *(shape or (3,)))


def test_ensemble_of_batch_norms_called_as_one_is_refused():
    make = nn.make_with_state(lambda: nn.BatchNorm(3, axis_name="batch", mode="batch"))
    norm, state = eqx.filter_vmap(lambda _: make())(jnp.arange(3))
    call = jax.vmap(lambda x: norm(x, state), axis_name="batch", out_axes=(0, None))
    with pytest.raises(ValueError, match=r"weight of shape \(3, 3\).*`eqx\.filter_vmap\("):
        call(jnp.ones((4, 3)))
