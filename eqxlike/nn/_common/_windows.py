"""Windows that slide over an input: sizes by axis, padding, kernels, reductions."""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from ..._dtypes import parameter_dtype
from ..._module import Module
from ..._numbers import integer, whole_number
from ._inputs import describe
from ._parameters import Initializer, Parameter, draw, fan_in_limit

Sizes = int | Sequence[int]
"""One size for all spatial axes, or one for each."""

Pads = tuple[tuple[int, int], ...]
"""Numbers of entries to add before and after each spatial axis; negative ones are cut off."""

Padding = str | int | Sequence[int] | Sequence[tuple[int, int]]
"""One padding for all sides, one for each axis, a pair for each axis, or a word."""

PADDING_WORDS = ("VALID", "SAME", "SAME_LOWER")

PADDING_MODES = {
    "ZEROS": "constant",
    "REFLECT": "reflect",
    "REPLICATE": "edge",
    "CIRCULAR": "wrap",
}
"""The name in `jnp.pad` for each `padding_mode`."""

DIFFERENTIABLE = {jax.lax.add: 0, jax.lax.max: -math.inf, jax.lax.min: math.inf}
"""Reductions of which JAX knows the derivative, each with the one number that it may start at."""


def sizes_by_axis(value: Any, num_axes: int, name: str, least: int = 1) -> tuple[int, ...]:
    """One size for each spatial axis.

    **Raises:** `ValueError` unless `value` is an integer of at least `least`, or `num_axes` such.
    """
    numbers = [integer(each) for each in _spread(value, num_axes)]
    sizes = tuple(number for number in numbers if number is not None and number >= least)
    if len(numbers) != num_axes or len(sizes) != num_axes:
        raise ValueError(
            f"{name} must be an integer of at least {least}, or a sequence of {num_axes} such, one "
            f"for each spatial axis; got {value!r}."
        )
    return sizes


def _spread(value: Any, num_axes: int) -> list[Any]:
    # An array of shape `()` is an integer, and says that it is iterable.
    is_one = integer(value) is not None or not isinstance(value, Iterable) or isinstance(value, str)
    return [value] * num_axes if is_one else list(value)


def padding_by_axis(padding: Padding, num_axes: int) -> str | Pads:
    """A pair for each spatial axis, or one of `PADDING_WORDS` in capitals.

    **Raises:** `ValueError` if `padding` is neither.
    """
    if isinstance(padding, str) and padding.upper() in PADDING_WORDS:
        return padding.upper()
    entries = _spread(padding, num_axes)
    pairs = tuple(pair for pair in map(_pair, entries) if pair is not None)
    if len(entries) != num_axes or len(pairs) != num_axes:
        raise ValueError(
            f"padding must be an integer, a sequence of {num_axes} integers or pairs of integers, "
            f"one for each spatial axis, or one of {', '.join(map(repr, PADDING_WORDS))}; got "
            f"{padding!r}."
        )
    return pairs


def _pair(entry: Any) -> tuple[int, int] | None:
    sides = [integer(side) for side in _spread(entry, 2)]
    if len(sides) != 2 or sides[0] is None or sides[1] is None:
        return None
    return sides[0], sides[1]


def check_padding_mode(mode: Any, padding: str | Pads) -> str:
    """`mode` in capitals.

    **Raises:** `ValueError` unless it is one of `PADDING_MODES`; also if `padding` has a negative
    entry in a mode other than zeros.
    """
    if not isinstance(mode, str) or mode.upper() not in PADDING_MODES:
        words = ", ".join(map(repr, PADDING_MODES))
        raise ValueError(f"padding_mode must be one of {words}, got {mode!r}.")
    if mode.upper() != "ZEROS" and not isinstance(padding, str) and min(map(min, padding)) < 0:
        raise ValueError(
            f"padding must not be negative for padding_mode={mode.upper()!r}, got {padding!r}."
        )
    return mode.upper()


def check_groups(groups: Any, in_channels: int, out_channels: int) -> int:
    """`groups` as an `int`.

    **Raises:** `ValueError` unless it divides both numbers of channels.
    """
    groups = whole_number(groups, "groups")
    for name, channels in (("in_channels", in_channels), ("out_channels", out_channels)):
        if channels % groups:
            raise ValueError(
                f"{name} must be divisible by groups, got {name}={channels} and groups={groups}."
            )
    return groups


def window_extents(kernel_size: Sequence[int], dilation: Sequence[int]) -> tuple[int, ...]:
    """The entries that a window spans along each axis, from its first point to its last."""
    return tuple(d * (k - 1) + 1 for k, d in zip(kernel_size, dilation, strict=True))


