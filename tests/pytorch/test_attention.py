import numpy as np
import pytest
import torch

from eqxlike import nn
from tests.pytorch.compare import Counterpart, assert_computes_the_same

MASK = np.random.default_rng(0).random((3, 5)) < 0.7
MASK[:, 0] = True
BIAS = np.where(MASK, np.random.default_rng(1).normal(size=(2, 3, 5)), -np.inf)


def third(index):
    return lambda stacked: np.split(stacked, 3)[index]


PROJECTIONS = ["query_proj", "key_proj", "value_proj"]
OUTPUT = {"output_proj.weight": "out_proj.weight"}
BIASES = {"use_query_bias": True, "use_key_bias": True, "use_value_bias": True}
STACKED = {f"{n}.weight": ("in_proj_weight", third(i)) for i, n in enumerate(PROJECTIONS)}
STACKED_BIASES = {f"{n}.bias": ("in_proj_bias", third(i)) for i, n in enumerate(PROJECTIONS)}
COUNTERPARTS = {
    "MultiheadAttention": Counterpart(
        lambda **options: nn.MultiheadAttention(2, 4, **options),
        lambda: torch.nn.MultiheadAttention(4, 2, bias=False, batch_first=True),
        ((3, 4), (5, 4), (5, 4)),
        STACKED | OUTPUT,
        call_theirs=lambda layer, q, k, v: layer(q, k, v)[0],
    ),
    "MultiheadAttention-bias": Counterpart(
        lambda **options: nn.MultiheadAttention(2, 4, **BIASES, use_output_bias=True, **options),
        lambda: torch.nn.MultiheadAttention(4, 2, batch_first=True),
        ((3, 4), (5, 4), (5, 4)),
        STACKED | STACKED_BIASES | OUTPUT | {"output_proj.bias": "out_proj.bias"},
        call_theirs=lambda layer, q, k, v: layer(q, k, v)[0],
    ),
    "MultiheadAttention-mask-sizes": Counterpart(
        lambda **options: nn.MultiheadAttention(2, 4, key_size=6, value_size=2, **options),
        lambda: torch.nn.MultiheadAttention(4, 2, bias=False, kdim=6, vdim=2, batch_first=True),
        ((3, 4), (5, 6), (5, 2)),
        {
            "query_proj.weight": "q_proj_weight",
            "key_proj.weight": "k_proj_weight",
            "value_proj.weight": "v_proj_weight",
        }
        | OUTPUT,
        lambda layer, q, k, v: layer(q, k, v, MASK),
        lambda layer, q, k, v: layer(q, k, v, attn_mask=~torch.tensor(MASK))[0],
    ),
    "MultiheadAttention-additive-mask": Counterpart(
        lambda **options: nn.MultiheadAttention(2, 4, **options),
        lambda: torch.nn.MultiheadAttention(4, 2, bias=False, batch_first=True),
        ((3, 4), (5, 4), (5, 4)),
        STACKED | OUTPUT,
        lambda layer, q, k, v: layer(q, k, v, BIAS),
        lambda layer, q, k, v: layer(q, k, v, attn_mask=torch.tensor(BIAS, dtype=q.dtype))[0],
    ),
}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", COUNTERPARTS)
def test_layer_computes_what_pytorch_does(name, dtype):
    assert_computes_the_same(COUNTERPARTS[name], dtype)
