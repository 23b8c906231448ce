import jax.numpy as jnp
import pytest
import torch

from eqxlike import nn
from tests.pytorch.compare import Counterpart, assert_computes_the_same


def rows_of(layer, x):
    return x[:, None] * jnp.stack([layer(index) for index in (0, 3, 3, 1)])


def their_rows_of(layer, x):
    return x[:, None] * layer(torch.tensor([0, 3, 3, 1]))


COUNTERPARTS = {
    "Embedding": Counterpart(
        lambda **options: nn.Embedding(5, 3, **options),
        lambda: torch.nn.Embedding(5, 3),
        ((4,),),
        {"weight": "weight"},
        rows_of,
        their_rows_of,
    ),
    "PReLU": Counterpart(
        lambda key, dtype: nn.PReLU(jnp.zeros(1, dtype)),
        torch.nn.PReLU,
        ((2, 3, 1),),
        {"negative_slope": "weight"},
    ),
}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", COUNTERPARTS)
def test_layer_computes_what_pytorch_does(name, dtype):
    assert_computes_the_same(COUNTERPARTS[name], dtype)
