import numpy as np
import pytest
import torch

from eqxlike import nn
from tests.pytorch.compare import Counterpart, assert_computes_the_same

SIZES = (9, 7, 6)
MODES = {"ZEROS": "zeros", "REFLECT": "reflect", "REPLICATE": "replicate", "CIRCULAR": "circular"}


def bias_in_our_layout(num_axes):
    return lambda bias: bias.reshape(-1, *[1] * num_axes)


def conv(num_axes, theirs_options=None, **options):
    ours = getattr(nn, f"Conv{num_axes}d")
    theirs = getattr(torch.nn, f"Conv{num_axes}d")
    their_options = options | (theirs_options or {})
    use_bias = options.pop("bias", True)
    parameters = {"weight": "weight"}
    if use_bias:
        parameters["bias"] = ("bias", bias_in_our_layout(num_axes))
    mode = (
        {"padding_mode": their_options["padding_mode"].upper()}
        if "padding_mode" in their_options
        else {}
    )
    return Counterpart(
        lambda **more: ours(4, 6, use_bias=use_bias, **(options | mode), **more),
        lambda: theirs(4, 6, **their_options),
        ((4, *SIZES[:num_axes]),),
        parameters,
        call_theirs=lambda layer, x: layer(x[None])[0],
    )


def transposed_kernel(groups):
    """PyTorch's kernel is that of the convolution: ours is flipped, with the channels swapped."""

    def to_ours(kernel):
        num_axes = kernel.ndim - 2
        parts = np.split(kernel, groups, axis=0)
        swapped = np.concatenate([part.swapaxes(0, 1) for part in parts], axis=0)
        return np.flip(swapped, axis=range(2, 2 + num_axes))

    return to_ours


def transpose(num_axes, **options):
    ours = getattr(nn, f"ConvTranspose{num_axes}d")
    theirs = getattr(torch.nn, f"ConvTranspose{num_axes}d")
    return Counterpart(
        lambda **more: ours(4, 6, **options, **more),
        lambda: theirs(4, 6, **options),
        ((4, *SIZES[:num_axes]),),
        {
            "weight": ("weight", transposed_kernel(options.get("groups", 1))),
            "bias": ("bias", bias_in_our_layout(num_axes)),
        },
        call_theirs=lambda layer, x: layer(x[None])[0],
    )


COUNTERPARTS = {
    "Conv1d": conv(1, kernel_size=3),
    "Conv1d-no-bias-stride": conv(1, kernel_size=4, stride=3, bias=False),
    "Conv2d": conv(2, kernel_size=3, stride=2, padding=1),
    "Conv2d-by-axis": conv(2, kernel_size=(2, 3), stride=(1, 2), padding=(0, 2), dilation=(2, 1)),
    "Conv2d-groups": conv(2, kernel_size=3, groups=2, dilation=2),
    "Conv2d-same": conv(2, {"padding": "same"}, kernel_size=3, padding="SAME"),
    "Conv2d-valid": conv(2, {"padding": "valid"}, kernel_size=2, padding="VALID"),
    "Conv3d": conv(3, kernel_size=(1, 2, 3), padding=1),
    **{
        f"Conv2d-{ours}": conv(2, {"padding_mode": theirs}, kernel_size=3, padding=(1, 2))
        for ours, theirs in MODES.items()
    },
    "ConvTranspose1d": transpose(1, kernel_size=3),
    "ConvTranspose1d-stride": transpose(1, kernel_size=4, stride=3, padding=2, output_padding=1),
    "ConvTranspose2d": transpose(2, kernel_size=(2, 3), stride=(2, 1), padding=(1, 0)),
    "ConvTranspose2d-groups": transpose(2, kernel_size=3, groups=2, dilation=2, stride=2),
    "ConvTranspose3d": transpose(3, kernel_size=2, stride=2),
}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", COUNTERPARTS)
def test_layer_computes_what_pytorch_does(name, dtype):
    assert_computes_the_same(COUNTERPARTS[name], dtype)
