import numpy as np
import pytest
import torch

from eqxlike import nn
from tests.pytorch.compare import Counterpart, assert_computes_the_same

SIZES = (9, 7, 6)


def in_their_words(options):
    named = {"bias" if name == "use_bias" else name: value for name, value in options.items()}
    return {
        name: value.lower() if isinstance(value, str) else value for name, value in named.items()
    }


def add_axes(num_axes):
    return lambda bias: bias.reshape(-1, *[1] * num_axes)


def conv(num_axes, **options):
    return counterpart("Conv", num_axes, options, "weight")


def conv_transpose(num_axes, **options):
    """PyTorch's kernel has the shape `(in, out / groups, ...)`, as before the transposition."""

    def to_ours(kernel):
        parts = np.split(kernel, options.get("groups", 1), axis=0)
        swapped = np.concatenate([part.swapaxes(0, 1) for part in parts], axis=0)
        return np.flip(swapped, axis=range(2, kernel.ndim))

    return counterpart("ConvTranspose", num_axes, options, ("weight", to_ours))


def counterpart(name, num_axes, options, weight):
    ours, theirs = (getattr(module, f"{name}{num_axes}d") for module in (nn, torch.nn))
    parameters = {"weight": weight}
    if options.get("use_bias", True):
        parameters["bias"] = ("bias", add_axes(num_axes))
    return Counterpart(
        lambda **more: ours(4, 6, **options, **more),
        lambda: theirs(4, 6, **in_their_words(options)),
        ((4, *SIZES[:num_axes]),),
        parameters,
        call_theirs=lambda layer, x: layer(x[None])[0],
    )


COUNTERPARTS = {
    "Conv1d": conv(1, kernel_size=3),
    "Conv1d-no-bias": conv(1, kernel_size=4, stride=3, use_bias=False),
    "Conv2d": conv(2, kernel_size=3, stride=2, padding=1),
    "Conv2d-by-axis": conv(2, kernel_size=(2, 3), stride=(1, 2), padding=(0, 2), dilation=(2, 1)),
    "Conv2d-groups": conv(2, kernel_size=3, groups=2, dilation=2),
    "Conv2d-same": conv(2, kernel_size=(3, 4), padding="SAME", dilation=(1, 2)),
    "Conv2d-valid": conv(2, kernel_size=2, padding="VALID"),
    "Conv2d-reflect": conv(2, kernel_size=3, padding=(1, 2), padding_mode="REFLECT"),
    "Conv2d-replicate": conv(2, kernel_size=3, padding=(1, 2), padding_mode="REPLICATE"),
    "Conv2d-circular": conv(2, kernel_size=3, padding=(1, 2), padding_mode="CIRCULAR"),
    "Conv1d-same-circular": conv(1, kernel_size=4, padding="SAME", padding_mode="CIRCULAR"),
    "Conv3d": conv(3, kernel_size=(1, 2, 3), padding=1),
    "ConvTranspose1d": conv_transpose(1, kernel_size=3),
    "ConvTranspose1d-more": conv_transpose(
        1, kernel_size=4, stride=3, padding=2, output_padding=1, use_bias=False
    ),
    "ConvTranspose2d": conv_transpose(
        2, kernel_size=(2, 3), stride=(2, 1), padding=(1, 0), output_padding=(1, 0)
    ),
    "ConvTranspose2d-groups": conv_transpose(2, kernel_size=3, groups=2, dilation=2, stride=2),
    "ConvTranspose3d": conv_transpose(3, kernel_size=2, stride=2),
}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", COUNTERPARTS)
def test_layer_computes_what_pytorch_does(name, dtype):
    assert_computes_the_same(COUNTERPARTS[name], dtype)
