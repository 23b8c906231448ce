"""Reverse mode of a scan with a fixed number of saved carries, for any number of steps.

The steps are differentiated from the last to the first. To compute the carry before a step, the
scan runs again from the nearest saved carry. On the way, it saves further carries in the free
slots. Griewank and Walther (2000), "Algorithm 799: revolve", give a closed form of the schedule
that recomputes the fewest steps.

The derivatives here need the function `_push_forward` of `_counted`. They get `_push_forward`
as an argument, because `_counted` imports this file.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from .._transforms._derivatives._linear_call import (
    batch_first,
    instantiate,
    jvp_of_moving,
    linear_call,
)
from ._primitives import unvmap_max
from ._scan import (
    Arrays,
    Nonzero,
    Operands,
    Scan,
    find_nonzero,
    row_of,
    select,
    split,
    with_row,
    with_tangents,
    zero_rows,
)
from ._step import pull_back_step, select_active

PushForward = Callable[[Scan, Operands, Nonzero, Arrays], list[Array]]
"""`push_forward(scan, operands, nonzero, directions)` returns tangents of the last carry and ys."""


def pull_back_any_length(
    scan: Scan,
    operands: Operands,
    nonzero: Nonzero,
    last: Arrays,
    ct_carry: Arrays,
    ct_ys: Arrays,
    is_shared: tuple[bool, ...],
    push_forward: PushForward,
) -> list[Array]:
    """Computes the cotangents of the nonzero operands of a scan.

    **Arguments:**

    - `last`: the last carry. Its buffers are used in all steps.
    - `ct_carry`, `ct_ys`: the cotangents of the outputs.
    - `is_shared`: for each nonzero const, whether its cotangent is summed over a batch.
    - `push_forward`: the function `_push_forward` of `_counted`.
    """
    if operands.count is None:
        operands = dataclasses.replace(operands, count=jnp.asarray(scan.length))
    numbers = len(operands.flatten()), len(last), len(ct_carry)

    @jax.custom_jvp
    @batch_first
    def run_flat(flat: Arrays) -> list[Array]:
        flat, last, ct_carry, ct_ys = split(flat, *numbers)
        filled = operands.unflatten(flat)
        return _pull_back(scan, filled, nonzero, last, ct_carry, ct_ys, is_shared)

    def run_wider(wider: Nonzero, flat: Arrays) -> list[Array]:
        """Computes cotangents of more operands, `wider`. Returns the cotangents of `nonzero`."""
        flat, last, ct_carry, ct_ys = split(flat, *numbers)
        cotangents = iter(ct_carry)
        ct_carry = [
            next(cotangents) if is_nonzero else jnp.zeros_like(array)
            for array, is_nonzero, is_now in zip(last, nonzero.carry, wider.carry, strict=True)
            if is_now
        ]
        filled, none_shared = operands.unflatten(flat), (False,) * sum(wider.consts)
        more = pull_back_any_length(
            scan, filled, wider, last, ct_carry, ct_ys, none_shared, push_forward
        )
        return select(more, select(nonzero.flatten(), wider.flatten()))

    @functools.partial(run_flat.defjvp, symbolic_zeros=True)
    @batch_first
    def _differentiate(primals: Any, tangents: Any) -> Any:
        flat, last, ct_carry, ct_ys = split(primals[0], *numbers)
        filled = operands.unflatten(flat)
        # The tangents of `last` are not used, because they follow from the tangents of the
        # operands. The last operand is the count, which has no tangent.
        (*dots, _), _, ct_outputs_dot = split(tangents[0], *numbers[:2])
        wider = find_nonzero(scan, filled, nonzero.union(dots))
        if wider != nonzero:
            return jvp_of_moving(functools.partial(run_wider, wider), *primals, *tangents)
        output = pull_back_any_length(
            scan, filled, nonzero, last, ct_carry, ct_ys, is_shared, push_forward
        )
        second = _SecondDerivative(scan, operands, nonzero, push_forward)
        directions = list(map(instantiate, [*select(dots, nonzero.flatten()), *ct_outputs_dot]))
        return output, linear_call(
            second.forward, second.transpose, primals[0], directions, like=output
        )

    return run_flat([*operands.flatten(), *last, *ct_carry, *ct_ys])


@dataclasses.dataclass(frozen=True)
class _SecondDerivative:
    """The derivative of `pull_back_any_length`, and the transpose of this derivative.

    Let `F` be the scan. `pull_back_any_length` is `P(x, c) = F'(x)^T c`. The scan with tangents is
    `G(x, x_dot) = (F(x), F'(x) x_dot)`.

    - `forward`: the tangent of `P` along `(x_dot, c_dot)` is the cotangent of `x` in
      `G'(x, x_dot)^T (c_dot, c)`.
    - `transpose`: for a cotangent `w` of `P`, the cotangent of `c_dot` is `F'(x) w`. Second
      derivatives are symmetric, so the cotangent of `x_dot` is the cotangent of `x` in
      `G'(x, w)^T (0, c)`.
    """

    scan: Scan
    operands: Operands
    nonzero: Nonzero
    push_forward: PushForward

    def forward(self, residuals: Arrays, directions: Arrays) -> list[Array]:
        dots, ct_outputs_dot = split(directions, sum(self.nonzero.flatten()))
        return self._pull_back(residuals, dots, ct_outputs_dot)

    def transpose(self, residuals: Arrays, cotangents: Arrays, _: Any) -> list[Array]:
        operands, _, ct_outputs = self._unpack(residuals)
        zeros = list(map(jnp.zeros_like, ct_outputs))
        return [
            *self._pull_back(residuals, cotangents, zeros),
            *self.push_forward(self.scan, operands, self.nonzero, cotangents),
        ]

    def _unpack(self, residuals: Arrays) -> tuple[Operands, list[Array], list[Array]]:
        num_flat, num_carry = len(self.operands.flatten()), len(self.operands.carry)
        flat, last, ct_outputs = split(residuals, num_flat, num_carry)
        return self.operands.unflatten(flat), last, ct_outputs

    def _pull_back(
        self, residuals: Arrays, directions: Arrays, ct_outputs_dot: Arrays
    ) -> list[Array]:
        """The cotangent of `x` in `G'(x, directions)^T (ct_outputs_dot, c)`."""
        operands, last, ct_outputs = self._unpack(residuals)
        nonzero = self.nonzero
        consts_dot, carry_dot, xs_dot = nonzero.split(directions)
        last_dot = carry_dot
        if any(self.scan.is_written_once):
            last_dot = self.push_forward(self.scan, operands, nonzero, directions)
        num_carry = len(carry_dot)
        ct_carry, ct_ys = split(ct_outputs, num_carry)
        ct_carry_dot, ct_ys_dot = split(ct_outputs_dot, num_carry)
        doubled = Nonzero(
            [*nonzero.consts, *[False] * len(consts_dot)],
            [*nonzero.carry, *[True] * num_carry],
            [*nonzero.xs, *[False] * len(xs_dot)],
            [*nonzero.ys, *[True] * len(ct_ys)],
        )
        cotangents = pull_back_any_length(
            with_tangents(self.scan, operands, nonzero, with_ys=True),
            Operands(
                [*operands.consts, *consts_dot],
                [*operands.carry, *carry_dot],
                [*operands.xs, *xs_dot],
                operands.count,
            ),
            doubled,
            [*last, *last_dot[:num_carry]],
            [*ct_carry_dot, *ct_carry],
            [*ct_ys_dot, *ct_ys],
            (False,) * sum(doubled.consts),
            self.push_forward,
        )
        ct_consts, ct_carry, ct_xs = doubled.split(cotangents)
        return [*ct_consts, *ct_carry[:num_carry], *ct_xs]


def _pull_back(
    scan: Scan,
    operands: Operands,
    nonzero: Nonzero,
    last: Arrays,
    ct_carry: Arrays,
    ct_ys: Arrays,
    is_shared: tuple[bool, ...],
) -> list[Array]:
    """The primal function of `pull_back_any_length`. A batch runs until all members have ended."""
    checkpoints, consts, xs, count = scan.checkpoints, operands.consts, operands.xs, operands.count
    assert checkpoints is not None
    assert count is not None
    is_masked = select(scan.is_masked, nonzero.carry)

    def row_at(index: Array) -> Array:
        """The index of the row of `xs` that step `index` gets."""
        return longest - 1 - index if scan.is_reversed else index

    def advance(saved: Arrays, start: Any, stop: Any) -> list[Array]:
        """Runs the scan from step `start` to step `stop`, with only the saved part of the carry."""

        def step(index: Array, saved: list[Array]) -> list[Array]:
            carry, row = scan.restored(saved, last), row_at(index)
            new, _ = scan.reading.step(consts, carry, row_of(xs, row), row < count)
            return scan.saved(select_active(scan.is_masked, row < count, new, carry))

        return jax.lax.fori_loop(start, stop, step, list(saved))

    def save_before(index: Array, saved: _Saved) -> _Saved:
        """Saves carries between the last saved carry and step `index`."""

        def has_room(saved: _Saved) -> Any:
            return (saved.positions[saved.top] < index) & (saved.top < checkpoints - 1)

        def fill(saved: _Saved) -> _Saved:
            start = saved.positions[saved.top]
            distance = _distance(index + 1 - start, checkpoints - saved.top, checkpoints)
            stop = start + distance
            top, carry = saved.top + 1, advance(row_of(saved.rows, saved.top), start, stop)
            return _Saved(top, saved.positions.at[top].set(stop), with_row(saved.rows, top, carry))

        return jax.lax.while_loop(has_room, fill, saved)

    def step_back(number: Array, state: Any) -> Any:
        saved, ct_carry, ct_consts, ct_xs = state
        index = longest - 1 - number
        saved = save_before(index, saved)
        start = saved.positions[saved.top]
        carry = scan.restored(advance(row_of(saved.rows, saved.top), start, index), last)
        row = row_at(index)
        x, is_active = row_of(xs, row), row < count
        more, ct_new_carry, ct_x = pull_back_step(
            scan, nonzero, is_shared, consts, carry, x, is_active, ct_carry, row_of(ct_ys, row)
        )
        ct_carry = select_active(is_masked, is_active, ct_new_carry, ct_carry)
        ct_consts = list(map(jax.lax.add, ct_consts, more))
        top = jnp.where(start == index, saved.top - 1, saved.top)
        return saved._replace(top=top), ct_carry, ct_consts, with_row(ct_xs, row, ct_x)

    longest = unvmap_max(count)
    first = scan.saved(operands.carry)
    top = jnp.zeros_like(longest)
    rows = [zero_rows(checkpoints, array).at[0].set(array) for array in first]
    saved = _Saved(top, zero_rows(checkpoints, top), rows)
    ct_consts, ct_xs = (
        list(map(jnp.zeros_like, arrays))
        for arrays in (select(consts, nonzero.consts), select(xs, nonzero.xs))
    )
    state = saved, list(ct_carry), ct_consts, ct_xs
    _, ct_carry, ct_consts, ct_xs = jax.lax.fori_loop(0, longest, step_back, state)
    return [*ct_consts, *ct_carry, *ct_xs]


class _Saved(NamedTuple):
    """A stack of saved carries.

    - `top`: the index of the slot with the latest saved carry.
    - `positions`: for each slot, the number of steps that come before the saved carry.
    - `rows`: the carries, with one row for each slot.
    """

    top: Int[Array, ""]
    positions: Int[Array, "checkpoints"]
    rows: list[Array]


_MAX_RUNS = 64
"""The schedule is optimal if no step runs more often than this."""


@functools.cache
def _most_steps(checkpoints: int) -> np.ndarray:
    """`table[c, r]` is the largest number of steps that can be reversed with `c` saved carries, if
    no step runs more than `r` times.
    """
    table = np.ones((checkpoints + 1, _MAX_RUNS + 1))
    for carries in range(1, checkpoints + 1):
        runs = np.arange(1, _MAX_RUNS + 1)
        table[carries, 1:] = np.cumprod((carries + runs) / runs)
    return np.minimum(np.round(table), np.iinfo(np.int32).max).astype(np.int32)


def _distance(steps: Int[Array, ""], carries: Any, checkpoints: int) -> Int[Array, ""]:
    """The number of steps from the latest saved carry to the next carry to save.

    **Arguments:**

    - `steps`: the number of steps to reverse, at least 2.
    - `carries`: the number of carries that may be saved for these steps.
    """
    table = jnp.asarray(_most_steps(checkpoints))
    runs = jnp.clip(jnp.sum(table[carries] < steps), 1, _MAX_RUNS)
    # The steps before the next carry can use one run less: `distance <= table[carries, runs - 1]`.
    # The steps after that carry can use one carry less:
    # `steps - distance <= table[carries - 1, runs]`.
    # Within these bounds, the schedule has `steps - distance >= table[carries - 1, runs - 1]`.
    distance = jnp.minimum(table[carries, runs - 1], steps - table[carries - 1, runs - 1])
    return jnp.clip(jnp.maximum(distance, steps - table[carries - 1, runs]), 1, steps - 1)
