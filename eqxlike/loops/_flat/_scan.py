"""Data types of scans on lists of arrays. `_body` converts trees to these lists."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from ..._compat import vary, varying_axes

Arrays = Sequence[Array]
T = TypeVar("T")

Step = Callable[[Arrays, Arrays, Arrays, Any], tuple[Arrays, Arrays]]
"""`step(consts, carry, x, is_active) -> (carry, y)`. `is_active` is false for members of a batch
that have ended. The scan ignores the outputs for these members, except for masked arrays.
"""


@dataclasses.dataclass(frozen=True)
class Scan:
    """The static part of a scan.

    - `step`: one step.
    - `length`: the largest number of steps.
    - `levels`: `(length,)`, or `(number of segments, steps in a segment)`. The product of the two
      numbers is at least `length`. Empty for a scan that `_revolve` reverses.
    - `is_masked`: for each array of the carry, whether `step` itself leaves it unchanged for batch
      members that are not active. For all other arrays, the scan selects the old or the new value.
    - `is_written_once`: for each array of the carry, whether it is a buffer. Each entry of a buffer
      is written at most once, and read only afterwards. So any step can read entries from the last
      carry.
    - `is_reversed`: whether the scan goes from the last row of `xs` to the first.
    - `unroll`: number of steps in one iteration of the compiled loop. Used only if the number of
      steps is known at compile time.
    - `reading_step`: the same step, but without writes to buffers. `None` if there are no buffers.
    - `checkpoints`: the largest number of carries that are saved at one time. Used only if `levels`
      is empty.
    """

    step: Step
    length: int
    levels: tuple[int, ...]
    is_masked: tuple[bool, ...]
    is_written_once: tuple[bool, ...]
    is_reversed: bool = False
    unroll: int = 1
    reading_step: Step | None = None
    checkpoints: int | None = None

    @property
    def has_few_checkpoints(self) -> bool:
        """Whether two levels would save too many carries. `_revolve` is then used."""
        return not self.levels

    @property
    def reading(self) -> "Scan":
        """The scan without its writes to buffers, to run steps again when the buffers are full."""
        return dataclasses.replace(self, step=self.reading_step or self.step)

    @property
    def segment(self) -> "Scan":
        """The scan of one segment."""
        levels = self.levels[1:]
        return dataclasses.replace(self, length=math.prod(levels), levels=levels)

    def over_segments(self, step: Step, reading_step: Step | None = None) -> "Scan":
        """The scan whose steps are the segments of this scan."""
        number = self.levels[0]
        return dataclasses.replace(
            self,
            step=step,
            reading_step=reading_step,
            length=number,
            levels=(number,),
            # If both segments and their steps were unrolled, the program would be long.
            unroll=self.unroll if len(self.levels) == 1 else 1,
        )

    def saved(self, carry: Sequence[T]) -> list[T]:
        """Selects the arrays of a carry that are saved, which are all except the buffers.

        `carry` may also be a list with another item for each array of the carry, such as a flag.
        """
        return select(carry, [not is_once for is_once in self.is_written_once])

    def restored(self, saved: Arrays, last: Arrays) -> list[Array]:
        """The carry with the arrays of `saved`, and with the buffers of the last carry, `last`."""
        return fill(saved, last, [not is_once for is_once in self.is_written_once])


@dataclasses.dataclass(frozen=True)
class Operands:
    """The inputs of a scan.

    - `consts`: the arrays that all steps share.
    - `carry`: the initial carry.
    - `xs`: arrays of shape `(length, ...)`. Each step gets one row of each array.
    - `count`: the number of steps to run, at most `length`. If `None`, all steps run.
    """

    consts: Arrays
    carry: Arrays
    xs: Arrays
    count: Int[Array, ""] | None = None

    def flatten(self) -> list[Array]:
        return [*self.consts, *self.carry, *self.xs]

    def unflatten(self, flat: Arrays, count: Int[Array, ""] | None) -> "Operands":
        """The inverse of `flatten`. Converts numbers, which JAX may pass, to arrays."""
        consts, carry, xs = split(list(map(jnp.asarray, flat)), len(self.consts), len(self.carry))
        return Operands(consts, carry, xs, count)


def split(values: Sequence[T], *numbers: int) -> list[list[T]]:
    """Splits `values` into parts whose lengths are `numbers`, and a last part with the rest."""
    parts = []
    for number in numbers:
        parts.append(list(values[:number]))
        values = values[number:]
    return [*parts, list(values)]


def select(values: Iterable[T], flags: Sequence[bool]) -> list[T]:
    """The values whose flag is true."""
    return [value for value, flag in zip(values, flags, strict=True) if flag]


def fill(selected: Iterable[Any], values: Iterable[Any], flags: Sequence[bool]) -> list[Any]:
    """The inverse of `select`: replaces the values whose flag is true by items of `selected`."""
    rest = iter(selected)
    return [next(rest) if flag else value for value, flag in zip(values, flags, strict=True)]


def row_types(rows: Arrays) -> list[Any]:
    """For each array, the type of a row. It includes the mesh axes along which the array varies."""
    return [jax.typeof(array).update(shape=array.shape[1:]) for array in rows]


def zero_rows(number: int, row: Any, axes: frozenset[Any] = frozenset()) -> Array:
    """Zeros of shape `(number, *row.shape)`.

    Inside `jax.shard_map`, the zeros vary along the mesh axes `axes`, and along the mesh axes along
    which `row` varies.
    """
    return vary(jnp.zeros((number, *row.shape), row.dtype), varying_axes(row) | axes)


def row_of(rows: Arrays, index: Array) -> list[Array]:
    """The row at `index` of each array."""
    return [jax.lax.dynamic_index_in_dim(array, index, keepdims=False) for array in rows]


def with_row(rows: Arrays, index: Array, row: Arrays) -> list[Array]:
    """The arrays with the row at `index` replaced."""
    return [
        jax.lax.dynamic_update_index_in_dim(array, new, index, 0)
        for array, new in zip(rows, row, strict=True)
    ]


@dataclasses.dataclass(frozen=True)
class Segments:
    """The division of the steps of a scan into segments.

    - `length`: the length of the scan.
    - `segment_length`: the number of steps in a segment.
    - `number`: the number of segments.
    - `total`: a list with one item, the number of steps. Empty if all segments are full.
    """

    length: int
    segment_length: int
    number: int
    total: list[Array]

    @property
    def count(self) -> Array | None:
        """The number of segments that have steps. `None` if all segments have steps."""
        return -(-self.total[0] // self.segment_length) if self.total else None

    @property
    def indices(self) -> Array:
        return jnp.arange(self.number)

    def count_in(self, index: Array, total: Arrays, is_active: Any) -> Array | None:
        """The number of steps in segment `index`, and 0 for batch members that are not active.
        `None` if all segments are full.
        """
        if not total:
            return None
        count = jnp.clip(total[0] - index * self.segment_length, 0, self.segment_length)
        return jnp.where(is_active, count, 0)

    def split(self, rows: Arrays) -> list[Array]:
        """Groups the rows of steps by segment."""
        missing = self.number * self.segment_length - self.length
        return [
            jnp.reshape(
                jnp.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1)) if missing else array,
                (self.number, self.segment_length, *array.shape[1:]),
            )
            for array in rows
        ]

    def join(self, rows: Arrays) -> list[Array]:
        """The inverse of `split`."""
        joined = (jnp.reshape(array, (-1, *array.shape[2:])) for array in rows)
        return [array[: self.length] for array in joined]


def segments_of(scan: Scan, operands: Operands) -> Segments:
    segment_length, number = scan.segment.length, scan.levels[0]
    count = operands.count
    if count is None and segment_length * number != scan.length:
        count = jnp.asarray(scan.length)
    return Segments(scan.length, segment_length, number, [] if count is None else [count])


# --- The number and length of segments ---


def levels_for(length: int, checkpoints: int | None) -> tuple[int, ...]:
    """The `levels` of a `Scan`: one or two numbers; empty if `_revolve` must be used.

    **Arguments:**

    - `length`: the length of the loop, at least 0.
    - `checkpoints`: the largest number of carries that are saved at one time. If two levels would
      save more carries than this, the result is empty. With `None`, about `2 * sqrt(length)`
      carries are saved, and each step runs three times.
    """
    if length <= 1 or (checkpoints is not None and checkpoints >= length):
        return (max(length, 1),)
    root = math.isqrt(length)
    near = range(root, max(root // 2, 1) - 1, -1)
    root = next((number for number in near if length % number == 0), root)
    levels = (-(-length // root), root)
    return levels if checkpoints is None or sum(levels) <= checkpoints else ()
