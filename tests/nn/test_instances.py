"""A class in the place of a model is an error that says so, wherever a model is taken."""

import jax.random as jr
import pytest

from eqxlike import nn

KEY = jr.key(0)

TAKERS = {
    "summary": nn.summary,
    "freeze": nn.freeze,
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
