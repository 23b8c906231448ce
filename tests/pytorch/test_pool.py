import jax
import jax.numpy as jnp
import pytest
import torch

from eqxlike import nn
from tests.pytorch.compare import Counterpart, assert_computes_the_same

SIZES = (7, 8, 3)


def one_example(layer, x):
    return layer(x[None])[0]


def pool(name, num_axes, kernel_size, stride, padding=0, use_ceil=False, **options):
    """`use_ceil` is `ceil_mode` in PyTorch. Other options have the same names."""
    ours, theirs = (getattr(module, f"{name}Pool{num_axes}d") for module in (nn, torch.nn))
    return Counterpart(
        lambda **_: ours(kernel_size, stride, padding, use_ceil, **options),
        lambda: theirs(kernel_size, stride, padding, ceil_mode=use_ceil, **options),
        ((2, *SIZES[:num_axes]),),
        call_theirs=one_example,
    )


def adaptive(name, target, num_axes):
    ours, theirs = (getattr(module, f"Adaptive{name}Pool{num_axes}d") for module in (nn, torch.nn))
    return Counterpart(
        lambda **_: ours(target, overlap=True),
        lambda: theirs(target),
        ((2, *SIZES[:num_axes]),),
        call_theirs=one_example,
    )


COUNTERPARTS = {
    "AvgPool1d": pool("Avg", 1, 3, 2),
    "AvgPool2d": pool("Avg", 2, (3, 2), (2, 1), (1, 0)),
    "AvgPool2d-ceil": pool("Avg", 2, 3, 2, 1, True, count_include_pad=False),
    "AvgPool2d-without-padding": pool("Avg", 2, 3, 2, 1, count_include_pad=False),
    "AvgPool3d": pool("Avg", 3, 2, 2, 1),
    "MaxPool1d": pool("Max", 1, 2, 2),
    "MaxPool2d": pool("Max", 2, (3, 2), (2, 1), (1, 0)),
    "MaxPool2d-ceil": pool("Max", 2, 3, 2, 0, True),
    # The last window along the first axis would start in the padding.
    "MaxPool2d-ceil-dropped": pool("Max", 2, 2, 5, 1, True),
    "MaxPool3d": pool("Max", 3, 3, 2, 1),
    "AdaptiveAvgPool1d": adaptive("Avg", 4, 1),
    "AdaptiveAvgPool2d": adaptive("Avg", (2, 3), 2),
    "AdaptiveAvgPool2d-larger": adaptive("Avg", (8, 1), 2),
    "AdaptiveAvgPool3d": adaptive("Avg", 2, 3),
    "AdaptiveMaxPool1d": adaptive("Max", 5, 1),
    "AdaptiveMaxPool2d": adaptive("Max", (7, 3), 2),
    "AdaptiveMaxPool3d": adaptive("Max", (2, 1, 4), 3),
}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", COUNTERPARTS)
def test_layer_computes_what_pytorch_does(name, dtype):
    assert_computes_the_same(COUNTERPARTS[name], dtype)


def test_first_of_equal_entries_gets_the_gradient_as_in_pytorch():
    x = torch.zeros((1, 5), requires_grad=True)
    torch.nn.MaxPool1d(3, 2)(x).sum().backward()
    ours = jax.grad(lambda x: jnp.sum(nn.MaxPool1d(3, 2)(x)))(jnp.zeros((1, 5)))
    assert ours.tolist() == x.grad.tolist() == [[1, 0, 1, 0, 0]]
