"""Convolutions."""

from typing import Any

from jaxtyping import Array, PRNGKeyArray, Shaped

from .._module import Module, field
from .._numbers import whole_number
from ._common import (
    Initializer,
    Padding,
    Pads,
    Sizes,
    axis_names,
    check_groups,
    check_input,
    check_padding_mode,
    check_window_fits,
    correlate,
    draw_kernel,
    extend,
    padding_by_axis,
    pads_for,
    sizes_by_axis,
    window_extents,
)


class Conv(Module):
    """A convolution over any number of spatial axes.

    What machine learning calls a convolution, LeCun, Boser, Denker, Henderson, Howard, Hubbard &
    Jackel (1989), "Backpropagation applied to handwritten zip code recognition": a
    cross-correlation, in which the kernel is not flipped,

        y[o, n] = bias[o] + sum over i, k of weight[o, i, k] * x[i, n * stride + k * dilation]

    where `n` and `k` count along every spatial axis and `x` is padded first. Weight and bias start
    uniform on `(-1/sqrt(fan_in), 1/sqrt(fan_in))`, with `fan_in = in_channels / groups * (points
    of the kernel)`.

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
        """An argument for each spatial axis may be one integer, which then holds for all.

        **Arguments:**

        - `num_spatial_dims`: number of spatial axes, 2 for images.
        - `in_channels`, `out_channels`: sizes of the first axis of input and output.
        - `kernel_size`: number of points of the kernel along each spatial axis.
        - `stride`: how far the kernel moves from one output to the next.
        - `padding`: how many entries are added at both ends of each spatial axis; or pairs
          `(before, after)`, one for each axis; or `"VALID"` for none; or `"SAME"` for an output
          of `ceil(size / stride)` entries, with an odd one added at the end, with
          `"SAME_LOWER"` at the beginning. Negative entries are cut off.
        - `dilation`: distance between the points of the kernel.
        - `groups`: number of parts into which the channels are divided; each part of the output
          sees its part of the input alone. `groups=in_channels` is a depthwise convolution.
        - `use_bias`: whether to add a bias to each channel.
        - `padding_mode`: what is added to `1234`: `"ZEROS"`, `0012340`; `"REFLECT"`, `3212343`;
          `"REPLICATE"`, `1112344`; `"CIRCULAR"`, `3412341`.
        - `dtype`: of weight and bias, floating or complex; JAX's default float if `None`.
        - `weight_init`, `bias_init`: instead of the uniform draw, one of `jax.nn.initializers` or a
          function of your own, `init(key, shape, dtype)`. For the weight it is called with the
          shape `(*kernel_size, in_channels // groups, out_channels)`, on which JAX's
          initializers count their fan-in.
        - `key`: for the initial weight and bias.

        **Raises:** `ValueError`, naming the argument, for a size that is not a positive integer, a
        sequence of another length than `num_spatial_dims`, `groups` that do not divide both
        numbers of channels, and an unknown word; `TypeError` for an integer dtype.
        """
        num_spatial_dims = whole_number(num_spatial_dims, "num_spatial_dims")
        self.num_spatial_dims = num_spatial_dims
        self.in_channels = whole_number(in_channels, "in_channels", least=0)
        self.out_channels = whole_number(out_channels, "out_channels", least=0)
        self.kernel_size = sizes_by_axis(kernel_size, num_spatial_dims, "kernel_size")
        self.stride = sizes_by_axis(stride, num_spatial_dims, "stride")
        self.padding = padding_by_axis(padding, num_spatial_dims)
        self.dilation = sizes_by_axis(dilation, num_spatial_dims, "dilation")
        self.groups = check_groups(groups, self.in_channels, self.out_channels)
        self.use_bias = use_bias
        self.padding_mode = check_padding_mode(padding_mode, self.padding)
        shape = (self.out_channels, self.in_channels // self.groups, *self.kernel_size)
        self.weight, self.bias = draw_kernel(key, shape, use_bias, dtype, weight_init, bias_init)

    def __call__(
        self, x: Shaped[Array, "in_channels *sizes"], *, key: PRNGKeyArray | None = None
    ) -> Shaped[Array, "out_channels *new_sizes"]:
        """**Arguments:**

        - `x`: shape `(in_channels, dim_1, ..., dim_N)` with `N = num_spatial_dims`.
        - `key`: ignored; layers share one signature.

        **Returns:** shape `(out_channels, new_dim_1, ..., new_dim_N)`.

        **Raises:** `ValueError` if `x` has another number of channels or of axes, or is smaller
        than the kernel.
        """
        del key
        check_input(self, x, (self.in_channels, *axis_names(self.num_spatial_dims)))
        extents = window_extents(self.kernel_size, self.dilation)
        pads = pads_for(self.padding, x.shape[1:], extents, self.stride)
        check_window_fits(self, x, pads, extents)
        if self.padding_mode != "ZEROS":
            x, pads = extend(x, pads, self.padding_mode), ((0, 0),) * self.num_spatial_dims
        y = correlate(x, self.weight, self.stride, pads, self.dilation, self.groups)
        return y if self.bias is None else y + self.bias


class Conv1d(Conv):
    """`Conv` over one spatial axis, as of a sequence.

    >>> import jax, jax.numpy as jnp
    >>> layer = Conv1d(3, 8, kernel_size=5, padding="SAME", key=jax.random.key(0))
    >>> layer(jnp.ones((3, 100))).shape
    (8, 100)
    """

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
        """**Arguments:** those of `Conv`, with `num_spatial_dims=1`."""
        super().__init__(
            1,
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            use_bias,
            padding_mode,
            dtype,
            weight_init=weight_init,
            bias_init=bias_init,
            key=key,
        )


class Conv2d(Conv):
    """`Conv` over two spatial axes, as of an image.

    >>> import jax, jax.numpy as jnp
    >>> layer = Conv2d(3, 8, kernel_size=3, stride=2, padding=1, key=jax.random.key(0))
    >>> layer(jnp.ones((3, 32, 32))).shape
    (8, 16, 16)
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes = (1, 1),
        padding: Padding = (0, 0),
        dilation: Sizes = (1, 1),
        groups: int = 1,
        use_bias: bool = True,
        padding_mode: str = "ZEROS",
        dtype: Any = None,
        *,
        weight_init: Initializer | None = None,
        bias_init: Initializer | None = None,
        key: PRNGKeyArray,
    ):
        """**Arguments:** those of `Conv`, with `num_spatial_dims=2`."""
        super().__init__(
            2,
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            use_bias,
            padding_mode,
            dtype,
            weight_init=weight_init,
            bias_init=bias_init,
            key=key,
        )


class Conv3d(Conv):
    """`Conv` over three spatial axes, as of a volume or a video.

    >>> import jax, jax.numpy as jnp
    >>> layer = Conv3d(3, 8, kernel_size=(1, 3, 3), key=jax.random.key(0))
    >>> layer(jnp.ones((3, 16, 32, 32))).shape
    (8, 16, 30, 30)
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes = (1, 1, 1),
        padding: Padding = (0, 0, 0),
        dilation: Sizes = (1, 1, 1),
        groups: int = 1,
        use_bias: bool = True,
        padding_mode: str = "ZEROS",
        dtype: Any = None,
        *,
        weight_init: Initializer | None = None,
        bias_init: Initializer | None = None,
        key: PRNGKeyArray,
    ):
        """**Arguments:** those of `Conv`, with `num_spatial_dims=3`."""
        super().__init__(
            3,
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            use_bias,
            padding_mode,
            dtype,
            weight_init=weight_init,
            bias_init=bias_init,
            key=key,
        )
