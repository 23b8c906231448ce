"""Modes of differentiation side by side on one function."""

import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

import jax

from ..._numbers import positive_number, whole_number
from ..._timing import machine_info
from ..._transforms._derivatives._by_mode import check_mode
from .._measuring import Call, Times, time_interleaved
from .._modes import FiniteDifference, Mode
from ._comparison import Comparison, ComparisonRow
from ._reference import NoReference
from ._subject import Modes, as_written, checked_subject, described, named_modes
from ._trial import trial_of

_PRIMAL = ""
"""The name of the function itself among the modes; no mode has it."""

_NOT_UNASKED = (
    "Not run: Enzyme may end the process where a function has a loop. Name it among the `modes` to "
    "try all the same."
)


def compare(
    f: Callable[..., Any],
    *args: Any,
    modes: Modes = None,
    reference: Mode | None = FiniteDifference(4),  # noqa: B008
    tolerance: float | None = None,
    has_aux: bool = False,
    rounds: int = 30,
    budget_s: float = 2.0,
) -> Comparison:
    """Which modes differentiate `f` rightly at these arguments, and how fast.

    Each mode is compiled, and its gradient compared with that of `reference`. Then all are timed in
    turn, beside `f` alone. A mode that fails has a row that says so, and stops no other.

    The error of a gradient is that of its worst leaf: the largest difference, relative to the
    largest derivative that the reference has in this leaf. (Where these are all below `sqrt(eps)`
    of the largest of all leaves, relative to that: such a leaf may be what rounding leaves of terms
    that cancel.) A gradient is not `"wrong"` for what the reference does not know: differences have
    no derivative at a kink, and have those of a function that rounds in float32 to few digits.

    **Arguments:**

    - `f`: any function that `filter_grad` takes; its value is a real scalar.
    - `*args`: its arguments. It is differentiated by the floating-point and complex arrays of the
      first.
    - `modes`: the modes, in a sequence, or by the names that rows shall have. Where `None`, those
      of `eqxlike.ad`: `Forward` with a chunk of 64, and `Enzyme` if it is installed and `f` has no
      loop, where Enzyme may end the process.
    - `reference`: the mode that is right. It is taken in float64: all floating-point arrays of `f`
      and `args` are cast, though not those that a plain function closes over. Finite differences
      evaluate `f` a few times for each number among the unknowns: where these are many, take
      another. With `None`, a gradient need only be finite.
    - `tolerance`: the largest error that is `"ok"`. Where `None`, the cube root of the machine
      epsilon of a leaf's dtype or the value's, whichever is larger: 5e-3 for float32, a third of
      the digits. Differences in that precision have no more, and a wrong gradient has seldom one.
    - `has_aux`: whether `f` returns `(value, aux)`.
    - `rounds`: how often each mode is timed.
    - `budget_s`: the most seconds for which one mode is timed. If that is too little for so many
      rounds, it has fewer, and its row says how many.

    **Returns:** a `Comparison`. Programs that JAX has compiled before, for parts of `f`, are in no
    first call.

    **Raises:** `TypeError` or `ValueError`, before anything is measured, if `f` has no gradient in
    any mode, an argument is not as said above, or the reference is not finite or fails. A
    `KeyboardInterrupt` has what was measured until then as its attribute `comparison`.

    !!! example

        >>> import jax.numpy as jnp
        >>> from eqxlike import ad
        >>> def energy(x):
        ...     return jnp.sum(jnp.sin(x) ** 2)
        >>> comparison = ad.compare(energy, jnp.arange(3.0), modes=[ad.Reverse(), ad.Forward()])
        >>> [(row.mode, row.verdict) for row in comparison.rows]
        [('Reverse()', 'ok'), ('Forward()', 'ok')]
    """
    named = named_modes(modes, "ad.compare")
    if reference is not None:
        check_mode(reference, "ad.compare")
    if tolerance is not None:
        tolerance = positive_number(tolerance, "ad.compare: tolerance")
    rounds = whole_number(rounds, "ad.compare: rounds")
    budget_s = positive_number(budget_s, "ad.compare: budget_s")
    subject = checked_subject(f, args, has_aux, "ad.compare")
    rows: dict[str, ComparisonRow] = {}
    times = {name: Times() for name in (_PRIMAL, *named)}

    def so_far() -> Comparison:
        return Comparison(
            rows=tuple(_with_times(row, times[name], times[_PRIMAL]) for name, row in rows.items()),
            reference=None if reference is None else as_written(reference),
            tolerance=tolerance,
            machine=machine_info(),
        )

    try:
        # Each call uses the same keys again.
        with jax.debug_key_reuse(False):
            trial = trial_of(subject, budget_s, tolerance)
            if reference is not None:
                try:
                    trial = trial.against(reference)
                except NoReference as error:
                    raise ValueError(
                        f"`ad.compare`: {error} Way out: {error.way_out}"
                    ) from error.__cause__
            calls: dict[str, Call] = {_PRIMAL: trial.primal}
            for name, mode in named.items():
                if modes is None and trial.may_end_process(mode):
                    rows[name] = ComparisonRow(name, "error", _NOT_UNASKED)
                    continue
                entrant = trial.enter(name, mode)
                rows[name] = entrant.row
                if entrant.call is not None:
                    calls[name] = entrant.call
            time_interleaved(_PRIMAL, calls, times, rounds=rounds, budget_s=budget_s)
    except KeyboardInterrupt as interrupt:
        interrupt.comparison = so_far()  # pyright: ignore[reportAttributeAccessIssue]
        interrupt.add_note(
            "ad.compare: what was measured until then is `comparison` of this exception, such as "
            "`sys.last_value.comparison`."
        )
        raise
    return so_far()


def _with_times(row: ComparisonRow, times: Times, primal: Times) -> ComparisonRow:
    if times.failure is not None:
        row = dataclasses.replace(row, verdict="error", explanation=described(times.failure))
    # The last round of the one may not have come to the other.
    numbers = sorted(times.completion_us.keys() & primal.completion_us.keys())
    if not numbers:
        return row

    def of(by_round: dict[int, float]) -> list[float]:
        return [by_round[number] for number in numbers]

    return dataclasses.replace(
        row,
        primal_us=statistics.median(of(primal.completion_us)),
        primal_dispatch_us=statistics.median(of(primal.dispatch_us)),
        gradient_us=statistics.median(of(times.completion_us)),
        gradient_dispatch_us=statistics.median(of(times.dispatch_us)),
        ratio=times.ratio_to(primal),
        rounds=len(numbers),
    )
