"""Transposed convolutions."""

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
    correlate,
    describe,
    draw_kernel,
    fold,
    padding_by_axis,
    pads_for,
    sizes_by_axis,
    window_extents,
)


class ConvTranspose(Module):
    """The transpose of a convolution, over any number of spatial axes.

    It goes the way of a `Conv` backward: from the shape of its output to that of its input, with
    the same entries connected. Dumoulin & Visin (2016), "A guide to convolution arithmetic for deep
    learning". Swap the numbers of channels and keep the other arguments; where inputs of several
    sizes lead to one output, `output_padding` says which of them is meant.

    The kernel lies as in a `Conv`, `(out_channels, in_channels // groups, *kernel_size)`, and meets
    `x`, spread by `stride`, as it does there. So the exact transpose of the linear map
    `conv`, for `groups=1`, has the weight
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
        """An argument for each spatial axis may be one integer, which then holds for all.

        **Arguments:**

        - `num_spatial_dims`: number of spatial axes, 2 for images.
        - `in_channels`, `out_channels`: sizes of the first axis of input and output.
        - `kernel_size`: number of points of the kernel along each spatial axis.
        - `stride`: that of the convolution that this is the transpose of: how far the places of
          two neighbours of the input lie apart in the output.
        - `padding`: that of the convolution, as `Conv` takes it. It makes the output smaller; with
          `"SAME"` and `"SAME_LOWER"` the output has `size * stride - output_padding` entries.
        - `output_padding`: how many more entries the output has at the end of each spatial axis,
          for which the convolution has the same output; less than `stride`. With `"SAME"` and
          `"SAME_LOWER"`: how many less.
        - `dilation`: distance between the points of the kernel.
        - `groups`: number of parts into which the channels are divided; each part of the output
          sees its part of the input alone.
        - `use_bias`: whether to add a bias to each channel.
        - `padding_mode`: that of the convolution, as `Conv` takes it. In a mode other than
          `"ZEROS"` the convolution sees some of its inputs a second time in the padding: what
          belongs there is added to them.
        - `dtype`: of weight and bias, floating or complex; JAX's default float if `None`.
        - `weight_init`, `bias_init`: instead of the uniform draw, one of `jax.nn.initializers` or a
          function of your own, `init(key, shape, dtype)`. For the weight it is called with the
          shape `(*kernel_size, in_channels // groups, out_channels)`, on which JAX's
          initializers count their fan-in.
        - `key`: for the initial weight and bias, which are uniform as those of a `Conv`.

        **Raises:** `ValueError`, naming the argument, for a size that is not a positive integer, a
        sequence of another length than `num_spatial_dims`, `groups` that do not divide both
        numbers of channels, an unknown word, and an `output_padding` that is not less than
        `stride`; `TypeError` for an integer dtype.
        """
        num_spatial_dims = whole_number(num_spatial_dims, "num_spatial_dims")
        self.num_spatial_dims = num_spatial_dims
        self.in_channels = whole_number(in_channels, "in_channels", least=0)
        self.out_channels = whole_number(out_channels, "out_channels", least=0)
        self.kernel_size = sizes_by_axis(kernel_size, num_spatial_dims, "kernel_size")
        self.stride = sizes_by_axis(stride, num_spatial_dims, "stride")
        self.padding = padding_by_axis(padding, num_spatial_dims)
        self.output_padding = sizes_by_axis(
            output_padding, num_spatial_dims, "output_padding", least=0
        )
        if any(more >= step for more, step in zip(self.output_padding, self.stride, strict=True)):
            raise ValueError(
                "output_padding must be less than stride along every spatial axis, got "
                f"output_padding={self.output_padding} and stride={self.stride}."
            )
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

        **Raises:** `ValueError` if `x` has another number of channels or of axes, or if the
        padding leaves nothing of the output.
        """
        del key
        check_input(self, x, (self.in_channels, *axis_names(self.num_spatial_dims)))
        extents = window_extents(self.kernel_size, self.dilation)
        # Spread by the stride: from the first place of an entry to the last.
        spans = [(size - 1) * step for size, step in zip(x.shape[1:], self.stride, strict=True)]
        sizes = self._output_sizes(spans, extents)
        if min(sizes) < 1:
            raise ValueError(
                f"{describe(self)} expected x large enough for an output; got x of shape "
                f"{x.shape}, of which padding={self.padding!r} and "
                f"output_padding={self.output_padding} leave an output of sizes {sizes}."
            )
        pads = pads_for(self.padding, sizes, extents, self.stride)
        is_folded = self.padding_mode != "ZEROS" and any(map(any, pads))
        # The convolution runs over its padded input: so does the transpose over its output, from
        # which the padding is then cut off. Zeros are cut off before they are computed.
        around = tuple(
            (extent - 1, before + size + after - span - 1)
            for (before, after), size, span, extent in zip(pads, sizes, spans, extents, strict=True)
        )
        if not is_folded:
            around = tuple(
                (first - before, last - after)
                for (first, last), (before, after) in zip(around, pads, strict=True)
            )
        one = (1,) * self.num_spatial_dims
        y = correlate(x, self.weight, one, around, self.dilation, self.groups, self.stride)
        if is_folded:
            y = fold(y, sizes, pads, self.padding_mode)
        return y if self.bias is None else y + self.bias

    def _output_sizes(self, spans: list[int], extents: tuple[int, ...]) -> tuple[int, ...]:
        """The sizes of the inputs of the convolution that this is the transpose of."""
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