def pads_for(
    padding: str | Pads, sizes: Sequence[int], extents: Sequence[int], stride: Sequence[int]
) -> Pads:
    """The entries to add to an input of these sizes."""
    if not isinstance(padding, str):
        return padding
    if padding == "VALID":
        return ((0, 0),) * len(extents)
    pads = []
    for size, extent, step in zip(sizes, extents, stride, strict=True):
        num_windows = -(-size // step)
        total = max((num_windows - 1) * step + extent - size, 0)
        smaller, larger = total // 2, total - total // 2
        pads.append((smaller, larger) if padding == "SAME" else (larger, smaller))
    return tuple(pads)


def check_window_fits(layer: Module, x: Any, pads: Pads, extents: tuple[int, ...]) -> None:
    """Raises `ValueError` if along some axis the window is longer than the padded input."""
    shape = jnp.shape(x)
    padded = tuple(size + sum(pad) for size, pad in zip(shape[1:], pads, strict=True))
    if any(size < extent for size, extent in zip(padded, extents, strict=True)):
        raise ValueError(
            f"{describe(layer)} expected spatial axes that, padded, are no shorter than its "
            f"window, {extents}; got x of shape {shape}, whose spatial axes have sizes {padded} "
            "with the padding."
        )


def axis_names(num_spatial_dims: int) -> tuple[str, ...]:
    """The names of the spatial axes in error messages."""
    if num_spatial_dims == 1:
        return ("length",)
    if num_spatial_dims <= 3:
        return ("depth", "height", "width")[3 - num_spatial_dims :]
    return tuple(f"dim_{axis}" for axis in range(1, num_spatial_dims + 1))


def draw_kernel(
    key: PRNGKeyArray,
    shape: tuple[int, ...],
    use_bias: bool,
    dtype: Any,
    weight_init: Initializer | None,
    bias_init: Initializer | None,
) -> tuple[Array, Array | None]:
    """A weight of shape `(out_channels, in_channels // groups, *kernel_size)`, and a bias that adds
    to an output: shape `(out_channels, 1, ..., 1)`.

    By default both are uniform, with the fan-in as the limit.
    """
    dtype = parameter_dtype(dtype)
    limit = fan_in_limit(math.prod(shape[1:]))
    bias_shape = (shape[0],) + (1,) * (len(shape) - 2)
    return draw(
        key,
        Parameter(shape, dtype, limit, weight_init, inputs_last=True),
        Parameter(bias_shape, dtype, limit, bias_init) if use_bias else None,
    )


def extend(x: Array, pads: Pads, mode: str) -> Array:
    """Pads the spatial axes of `x` with entries of its own, as `mode` says."""
    return jnp.pad(x, ((0, 0), *pads), mode=PADDING_MODES[mode])


def fold(y: Array, sizes: tuple[int, ...], pads: Pads, mode: str) -> Array:
    """The transpose of `extend`: adds what stands in the padding to what it is a copy of."""
    unpadded = jax.ShapeDtypeStruct((y.shape[0], *sizes), y.dtype)
    (folded,) = jax.linear_transpose(lambda x: extend(x, pads, mode), unpadded)(y)
    return folded


def correlate(
    x: Any,
    weight: Array,
    stride: tuple[int, ...],
    pads: Pads,
    dilation: tuple[int, ...],
    groups: int,
    input_dilation: tuple[int, ...] | None = None,
) -> Array:
    """The cross-correlation of one `x` of shape `(in_channels, *sizes)`, with zeros around it."""
    # The batch axis of length one is a change of shape, which XLA makes without work.
    y = jax.lax.conv_general_dilated(
        jnp.expand_dims(x, 0),
        weight,
        window_strides=stride,
        padding=pads,
        lhs_dilation=input_dilation,
        rhs_dilation=dilation,
        feature_group_count=groups,
    )
    return jnp.squeeze(y, 0)


def reduce_windows(
    x: Array,
    init: int | float | Array,
    operation: Callable[[Array, Array], Array],
    kernel_size: tuple[int, ...],
    stride: tuple[int, ...],
    pads: Pads,
) -> Array:
    """Reduces each window of `x`, of shape `(channels, *sizes)`, with `init` around it."""
    if min(map(min, pads)) < 0:
        # XLA ends the process over a window of one entry with negative padding.
        cut = [(min(before, 0), min(after, 0), 0) for before, after in pads]
        x = jax.lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *cut])
        pads = tuple((max(before, 0), max(after, 0)) for before, after in pads)
    # By identity: `operation` may be anything, and need not be hashable.
    if isinstance(init, (int, float)) and any(
        operation is known and init == identity for known, identity in DIFFERENTIABLE.items()
    ):
        # With the channels last, side by side in memory: between two convolutions on a CPU XLA then
        # keeps the layout that it likes for them.
        reduced = jax.lax.reduce_window(
            jnp.moveaxis(x, 0, -1),
            init,
            operation,
            (*kernel_size, 1),
            (*stride, 1),
            (*pads, (0, 0)),
        )
        return jnp.moveaxis(reduced, -1, 0)
    # JAX has no derivative of another reduction. So all windows are reduced side by side, from
    # their first entries to their last.
    start = jnp.asarray(init).astype(x.dtype)
    padded = jax.lax.pad(x, start, [(0, 0, 0), *((*pad, 0) for pad in pads)])
    spare = [size - extent for size, extent in zip(padded.shape[1:], kernel_size, strict=True)]

    def entries_at(offset: tuple[int, ...]) -> Array:
        limits = [first + each + 1 for first, each in zip(offset, spare, strict=True)]
        return jax.lax.slice(padded, (0, *offset), (x.shape[0], *limits), (1, *stride))

    entries = [entries_at(offset) for offset in itertools.product(*map(range, kernel_size))]
    return functools.reduce(operation, entries, jnp.full_like(entries[0], start))
