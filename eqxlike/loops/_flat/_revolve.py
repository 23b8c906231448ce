"""The reverse mode of a scan of any number of steps, with a fixed number of saved carries.

The steps are reversed from the last to the first. To get at the carry before a step, the scan is
run again from the last carry saved before it, and on the way carries are saved in the free places.
The choice that runs the fewest steps again has a closed form: Griewank and Walther (2000),
"Algorithm 799: revolve".

The derivatives here need `_push_forward` of `_counted_scan`. That file imports this one, so it
passes the function down.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from ..._transforms._derivatives._linear_call import (
    batch_first,
    instantiate,
    jvp_of_moving,
    linear_call,
)
from ._batched import select_if_vmap, unvmap_max
from ._scan import Arrays, Operands, Scan, row_of, select, split, with_row, zero_rows
from ._step import pull_back_step, select_active
from ._tangents import Nonzero, find_nonzero, with_tangents

PushForward = Callable[[Scan, Operands, Nonzero, Arrays], list[Array]]
"""`push_forward(scan, operands, nonzero, directions)`: tangents of the last carry and the ys."""


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
    """Cotangents of the operands that have a tangent.

    **Arguments:**

    - `last`: the carry at the end; the arrays that were written once are read from it.
    - `ct_carry`, `ct_ys`: the cotangents of the outputs.
    - `is_shared`: for each of the nonzero consts, whether to sum over a batch.
    - `push_forward`: that of `_counted_scan`.
    """
    count = jnp.asarray(scan.length) if operands.count is None else operands.count
    numbers = len(operands.flatten()), len(last), len(ct_carry)

    @jax.custom_jvp
    @batch_first
    def run_flat(flat: Arrays, count: Array) -> list[Array]:
        flat, last, ct_carry, ct_ys = split(flat, *numbers)
        filled = operands.unflatten(flat, count)
        return _pull_back(scan, filled, nonzero, last, ct_carry, ct_ys, is_shared)

    def run_wider(wider: Nonzero, count: Array, flat: Arrays) -> list[Array]:
        """The same cotangents, taken from those for `wider`, where more has a tangent."""
        flat, last, ct_carry, ct_ys = split(flat, *numbers)
        cotangents = iter(ct_carry)
        ct_carry = [
            next(cotangents) if is_nonzero else jnp.zeros_like(array)
            for array, is_nonzero, is_now in zip(last, nonzero.carry, wider.carry, strict=True)
            if is_now
        ]
        filled, none_shared = operands.unflatten(flat, count), (False,) * sum(wider.consts)
        more = pull_back_any_length(
            scan, filled, wider, last, ct_carry, ct_ys, none_shared, push_forward
        )
        return select(more, select(nonzero.flatten(), wider.flatten()))

    @functools.partial(run_flat.defjvp, symbolic_zeros=True)
    @batch_first
    def _differentiate(primals: Any, tangents: Any) -> Any:
        flat, count = primals
        flat, last, ct_carry, ct_ys = split(flat, *numbers)
        filled = operands.unflatten(flat, count)
        # The tangents of `last` follow from those of the operands.
        dots, _, ct_outputs_dot = split(tangents[0], *numbers[:2])
        wider = find_nonzero(scan, filled, nonzero.or_of(dots))
        if wider != nonzero:
            run = functools.partial(run_wider, wider, count)
            return jvp_of_moving(run, primals[0], tangents[0])
        output = pull_back_any_length(
            scan, filled, nonzero, last, ct_carry, ct_ys, is_shared, push_forward
        )
        second = _Second(scan, operands, nonzero, push_forward)
        residuals = [count, *primals[0]]
        directions = list(map(instantiate, [*select(dots, nonzero.flatten()), *ct_outputs_dot]))
        return output, linear_call(
            second.forward, second.transpose, residuals, directions, like=output
        )

    return run_flat([*operands.flatten(), *last, *ct_carry, *ct_ys], count)


@dataclasses.dataclass(frozen=True)
class _Second:
    """The derivative of `pull_back_any_length`, and its transpose.

    With `F` the scan, that function is `P(x, c) = F'(x)^T c`. With its tangents, the scan is
    `G(x, x_dot) = (F(x), F'(x) x_dot)`. The tangent of `P` for `(x_dot, c_dot)` is the cotangent of
    `x` in `G'(x, x_dot)^T (c_dot, c)`. The transpose takes a cotangent `w` of `P` to `F'(x) w` for
    `c_dot`, and, as second derivatives are symmetric, to the cotangent of `x` in
    `G'(x, w)^T (0, c)` for `x_dot`.
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
        count, *arrays = residuals
        flat, last, ct_outputs = split(
            arrays, len(self.operands.flatten()), len(self.operands.carry)
        )
        return self.operands.unflatten(flat, count), last, ct_outputs

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
    """`pull_back_any_length` as it runs. A batch runs as long as the longest of its members."""
    checkpoints, consts, xs, count = scan.checkpoints, operands.consts, operands.xs, operands.count
    assert checkpoints is not None
    assert count is not None
    is_masked = select(scan.is_masked, nonzero.carry)

    def row_at(index: Array) -> Array:
        """The place of the row that the step at `index` gets."""
        return longest - 1 - index if scan.is_reversed else index

    def advance(saved: Arrays, start: Any, stop: Any) -> list[Array]:
        """The saved part of the carry at step `stop`, from that at `start`."""

        def step(index: Array, saved: list[Array]) -> list[Array]:
            carry, row = scan.restored(saved, last), row_at(index)
            new, _ = scan.reading.step(consts, carry, row_of(xs, row), row < count)
            return scan.saved(select_active(scan, row < count, new, carry))

        return jax.lax.fori_loop(start, stop, step, list(saved))

    def save_before(index: Array, saved: _Saved) -> _Saved:
        """Saves carries on the way from the last saved one to the step at `index`."""

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
        ct_carry = [
            new if masked else select_if_vmap(is_active, new, old)
            for masked, new, old in zip(is_masked, ct_new_carry, ct_carry, strict=True)
        ]
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
    """The carries that are saved at one time.

    - `top`: the place of the one saved last.
    - `positions`: the number of steps before each.
    - `rows`: the carries.
    """

    top: Int[Array, ""]
    positions: Int[Array, "checkpoints"]
    rows: list[Array]


_MAX_RUNS = 64
"""With more runs of each step than this, the schedule is no longer the best."""


@functools.cache
def _most_steps(checkpoints: int) -> np.ndarray:
    """At `[c, r]`, how many steps can be reversed with `c` saved carries and `r` runs of each."""
    table = np.ones((checkpoints + 1, _MAX_RUNS + 1))
    for carries in range(1, checkpoints + 1):
        runs = np.arange(1, _MAX_RUNS + 1)
        table[carries, 1:] = np.cumprod((carries + runs) / runs)
    return np.minimum(np.round(table), np.iinfo(np.int32).max).astype(np.int32)


def _distance(steps: Int[Array, ""], carries: Any, checkpoints: int) -> Int[Array, ""]:
    """How many of `steps`, at least 2, come before the next carry to save, if `carries` may be."""
    table = jnp.asarray(_most_steps(checkpoints))
    runs = jnp.clip(jnp.sum(table[carries] < steps), 1, _MAX_RUNS)
    # The steps before that carry are reversed in one run less, those beyond it with one carry less:
    # neither may be more than can be done so. Those beyond should be as many as can be done in one
    # run less, or more.
    distance = jnp.minimum(table[carries, runs - 1], steps - table[carries - 1, runs - 1])
    return jnp.clip(jnp.maximum(distance, steps - table[carries - 1, runs]), 1, steps - 1)
