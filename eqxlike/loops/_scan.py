"""Scans on lists of arrays: their data types, and the arrays that have tangents.

The loops on lists of arrays are in these files, from the lowest layer up:

- `_scan`: the data types: a scan (`Scan`), its inputs (`Operands`), and its segments. It also finds
  the arrays that have tangents, and builds the scan that propagates them.
- `_primitives`: primitives with which a batch of loops stays one loop under `jax.vmap`, and the
  transpose of a loop of unknown length, for `jax.linear_transpose`.
- `_step`: the forward pass of a scan, the backward pass of one step, reverse mode with few saved
  carries (`revolve`), and the cotangents of buffers.
- `_counted`: the differentiable scan, and a loop of unknown length, which is differentiated as a
  scan of the steps that it ran. The top of the file explains the method.

Basic terms:

- **consts**: the arrays that all steps share.
- **carry**: the arrays that are passed from step to step. `Operands.carry` is the initial carry. A
  returned carry, or a carry named `last`, is the last carry.
- **xs**: the arrays whose rows are the inputs of the steps. One row is **x**.
- **ys**: the arrays whose rows are the outputs of the steps. One row is **y**.
- **saved**: the part of a carry that reverse mode saves. It has all arrays except buffers.

Terms for derivatives, batches and buffers:

- **nonzero**: an array whose tangent is not known to be zero.
- **active**: a member of a batch is active until its loop has ended.
- **masked**: an array of the carry that the step itself leaves unchanged for members that are not
  active. For all other arrays, the scan selects the old or the new value after the step.
- **written once**: an array of the carry that is a buffer. Each entry is written at most once, and
  read only afterwards.
- **reading**: the scan without its writes to buffers. Reverse mode uses this scan to run steps
  again after the loop has filled the buffers.
- **shared**: a const is shared if it is the same for all members of a batch. Its cotangents are
  summed over the batch.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from .._compat import vary, varying_axes
from .._transforms._derivatives._linear_call import fill, has_tangent, is_inexact, select

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
      numbers is at least `length`. Empty for a scan that `revolve` reverses.
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
        """Whether two levels would save too many carries. `revolve` is then used."""
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

    def segments(self, operands: "Operands") -> "Segments":
        segment_length, number = self.segment.length, self.levels[0]
        count = operands.count
        if count is None and segment_length * number != self.length:
            count = jnp.asarray(self.length)
        return Segments(self.length, segment_length, number, [] if count is None else [count])

    def with_tangents(
        self, operands: "Operands", nonzero: "Nonzero", *, with_ys: bool = False
    ) -> "Scan":
        """Makes a scan that computes this scan and propagates its nonzero tangents.

        The consts, the carry and the xs each have the arrays of this scan first, and then their
        tangents. The ys are the tangents of the ys of this scan. If `with_ys` is true, the ys of
        this scan come before these tangents.
        """
        num_consts, num_carry, num_xs = map(len, (operands.consts, operands.carry, operands.xs))

        def step_of(scan: "Scan") -> Step:
            def step(consts: Arrays, carry: Arrays, x: Arrays, is_active: Any) -> Any:
                consts, consts_dot = split(consts, num_consts)
                carry, carry_dot = split(carry, num_carry)
                x, x_dot = split(x, num_xs)
                function = scan.step_of_nonzero(nonzero, consts, carry, x, is_active)
                primals = nonzero.select(consts, carry, x)
                _, (new_dot, y_dot), (new, y) = jax.jvp(
                    function, primals, (consts_dot, carry_dot, x_dot), has_aux=True
                )
                return [*new, *new_dot], [*y, *y_dot] if with_ys else y_dot

            return step

        return dataclasses.replace(
            self,
            step=step_of(self),
            reading_step=step_of(self.reading),
            is_masked=(*self.is_masked, *select(self.is_masked, nonzero.carry)),
            is_written_once=(*self.is_written_once, *select(self.is_written_once, nonzero.carry)),
        )

    def step_of_nonzero(
        self, nonzero: "Nonzero", consts: Arrays, carry: Arrays, x: Arrays, is_active: Any
    ) -> Callable[..., Any]:
        """A step as a function of its nonzero operands.

        The function returns a pair: the nonzero outputs, and, as auxiliary output, all outputs.
        """

        def function(*parts: Any) -> Any:
            new, y = self.step(*nonzero.fill(parts, consts, carry, x), is_active)
            return (select(new, nonzero.carry), select(y, nonzero.ys)), (list(new), list(y))

        return function


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
        count = [] if self.count is None else [self.count]
        return [*self.consts, *self.carry, *self.xs, *count]

    def followed_by(self, consts: Arrays, carry: Arrays, xs: Arrays) -> "Operands":
        """Operands with further arrays after the consts, the carry and the xs."""
        return Operands([*self.consts, *consts], [*self.carry, *carry], [*self.xs, *xs], self.count)

    def unflatten(self, flat: Arrays) -> "Operands":
        """The inverse of `flatten`. Converts numbers, which JAX may pass, to arrays."""
        consts, carry, xs, count = split(
            list(map(jnp.asarray, flat)), len(self.consts), len(self.carry), len(self.xs)
        )
        return Operands(consts, carry, xs, count[0] if count else None)


def split(values: Sequence[T], *numbers: int) -> list[list[T]]:
    """Splits `values` into parts whose lengths are `numbers`, and a last part with the rest."""
    parts = []
    for number in numbers:
        parts.append(list(values[:number]))
        values = values[number:]
    return [*parts, list(values)]


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


# --- The number and length of segments ---


def levels_for(length: int, checkpoints: int | None) -> tuple[int, ...]:
    """The `levels` of a `Scan`: one or two numbers; empty if `revolve` must be used.

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


