import pytest
import torch

from eqxlike import nn
from tests.pytorch.compare import Counterpart, assert_computes_the_same

AFFINE = {"weight": "weight", "bias": "bias"}
COUNTERPARTS = {
    "LayerNorm": Counterpart(
        lambda key, dtype: nn.LayerNorm((2, 5), dtype=dtype),
        lambda: torch.nn.LayerNorm((2, 5)),
        ((2, 5),),
        AFFINE,
    ),
    "LayerNorm-no-bias-eps": Counterpart(
        lambda key, dtype: nn.LayerNorm(5, 0.1, use_bias=False, dtype=dtype),
        lambda: torch.nn.LayerNorm(5, 0.1, bias=False),
        ((5,),),
        {"weight": "weight"},
    ),
    "LayerNorm-plain": Counterpart(
        lambda key, dtype: nn.LayerNorm(5, use_weight=False, use_bias=False, dtype=dtype),
        lambda: torch.nn.LayerNorm(5, elementwise_affine=False),
        ((5,),),
    ),
    "RMSNorm": Counterpart(
        lambda key, dtype: nn.RMSNorm((2, 5), use_bias=False, dtype=dtype),
        lambda: torch.nn.RMSNorm((2, 5), eps=1e-5),
        ((2, 5),),
        {"weight": "weight"},
    ),
    "GroupNorm": Counterpart(
        lambda key, dtype: nn.GroupNorm(2, 6, dtype=dtype),
        lambda: torch.nn.GroupNorm(2, 6),
        ((6, 3, 4),),
        AFFINE,
        call_theirs=lambda layer, x: layer(x[None])[0],
    ),
    "GroupNorm-plain": Counterpart(
        lambda key, dtype: nn.GroupNorm(3, channelwise_affine=False, dtype=dtype),
        lambda: torch.nn.GroupNorm(3, 6, affine=False),
        ((6, 4),),
        call_theirs=lambda layer, x: layer(x[None])[0],
    ),
}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", COUNTERPARTS)
def test_layer_computes_what_pytorch_does(name, dtype):
    assert_computes_the_same(COUNTERPARTS[name], dtype)
