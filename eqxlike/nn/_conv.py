"""Convolutions and transposed convolutions."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray, Shaped

from .._check_numbers import whole_number
from .._module import Module, field
from ._conv_cpu import conv
from ._inputs import (
    OverAxes,
    Padding,
    Pads,
    Sizes,
    axis_names,
    check_input,
    check_not_stacked,
    check_window_fits,
    describe,
    padding_by_axis,
    pads_for,
    sizes_by_axis,
)
from ._parameters import Initializer, draw_linear


class Conv(Module):
    """A convolution over any number of spatial axes.

    As usual in machine learning, this is a cross-correlation: the kernel is not flipped.

        y[o, n] = bias[o] + sum over i, k of weight[o, i, k] * x[i, n * stride + k * dilation]

    Here `n` and `k` are indices along all spatial axes, and `x` is padded first. Weight and bias
    are initialised from the uniform distribution on `(-1/sqrt(fan_in), 1/sqrt(fan_in))`, where
    `fan_in = in_channels / groups * prod(kernel_size)`. LeCun, Boser, Denker, Henderson, Howard,
    Hubbard & Jackel (1989), "Backpropagation applied to handwritten zip code recognition".

    >>> import jax, jax.numpy as jnp
    >>> layer = Conv(2, in_channels=3, out_channels=8, kernel_size=3, key=jax.random.key(0))
    >>> jax.vmap(layer)(jnp.ones((10, 3, 32, 32))).shape
    (10, 8, 30, 30)
    """

    num_spatial_dims: int = field(static=True)
    weight: Shaped[Array, "out_channels in_channels/groups *kernel_size"]
    bias: Shaped[Array, "out_channels *ones"] | None
    in_channels: int = field(static=True)
    out_channels: int = field(static=True)
    kernel_size: tuple[int, ...] = field(static=True)
    stride: tuple[int, ...] = field(static=True)
    padding: str | Pads = field(static=True)
    dilation: tuple[int, ...] = field(static=True)
    groups: int = field(static=True)
    use_bias: bool = field(static=True)
    padding_mode: str = field(static=True)

    def __init__(
        self,
        num_spatial_dims: int,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: Padding = 0,
        dilation: Sizes = 1,
        groups: int = 1,
        use_bias: bool = True,
        padding_mode: str = "ZEROS",
        dtype: Any = None,
        *,
        weight_init: Initializer | None = None,
        bias_init: Initializer | None = None,
        key: PRNGKeyArray,
    ):
        """Arguments with one value for each spatial axis also accept a single integer.

        **Arguments:**

        - `num_spatial_dims`: number of spatial axes, 2 for images.
        - `in_channels`, `out_channels`: sizes of the first axis of input and output.
        - `kernel_size`: size of the kernel along each spatial axis.
        - `stride`: step of the kernel along each spatial axis.
        - `padding`: number of entries added at both ends of each spatial axis; or one pair
          `(before, after)` for each axis. Negative numbers remove entries. `"VALID"` adds none.
          `"SAME"` gives an output of `ceil(size / stride)` entries; if the total padding is odd,
          the additional entry is at the end, or at the beginning with `"SAME_LOWER"`.
        - `dilation`: distance between neighbouring entries of the kernel.
        - `groups`: number of groups of channels; each group of output channels depends only on
          its group of input channels. `groups=in_channels` is a depthwise convolution.
        - `use_bias`: whether to add a bias to each channel.
        - `padding_mode`: values of the padding. For `1234` with padding `(2, 1)`: `"ZEROS"` gives
          `0012340`, `"REFLECT"` `3212343`, `"REPLICATE"` `1112344`, `"CIRCULAR"` `3412341`.
        - `dtype`: dtype of weight and bias, floating or complex; JAX's default float if `None`.
        - `weight_init`, `bias_init`: initializers that replace the uniform distribution, from
          `jax.nn.initializers` or any function `init(key, shape, dtype)`. `weight_init` is called
          with the shape `(*kernel_size, in_channels // groups, out_channels)`, because JAX's
          initializers compute the fan-in from this shape.
        - `key`: random key for the initial weight and bias.

        **Raises:**

        - `ValueError` if a size is not a positive integer.
        - `ValueError` if a sequence does not have the length `num_spatial_dims`.
        - `ValueError` if `groups` does not divide both numbers of channels.
        - `ValueError` if `padding` or `padding_mode` is an unknown string.
        - `TypeError` if `dtype` is an integer dtype.
        """
        self.num_spatial_dims = num_axes = whole_number(num_spatial_dims, "num_spatial_dims")
        self.in_channels = whole_number(in_channels, "in_channels", least=0)
        self.out_channels = whole_number(out_channels, "out_channels", least=0)
        self.kernel_size = sizes_by_axis(kernel_size, num_axes, "kernel_size")
        self.stride = sizes_by_axis(stride, num_axes, "stride")
        self.padding = padding_by_axis(padding, num_axes)
        self.dilation = sizes_by_axis(dilation, num_axes, "dilation")
        self.groups = _check_groups(groups, self.in_channels, self.out_channels)
        self.use_bias = use_bias
        self.padding_mode = _check_padding_mode(padding_mode, self.padding)
        shape = (self.out_channels, self.in_channels // self.groups, *self.kernel_size)
        self.weight, self.bias = draw_linear(key, shape, dtype, use_bias, weight_init, bias_init)

    def __call__(
        self, x: Shaped[Array, "in_channels *sizes"], *, key: PRNGKeyArray | None = None
    ) -> Shaped[Array, "out_channels *new_sizes"]:
        """**Arguments:**

        - `x`: shape `(in_channels, dim_1, ..., dim_N)` with `N = num_spatial_dims`.
        - `key`: ignored; accepted so that all layers have the same signature.

        **Returns:** shape `(out_channels, new_dim_1, ..., new_dim_N)`.

        **Raises:**

        - `ValueError` if `x` has the wrong number of channels or axes.
        - `ValueError` if `x` is smaller than the kernel.
        """
        check_input(self, x, (self.in_channels, *axis_names(self.num_spatial_dims)))
        check_not_stacked(self, self.weight, 2 + self.num_spatial_dims)
        extents = _window_extents(self.kernel_size, self.dilation)
        pads = pads_for(self.padding, x.shape[1:], extents, self.stride)
        check_window_fits(self, x, pads, extents)
        if self.padding_mode != "ZEROS":
            x, pads = _extend(x, pads, self.padding_mode), ((0, 0),) * self.num_spatial_dims
        y = _correlate(x, self.weight, self.stride, pads, self.dilation, self.groups)
        return y if self.bias is None else y + self.bias


class _ConvNd(OverAxes, Conv):
    """The base of `Conv1d`, `Conv2d` and `Conv3d`."""

    _by_axis = ("stride", "padding", "dilation")

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: Padding = 0,
        dilation: Sizes = 1,
        groups: int = 1,
        use_bias: bool = True,
        padding_mode: str = "ZEROS",
        dtype: Any = None,
        *,
        weight_init: Initializer | None = None,
        bias_init: Initializer | None = None,
        key: PRNGKeyArray,
    ):
        """**Arguments:** as for `Conv`, without `num_spatial_dims`."""
        window = kernel_size, stride, padding, dilation
        others = groups, use_bias, padding_mode, dtype
        options = {"weight_init": weight_init, "bias_init": bias_init, "key": key}
        super().__init__(self._num_axes, in_channels, out_channels, *window, *others, **options)


class Conv1d(_ConvNd, num_axes=1, init=False):
    """`Conv` over one spatial axis, for sequences.

    >>> import jax, jax.numpy as jnp
    >>> layer = Conv1d(3, 8, kernel_size=5, padding="SAME", key=jax.random.key(0))
    >>> layer(jnp.ones((3, 100))).shape
    (8, 100)
    """


class Conv2d(_ConvNd, num_axes=2, init=False):
    """`Conv` over two spatial axes, for images.

    >>> import jax, jax.numpy as jnp
    >>> layer = Conv2d(3, 8, kernel_size=3, stride=2, padding=1, key=jax.random.key(0))
    >>> layer(jnp.ones((3, 32, 32))).shape
    (8, 16, 16)
    """


class Conv3d(_ConvNd, num_axes=3, init=False):
    """`Conv` over three spatial axes, for volumes and videos.

    >>> import jax, jax.numpy as jnp
    >>> layer = Conv3d(3, 8, kernel_size=(1, 3, 3), key=jax.random.key(0))
    >>> layer(jnp.ones((3, 16, 32, 32))).shape
    (8, 16, 30, 30)
    """


# --- Transposed convolutions ---


class ConvTranspose(Module):
    """A transposed convolution over any number of spatial axes, also called a deconvolution.

    It maps the output shape of a `Conv` back to the input shape of the `Conv`. To reverse the
    shapes of a `Conv`, swap `in_channels` and `out_channels` and keep the other arguments. With
    `stride > 1`, a `Conv` maps inputs of several sizes to the same output size; `output_padding`
    chooses one of these input sizes. Dumoulin & Visin (2016), "A guide to convolution arithmetic
    for deep learning".

    The layer convolves `x`, dilated by `stride`, with a kernel in the layout of `Conv`,
    `(out_channels, in_channels // groups, *kernel_size)`. For `groups=1`, the exact transpose of
    the linear map `conv` has the weight
    `jnp.flip(conv.weight, axis=range(2, conv.weight.ndim)).swapaxes(0, 1)`.

    >>> import eqxlike as eqx, jax, jax.numpy as jnp
    >>> key1, key2 = jax.random.split(jax.random.key(0))
    >>> options = {"kernel_size": 3, "stride": 2, "padding": 1}
    >>> there = eqx.nn.Conv(2, 3, 8, **options, key=key1)
    >>> back = eqx.nn.ConvTranspose(2, 8, 3, output_padding=1, **options, key=key2)
    >>> x = jnp.ones((3, 32, 32))
    >>> y = there(x)
    >>> y.shape, back(y).shape
    ((8, 16, 16), (3, 32, 32))
    """

    num_spatial_dims: int = field(static=True)
    weight: Shaped[Array, "out_channels in_channels/groups *kernel_size"]
    bias: Shaped[Array, "out_channels *ones"] | None
    in_channels: int = field(static=True)
    out_channels: int = field(static=True)
    kernel_size: tuple[int, ...] = field(static=True)
    stride: tuple[int, ...] = field(static=True)
    padding: str | Pads = field(static=True)
    output_padding: tuple[int, ...] = field(static=True)
    dilation: tuple[int, ...] = field(static=True)
    groups: int = field(static=True)
    use_bias: bool = field(static=True)
    padding_mode: str = field(static=True)

    def __init__(
        self,
        num_spatial_dims: int,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: Padding = 0,
        output_padding: Sizes = 0,
        dilation: Sizes = 1,
        groups: int = 1,
        use_bias: bool = True,
        padding_mode: str = "ZEROS",
        dtype: Any = None,
        *,
        weight_init: Initializer | None = None,
        bias_init: Initializer | None = None,
        key: PRNGKeyArray,
    ):
        """Arguments with one value for each spatial axis also accept a single integer.

        **Arguments:**

        - `num_spatial_dims`: number of spatial axes, 2 for images.
        - `in_channels`, `out_channels`: sizes of the first axis of input and output.
        - `kernel_size`: size of the kernel along each spatial axis.
        - `stride`: stride of the convolution that is transposed. It is the distance in the output
          between two neighbouring entries of the input.
        - `padding`: padding of the convolution that is transposed, as for `Conv`. More padding
          makes the output smaller. With `"SAME"` and `"SAME_LOWER"` the output has `size * stride -
          output_padding` entries.
        - `output_padding`: number of additional entries at the end of each spatial axis of the
          output; less than `stride`. With `"SAME"` and `"SAME_LOWER"`, `output_padding` is the
          number of entries to remove.
        - `dilation`: distance between neighbouring entries of the kernel.
        - `groups`: number of groups of channels; each group of output channels depends only on
          its group of input channels.
        - `use_bias`: whether to add a bias to each channel.
        - `padding_mode`: padding mode of the convolution that is transposed, as for `Conv`. In the
          modes other than `"ZEROS"`, outputs that fall into the padding are added to the entries
          that the padding copies.
        - `dtype`: dtype of weight and bias, floating or complex; JAX's default float if `None`.
        - `weight_init`, `bias_init`: initializers that replace the uniform distribution, from
          `jax.nn.initializers` or any function `init(key, shape, dtype)`. `weight_init` is called
          with the shape `(*kernel_size, in_channels // groups, out_channels)`, because JAX's
          initializers compute the fan-in from this shape.
        - `key`: random key for the initial weight and bias, which have the same distribution as for
          `Conv`.

        **Raises:**

        - `ValueError` if a size is not a positive integer.
        - `ValueError` if a sequence does not have the length `num_spatial_dims`.
        - `ValueError` if `groups` does not divide both numbers of channels.
        - `ValueError` if `padding` or `padding_mode` is an unknown string.
        - `ValueError` if `output_padding` is not less than `stride`.
        - `TypeError` if `dtype` is an integer dtype.
        """
        self.num_spatial_dims = num_axes = whole_number(num_spatial_dims, "num_spatial_dims")
        self.in_channels = whole_number(in_channels, "in_channels", least=0)
        self.out_channels = whole_number(out_channels, "out_channels", least=0)
        self.kernel_size = sizes_by_axis(kernel_size, num_axes, "kernel_size")
        self.stride = sizes_by_axis(stride, num_axes, "stride")
        self.padding = padding_by_axis(padding, num_axes)
        self.output_padding = sizes_by_axis(output_padding, num_axes, "output_padding", least=0)
        if any(more >= step for more, step in zip(self.output_padding, self.stride, strict=True)):
            raise ValueError(
                "output_padding must be less than stride along every spatial axis, got "
                f"output_padding={self.output_padding} and stride={self.stride}."
            )
        self.dilation = sizes_by_axis(dilation, num_axes, "dilation")
        self.groups = _check_groups(groups, self.in_channels, self.out_channels)
        self.use_bias = use_bias
        self.padding_mode = _check_padding_mode(padding_mode, self.padding)
        shape = (self.out_channels, self.in_channels // self.groups, *self.kernel_size)
        self.weight, self.bias = draw_linear(key, shape, dtype, use_bias, weight_init, bias_init)

    def __call__(
        self, x: Shaped[Array, "in_channels *sizes"], *, key: PRNGKeyArray | None = None
    ) -> Shaped[Array, "out_channels *new_sizes"]:
        """**Arguments:**

        - `x`: shape `(in_channels, dim_1, ..., dim_N)` with `N = num_spatial_dims`.
        - `key`: ignored; accepted so that all layers have the same signature.

        **Returns:** shape `(out_channels, new_dim_1, ..., new_dim_N)`.

        **Raises:**

        - `ValueError` if `x` has the wrong number of channels or axes.
        - `ValueError` if the output would be empty.
        """
        check_input(self, x, (self.in_channels, *axis_names(self.num_spatial_dims)))
        check_not_stacked(self, self.weight, 2 + self.num_spatial_dims)
        extents = _window_extents(self.kernel_size, self.dilation)
        # The spatial sizes of `x` after dilation by the stride, minus 1.
        spans = [(size - 1) * step for size, step in zip(x.shape[1:], self.stride, strict=True)]
        sizes = self._output_sizes(spans, extents)
        if min(sizes) < 1:
            raise ValueError(
                f"{describe(self)} expected x large enough for a non-empty output; got x of shape "
                f"{x.shape}, for which padding={self.padding!r} and "
                f"output_padding={self.output_padding} give an output of sizes {sizes}."
            )
        pads = pads_for(self.padding, sizes, extents, self.stride)
        is_folded = self.padding_mode != "ZEROS" and any(map(any, pads))
        # The transpose of a convolution returns an array like the padded input of the convolution.
        # The entries of this array that belong to zero padding are not needed, so they are not
        # computed.
        one = (1,) * self.num_spatial_dims
        cut = ((0, 0),) * self.num_spatial_dims if is_folded else pads
        axes = zip(cut, pads, sizes, spans, extents, strict=True)
        around = tuple(
            (extent - 1 - first, before + size + after - span - 1 - last)
            for (first, last), (before, after), size, span, extent in axes
        )
        y = _correlate(x, self.weight, one, around, self.dilation, self.groups, self.stride)
        if is_folded:
            y = _fold(y, sizes, pads, self.padding_mode)
        return y if self.bias is None else y + self.bias

    def _output_sizes(self, spans: list[int], extents: tuple[int, ...]) -> tuple[int, ...]:
        """The output sizes, which are the input sizes of the convolution that is transposed."""
        if self.padding in ("SAME", "SAME_LOWER"):
            return tuple(
                span + step - less
                for span, step, less in zip(spans, self.stride, self.output_padding, strict=True)
            )
        pads = pads_for(self.padding, spans, extents, self.stride)
        return tuple(
            span + extent - before - after + more
            for (before, after), span, extent, more in zip(
                pads, spans, extents, self.output_padding, strict=True
            )
        )


class _ConvTransposeNd(OverAxes, ConvTranspose):
    """The base of `ConvTranspose1d`, `ConvTranspose2d` and `ConvTranspose3d`."""

    _by_axis = ("stride", "padding", "output_padding", "dilation")

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        output_padding: Sizes = 0,
        padding: Padding = 0,
        dilation: Sizes = 1,
        groups: int = 1,
        use_bias: bool = True,
        padding_mode: str = "ZEROS",
        dtype: Any = None,
        *,
        weight_init: Initializer | None = None,
        bias_init: Initializer | None = None,
        key: PRNGKeyArray,
    ):
        """**Arguments:** as for `ConvTranspose`, without `num_spatial_dims`.

        Unlike in `ConvTranspose`, the positional argument `output_padding` precedes `padding`.
        """
        window = kernel_size, stride, padding, output_padding, dilation
        others = groups, use_bias, padding_mode, dtype
        options = {"weight_init": weight_init, "bias_init": bias_init, "key": key}
        super().__init__(self._num_axes, in_channels, out_channels, *window, *others, **options)


class ConvTranspose1d(_ConvTransposeNd, num_axes=1, init=False):
    """`ConvTranspose` over one spatial axis.

    >>> import jax, jax.numpy as jnp
    >>> layer = ConvTranspose1d(8, 3, kernel_size=4, stride=2, padding=1, key=jax.random.key(0))
    >>> layer(jnp.ones((8, 16))).shape
    (3, 32)
    """


class ConvTranspose2d(_ConvTransposeNd, num_axes=2, init=False):
    """`ConvTranspose` over two spatial axes.

    >>> import jax, jax.numpy as jnp
    >>> layer = ConvTranspose2d(8, 3, kernel_size=4, stride=2, padding=1, key=jax.random.key(0))
    >>> layer(jnp.ones((8, 16, 16))).shape
    (3, 32, 32)
    """


class ConvTranspose3d(_ConvTransposeNd, num_axes=3, init=False):
    """`ConvTranspose` over three spatial axes.

    >>> import jax, jax.numpy as jnp
    >>> layer = ConvTranspose3d(8, 3, kernel_size=4, stride=2, padding=1, key=jax.random.key(0))
    >>> layer(jnp.ones((8, 16, 16, 16))).shape
    (3, 32, 32, 32)
    """


# --- Shared by `Conv` and `ConvTranspose`: arguments, kernels, padding, cross-correlation ---


def _check_groups(groups: Any, in_channels: int, out_channels: int) -> int:
    """Converts `groups` to `int`. Raises `ValueError` if `groups` does not divide the channels."""
    groups = whole_number(groups, "groups")
    for name, channels in (("in_channels", in_channels), ("out_channels", out_channels)):
        if channels % groups:
            raise ValueError(
                f"{name} must be divisible by groups, got {name}={channels} and groups={groups}."
            )
    return groups


_PADDING_MODES = {
    "ZEROS": "constant",
    "REFLECT": "reflect",
    "REPLICATE": "edge",
    "CIRCULAR": "wrap",
}
"""For each `padding_mode`, the name of the same mode in `jnp.pad`."""


def _check_padding_mode(mode: Any, padding: str | Pads) -> str:
    """Returns `mode` in capitals.

    Raises `ValueError` for an unknown mode, or for negative padding in a mode other than zeros.
    """
    if not isinstance(mode, str) or mode.upper() not in _PADDING_MODES:
        words = ", ".join(map(repr, _PADDING_MODES))
        raise ValueError(f"padding_mode must be one of {words}, got {mode!r}.")
    if mode.upper() != "ZEROS" and not isinstance(padding, str) and min(map(min, padding)) < 0:
        raise ValueError(
            f"padding must not be negative for padding_mode={mode.upper()!r}, got {padding!r}."
        )
    return mode.upper()


def _window_extents(kernel_size: Sequence[int], dilation: Sequence[int]) -> tuple[int, ...]:
    """The sizes of a window after dilation."""
    return tuple(d * (k - 1) + 1 for k, d in zip(kernel_size, dilation, strict=True))


def _extend(x: Array, pads: Pads, mode: str) -> Array:
    """Pads the spatial axes of `x` with entries of `x`. `mode` determines which entries."""
    return jnp.pad(x, ((0, 0), *pads), mode=_PADDING_MODES[mode])


def _fold(y: Array, sizes: tuple[int, ...], pads: Pads, mode: str) -> Array:
    """The transpose of `_extend`: adds each entry of the padding to its original entry."""
    unpadded = jax.ShapeDtypeStruct((y.shape[0], *sizes), y.dtype)
    (folded,) = jax.linear_transpose(lambda x: _extend(x, pads, mode), unpadded)(y)
    return folded


def _correlate(
    x: Any,
    weight: Array,
    stride: tuple[int, ...],
    pads: Pads,
    dilation: tuple[int, ...],
    groups: int,
    input_dilation: tuple[int, ...] | None = None,
) -> Array:
    """The cross-correlation of one example, shape `(in_channels, *sizes)`, with zero padding."""
    # Images of integers become floats, as in `Linear`.
    x = x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(weight.dtype)
    y = conv(
        jnp.expand_dims(x, 0),
        weight,
        window_strides=stride,
        padding=pads,
        lhs_dilation=input_dilation,
        rhs_dilation=dilation,
        feature_group_count=groups,
    )
    return jnp.squeeze(y, 0)
