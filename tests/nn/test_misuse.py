"""A warning shows the line in the user's code, whatever stands between that and the layer; and a
class in the place of a model is an error that says so, wherever a model is taken.
"""

import linecache
import warnings

import jax
import jax.numpy as jnp
import jax.random as jr
import pytest

import eqxlike as eqx
from eqxlike import nn


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


def test_class_in_the_place_of_a_model_is_refused():
    says = r"expected an instance, got the class Linear: call it, `Linear\(\.\.\.\)`\.$"
    for name, take in TAKERS.items():
        with pytest.raises(TypeError, match=f"^{name} {says}"):
            take(nn.Linear)