# --- The arrays that have tangents ---


Parts = tuple[list[Array], list[Array], list[Array]]
"""`(consts, carry, x)`: all or some operands of a step, or their cotangents."""


@dataclasses.dataclass(frozen=True)
class Nonzero:
    """Flags those operands and outputs of a scan whose tangents are not known to be zero."""

    consts: list[bool]
    carry: list[bool]
    xs: list[bool]
    ys: list[bool]

    @classmethod
    def at_start(cls, operands: Operands, tangents: Arrays, ys: Arrays) -> "Nonzero":
        """The flags before the first step: `True` for operands with a tangent and inexact `ys`."""
        parts = split(list(map(has_tangent, tangents)), len(operands.consts), len(operands.carry))
        return cls(*parts, ys=list(map(is_inexact, ys)))

    def flatten(self) -> list[bool]:
        return [*self.consts, *self.carry, *self.xs]

    def union(self, tangents: list[Any]) -> "Nonzero":
        """These flags, and also `True` for each operand that has a tangent in `tangents`."""
        flags = map(operator.or_, self.flatten(), map(has_tangent, tangents))
        consts, carry, xs = split(list(flags), len(self.consts), len(self.carry))
        return Nonzero(consts, carry, xs, self.ys)

    def split(self, arrays: Arrays) -> list[list[Array]]:
        """Splits a list with one item for each nonzero operand into consts, carry and xs."""
        return split(arrays, sum(self.consts), sum(self.carry))

    def select(self, consts: Arrays, carry: Arrays, x: Arrays) -> Parts:
        """The nonzero operands of a step."""
        return select(consts, self.consts), select(carry, self.carry), select(x, self.xs)

    def fill(self, parts: Any, consts: Arrays, carry: Arrays, x: Arrays) -> Parts:
        """The operands of a step, with `parts` in place of the nonzero operands."""
        some_consts, some_carry, some_x = parts
        return (
            fill(some_consts, consts, self.consts),
            fill(some_carry, carry, self.carry),
            fill(some_x, x, self.xs),
        )


def find_nonzero(scan: Scan, operands: Operands, nonzero: Nonzero) -> Nonzero:
    """Flags the arrays that are nonzero in any step, given the flags `nonzero` at the start.

    A step is traced again and again until no further array of the carry becomes nonzero.
    """
    while True:
        if all(map(operator.eq, nonzero.carry, map(is_inexact, operands.carry))):
            return nonzero
        nonzero_carry, nonzero_ys = _nonzero_after_step(scan, operands, nonzero)
        carry = list(map(operator.or_, nonzero.carry, nonzero_carry))
        if carry == nonzero.carry:
            if scan.has_few_checkpoints:
                # A derivative in `revolve` may need more tangents, so all inexact ys stay flagged.
                return nonzero
            return dataclasses.replace(nonzero, ys=nonzero_ys)
        nonzero = dataclasses.replace(nonzero, carry=carry)


def _nonzero_after_step(scan: Scan, operands: Operands, nonzero: Nonzero) -> list[list[bool]]:
    """Returns, for each array of the carry and each y, whether it is nonzero after one step."""
    num_carry = len(operands.carry)
    flags = [False] * (num_carry + len(nonzero.ys))

    @jax.custom_jvp
    def recorder(arrays: list[Array]) -> list[Array]:
        return arrays

    @functools.partial(recorder.defjvp, symbolic_zeros=True)
    def _record(primals: Any, tangents: Any) -> Any:
        flags[:] = map(has_tangent, tangents[0])
        return primals[0], tangents[0]

    def tangents_of_step(consts: Arrays, carry: Arrays, x: Arrays, is_active: Array) -> Any:
        def function(*parts: Any) -> list[Array]:
            new, y = scan.step(*nonzero.fill(parts, consts, carry, x), is_active)
            return recorder([*new, *y])

        parts = nonzero.select(consts, carry, x)
        return jax.jvp(function, parts, jax.tree.map(jnp.zeros_like, parts))

    jax.eval_shape(
        tangents_of_step,
        [jax.typeof(array) for array in operands.consts],
        [jax.typeof(array) for array in operands.carry],
        row_types(operands.xs),
        jax.ShapeDtypeStruct((), jnp.bool_),
    )
    return split(flags, num_carry)