class ConvTranspose1d(ConvTranspose):
    """`ConvTranspose` over one spatial axis.

    >>> import jax, jax.numpy as jnp
    >>> layer = ConvTranspose1d(8, 3, kernel_size=4, stride=2, padding=1, key=jax.random.key(0))
    >>> layer(jnp.ones((8, 16))).shape
    (3, 32)
    """

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
        """**Arguments:** those of `ConvTranspose`, with `num_spatial_dims=1`.

        By position `output_padding` comes before `padding`, the other way round than there.
        """
        super().__init__(
            1,
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            output_padding,
            dilation,
            groups,
            use_bias,
            padding_mode,
            dtype,
            weight_init=weight_init,
            bias_init=bias_init,
            key=key,
        )


class ConvTranspose2d(ConvTranspose):
    """`ConvTranspose` over two spatial axes.

    >>> import jax, jax.numpy as jnp
    >>> layer = ConvTranspose2d(8, 3, kernel_size=4, stride=2, padding=1, key=jax.random.key(0))
    >>> layer(jnp.ones((8, 16, 16))).shape
    (3, 32, 32)
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes = (1, 1),
        output_padding: Sizes = (0, 0),
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
        """**Arguments:** those of `ConvTranspose`, with `num_spatial_dims=2`.

        By position `output_padding` comes before `padding`, the other way round than there.
        """
        super().__init__(
            2,
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            output_padding,
            dilation,
            groups,
            use_bias,
            padding_mode,
            dtype,
            weight_init=weight_init,
            bias_init=bias_init,
            key=key,
        )


class ConvTranspose3d(ConvTranspose):
    """`ConvTranspose` over three spatial axes.

    >>> import jax, jax.numpy as jnp
    >>> layer = ConvTranspose3d(8, 3, kernel_size=4, stride=2, padding=1, key=jax.random.key(0))
    >>> layer(jnp.ones((8, 16, 16, 16))).shape
    (3, 32, 32, 32)
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes = (1, 1, 1),
        output_padding: Sizes = (0, 0, 0),
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
        """**Arguments:** those of `ConvTranspose`, with `num_spatial_dims=3`.

        By position `output_padding` comes before `padding`, the other way round than there.
        """
        super().__init__(
            3,
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            output_padding,
            dilation,
            groups,
            use_bias,
            padding_mode,
            dtype,
            weight_init=weight_init,
            bias_init=bias_init,
            key=key,
        )
