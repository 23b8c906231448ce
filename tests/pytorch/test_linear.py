import pytest
import torch

from eqxlike import nn
from tests.pytorch.compare import Counterpart, assert_computes_the_same

COUNTERPARTS = {
    "Linear": Counterpart(
        lambda **options: nn.Linear(3, 4, **options),
        lambda: torch.nn.Linear(3, 4),
        ((3,),),
        {"weight": "weight", "bias": "bias"},
    ),
    "Linear-no-bias": Counterpart(
        lambda **options: nn.Linear(3, 4, False, **options),
        lambda: torch.nn.Linear(3, 4, bias=False),
        ((3,),),
        {"weight": "weight"},
    ),
    "MLP": Counterpart(
        lambda **options: nn.MLP(3, 4, 5, 1, **options),
        lambda: torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.ReLU(), torch.nn.Linear(5, 4)),
        ((3,),),
        {
            "layers.0.weight": "0.weight",
            "layers.0.bias": "0.bias",
            "layers.1.weight": "2.weight",
            "layers.1.bias": "2.bias",
        },
    ),
}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", COUNTERPARTS)
def test_layer_computes_what_pytorch_does(name, dtype):
    assert_computes_the_same(COUNTERPARTS[name], dtype)
