"""`WeightNorm` and `SpectralNorm`, which replace the weight of a layer."""

import jax.random as jr
import pytest
import torch

from eqxlike import nn
from tests.pytorch.compare import Counterpart, assert_computes_the_same

parametrizations = torch.nn.utils.parametrizations


def weight_norm(axis):
    return lambda key, dtype: nn.WeightNorm(nn.Linear(3, 4, key=key, dtype=dtype), axis=axis)


def pytorch_weight_norm(axis):
    return lambda: parametrizations.weight_norm(torch.nn.Linear(3, 4), dim=axis)


PARAMETERS = {
    "g": "parametrizations.weight.original0",
    "layer.weight": "parametrizations.weight.original1",
    "layer.bias": "bias",
}
WEIGHT_NORMS = {
    f"axis {axis}": Counterpart(weight_norm(axis), pytorch_weight_norm(axis), ((3,),), PARAMETERS)
    for axis in (0, 1)
}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", WEIGHT_NORMS)
def test_weight_norm_computes_what_pytorch_does(name, dtype):
    assert_computes_the_same(WEIGHT_NORMS[name], dtype)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_spectral_norm_computes_what_pytorch_does(dtype):
    def pytorch():
        torch.set_default_dtype(getattr(torch, dtype))
        linear = parametrizations.spectral_norm(torch.nn.Linear(3, 4), n_power_iterations=50)
        torch.set_default_dtype(torch.float32)
        return linear.eval()

    def ours(key, dtype):
        linear_key, norm_key = jr.split(key)
        return nn.make_with_state(nn.SpectralNorm)(
            nn.Linear(3, 4, key=linear_key, dtype=dtype), "weight", 50, key=norm_key
        )

    counterpart = Counterpart(
        ours,
        pytorch,
        ((3,),),
        {"0.layer.weight": "parametrizations.weight.original", "0.layer.bias": "bias"},
        call_ours=lambda pair, x: pair[0](x, pair[1])[0],
    )
    assert_computes_the_same(counterpart, dtype)
