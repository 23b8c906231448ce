"""Arguments of sliding windows, for convolutions and pools: sizes and padding for each axis."""

import functools
import inspect
import types
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp

from .._check_numbers import integer
from .._module import Module
from ._inputs import describe

Sizes = int | Sequence[int]
"""One size for all spatial axes, or one for each axis."""

Pads = tuple[tuple[int, int], ...]
"""For each axis, the number of entries to add before and after; negative numbers remove entries."""

Padding = str | int | Sequence[int] | Sequence[tuple[int, int]]
"""One number for all sides, one number or pair for each axis, or one of `PADDING_WORDS`."""

PADDING_WORDS = ("VALID", "SAME", "SAME_LOWER")


class OverAxes:
    """Base of layers whose class header sets the number of spatial axes.

    In `class Conv2d(_ConvNd, num_axes=2, init=False)`, `init=False` makes type checkers use the
    `__init__` of `_ConvNd`. At run time `Conv2d` gets a copy of that function, named
    `Conv2d.__init__`, whose defaults have one value for each axis.
    """

    _num_axes: ClassVar[int]
    _by_axis: ClassVar[tuple[str, ...]] = ()
    """Parameters whose default is repeated for each axis."""

    def __init_subclass__(
        cls, num_axes: int | None = None, init: bool | None = None, **kwargs: Any
    ) -> None:
        if num_axes is None or hasattr(cls, "_num_axes"):
            given = {"num_axes": num_axes, "init": init}
            kwargs |= {name: value for name, value in given.items() if value is not None}
            return super().__init_subclass__(**kwargs)
        super().__init_subclass__(**kwargs)
        cls._num_axes = num_axes
        shared, has_many_axes = inspect.unwrap(cls.__init__), num_axes > 1
        defaults = [
            (each.default,) * num_axes
            if has_many_axes and each.name in cls._by_axis
            else each.default
            for each in inspect.signature(shared).parameters.values()
            if each.kind is each.POSITIONAL_OR_KEYWORD and each.default is not each.empty
        ]
        copied = types.FunctionType(
            shared.__code__, shared.__globals__, "__init__", tuple(defaults), shared.__closure__
        )
        copied.__kwdefaults__ = shared.__kwdefaults__
        functools.update_wrapper(copied, shared, updated=())
        del copied.__wrapped__
        copied.__qualname__ = f"{cls.__qualname__}.__init__"
        type.__setattr__(cls, "__init__", copied)


def sizes_by_axis(value: Any, num_axes: int, name: str, least: int = 1) -> tuple[int, ...]:
    """Returns `value` as a tuple with one size for each spatial axis.

    Raises `ValueError` unless `value` is an integer >= `least`, or a sequence of
    `num_axes` such integers.
    """
    numbers = [integer(each) for each in _per_axis(value, num_axes)]
    sizes = tuple(number for number in numbers if number is not None and number >= least)
    if len(numbers) != num_axes or len(sizes) != num_axes:
        raise ValueError(
            f"{name} must be an integer of at least {least}, or a sequence of {num_axes} such "
            f"integers, one for each spatial axis; got {value!r}."
        )
    return sizes


def _per_axis(value: Any, num_axes: int) -> list[Any]:
    # Arrays of shape `()` are instances of `Iterable`, but count as integers.
    is_one = integer(value) is not None or not isinstance(value, Iterable) or isinstance(value, str)
    return [value] * num_axes if is_one else list(value)


def padding_by_axis(padding: Padding, num_axes: int) -> str | Pads:
    """Converts `padding` to one pair for each spatial axis, or to one of `PADDING_WORDS`."""
    if isinstance(padding, str) and padding.upper() in PADDING_WORDS:
        return padding.upper()
    entries = _per_axis(padding, num_axes)
    pairs = tuple(pair for pair in map(_pair, entries) if pair is not None)
    if len(entries) != num_axes or len(pairs) != num_axes:
        raise ValueError(
            f"padding must be an integer, a sequence of {num_axes} integers or pairs of integers, "
            f"one for each spatial axis, or one of {', '.join(map(repr, PADDING_WORDS))}; got "
            f"{padding!r}."
        )
    return pairs


def _pair(entry: Any) -> tuple[int, int] | None:
    sides = [integer(side) for side in _per_axis(entry, 2)]
    if len(sides) != 2 or sides[0] is None or sides[1] is None:
        return None
    return sides[0], sides[1]


def pads_for(
    padding: str | Pads, sizes: Sequence[int], extents: Sequence[int], stride: Sequence[int]
) -> Pads:
    """The padding of an input with these spatial sizes, as pairs."""
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
    """Raises `ValueError` if the window is larger than the padded input along any axis."""
    shape = jnp.shape(x)
    padded = tuple(size + sum(pad) for size, pad in zip(shape[1:], pads, strict=True))
    if any(size < extent for size, extent in zip(padded, extents, strict=True)):
        raise ValueError(
            f"{describe(layer)} expected padded spatial axes at least as large as its window, "
            f"{extents}; got x of shape {shape}, whose spatial axes have sizes {padded} after "
            "padding."
        )


def axis_names(num_spatial_dims: int) -> tuple[str, ...]:
    """The names of the spatial axes in error messages."""
    if num_spatial_dims == 1:
        return ("length",)
    if num_spatial_dims <= 3:
        return ("depth", "height", "width")[3 - num_spatial_dims :]
    return tuple(f"dim_{axis}" for axis in range(1, num_spatial_dims + 1))
