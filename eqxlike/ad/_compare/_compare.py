"""Modes of differentiation next to one another on one function."""

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from ..._check_numbers import positive_number, whole_number
from ..._pytree import describe_node, is_array
from ..._timing import machine_info
from ..._transforms._derivatives._by_mode import check_mode
from .._measuring import Call, Pace, Times, freshly_compiled, pace_of, time_interleaved
from .._modes import Enzyme, FiniteDifference, Mode
from ._comparison import Comparison, ComparisonRow, Verdict
from ._reference import (
    LeafError,
    NoReference,
    Reference,
    default_tolerance,
    leaf_errors,
    reference_gradient,
)
from ._subject import Modes, Subject, as_written, checked_subject, described, named_modes

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
    turn, next to `f` alone. A mode that fails has a row that says so, and stops no other.

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
    - `budget_s`: the most seconds for which one mode is timed. If they are too few for all rounds,
      there are fewer, and the row says how many.

    **Returns:** a `Comparison`. Programs that JAX has compiled before, for parts of `f`, are in no
    first call.

    **Raises:** `TypeError` or `ValueError`, before anything is measured, if `f` has no gradient in
    any mode, an argument is not as said above, or the reference is not finite or fails.

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

    # Each call uses the same keys again.
    with jax.debug_key_reuse(False):
        trial = trial_of(subject, budget_s, tolerance)
        if reference is not None:
            try:
                trial = trial.against(reference)
            except NoReference as error:
                raise ValueError(f"`ad.compare`: {error} Way out: {error.way_out}") from (
                    error.__cause__
                )
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
    return Comparison(
        rows=tuple(_with_times(row, times[name], times[_PRIMAL]) for name, row in rows.items()),
        reference=None if reference is None else as_written(reference),
        tolerance=tolerance,
        machine=machine_info(),
    )


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


# --- What each mode is put through before it is timed ---


def trial_of(subject: Subject, budget_s: float, tolerance: float | None = None) -> "Trial":
    """A trial without a reference; the function is compiled and called."""
    program = freshly_compiled(subject.function, subject.args)

    def primal() -> Any:
        return subject.value_of(program.run())

    value = primal()
    return Trial(subject, primal, value, program.has_loop, pace_of(program, budget_s), tolerance)


@dataclasses.dataclass(frozen=True)
class Judgement:
    """The fields of the same names in a `ComparisonRow`."""

    verdict: Verdict
    explanation: str = ""
    max_relative_error: float | None = None
    worst_path: str | None = None


@dataclasses.dataclass(frozen=True)
class Entrant:
    """A mode that was tried.

    - `row`: its row without times.
    - `call`: what to time; `None` if it failed.
    - `value`, `gradient`: what it found.
    """

    row: ComparisonRow
    call: Call | None = None
    value: Any = None
    gradient: PyTree = None


@dataclasses.dataclass(frozen=True)
class Trial:
    """A function by which modes are tried.

    - `primal`: calls it alone, and returns its value.
    - `value`: that value.
    - `has_loop`: whether the function has a loop.
    - `pace`: how fast that was.
    - `reference`: the right gradient; without one, a gradient must only be finite.
    - `tolerance`: the largest error that is right; `None` for that of the dtype.
    """

    subject: Subject
    primal: Call
    value: Any
    has_loop: bool
    pace: Pace
    tolerance: float | None
    reference: Reference | None = None

    def against(self, mode: Mode) -> "Trial":
        """The trial with the gradient by `mode` as its reference."""
        reference = reference_gradient(self.subject, mode, self.pace)
        return dataclasses.replace(self, reference=reference)

    def may_end_process(self, mode: Mode) -> bool:
        """Whether to try the mode may end the process, with all that others found in it."""
        # enzyme_ad 0.0.16, for the loop of a hidden Markov model: "LLVM ERROR: Failed to infer
        # result type(s)".
        return isinstance(mode, Enzyme) and self.has_loop

    def enter(self, name: str, mode: Mode) -> Entrant:
        """Compiles the value and the gradient by `mode`, and looks whether they are right."""
        subject = self.subject
        row = ComparisonRow(name, "error")
        try:
            program = freshly_compiled(subject.value_and_grad(mode), subject.args)
            row = dataclasses.replace(
                row,
                first_call_ms=program.first_call_ms,
                traced_operations=program.traced_operations,
                compiled_operations=program.compiled_operations,
                peak_bytes=program.peak_bytes,
            )
            if complaint := self.pace.complaint(program):
                what = f"Not run: {complaint}. Where that is wanted, give a larger `budget_s`."
                return Entrant(dataclasses.replace(row, explanation=what))
            output, gradient = program.run()
            value = subject.value_of(output)
            judgement = self.judge(value, gradient)
        except Exception as error:
            return Entrant(dataclasses.replace(row, explanation=described(error)))
        row = dataclasses.replace(row, **dataclasses.asdict(judgement))
        return Entrant(row, lambda: subject.value_of(program.run()[0]), value, gradient)

    def judge(self, value: Any, gradient: PyTree) -> Judgement:
        """The verdict on a value and a gradient."""
        subject = self.subject
        try:
            gradients = subject.gradients_in(gradient)
        except (TypeError, ValueError) as error:
            return Judgement("wrong", f"The gradient has another structure than args[0]: {error}")
        for place, (found, array) in enumerate(zip(gradients, subject.arrays, strict=True)):
            if not is_array(found) or (found.shape, found.dtype) != (array.shape, array.dtype):
                path = subject.path_of(place)
                what = f"is {describe_node(found)}, and the array is {describe_node(array)}"
                return Judgement("wrong", f"The gradient by {path} {what}.", worst_path=path)
        gradients = list(map(_in_double, gradients))
        for place, found in enumerate(gradients):
            if num_bad := int(np.sum(~np.isfinite(found))):
                path = subject.path_of(place)
                what = f"Not finite: {num_bad} of the {found.size} derivatives by {path}."
                return Judgement("nan", what, worst_path=path)
        if not np.isfinite(_in_double(value)):
            return Judgement("nan", f"Not finite: the value, {value}.", worst_path="the value")
        found, right = float(_in_double(value)), float(_in_double(self.value))
        allowed = self.tolerance or default_tolerance(subject.value_dtype)
        if not abs(found - right) <= allowed * max(abs(right), 1):
            what = f"The value is {found:.6g}; that of the function, called alone, is {right:.6g}."
            return Judgement("wrong", what, worst_path="the value")
        if self.reference is None:
            return Judgement("ok")
        return self._compared(gradients, self.reference)

    def _compared(self, gradients: list[np.ndarray], reference: Reference) -> Judgement:
        """The verdict on a gradient that is finite."""
        compared = self.subject, gradients, reference.gradients, self.tolerance
        found = _errors(*compared)
        worst = max(found, key=lambda each: each.error)
        error, path = worst.error, self.subject.path_of(worst.place)
        if all(each.is_ok for each in found):
            return Judgement("ok", "", error, path)
        found = _errors(*compared, reference.doubts)
        if all(each.is_ok for each in found):
            what = f"The gradient by {path} is off by {error:.1e} of its size, and the reference is"
            what += " as uncertain: a kink, a minimum, or low precision inside the function."
            return Judgement("ok", what, error, path)
        worst = max(found, key=lambda each: each.beyond_doubt / each.tolerance)
        passing = max(each.beyond_doubt for each in found)
        path = self.subject.path_of(worst.place)
        what = f"The gradient by {path} is off by {worst.error:.1e} of its size. The tolerance is"
        what += f" {worst.tolerance:.1e}; {_rounded_up(passing)} would have passed."
        return Judgement("wrong", what, error, path)


def all_agree(subject: Subject, gradients: Sequence[PyTree]) -> bool:
    """Whether gradients, which are finite, are the same but for rounding."""
    if not gradients:
        return True
    first, *others = [list(map(_in_double, subject.gradients_in(each))) for each in gradients]
    return all(each.is_ok for other in others for each in _errors(subject, other, first))


def _errors(
    subject: Subject,
    gradients: list[np.ndarray],
    expected: list[np.ndarray],
    tolerance: float | None = None,
    doubts: Sequence[np.ndarray] | None = None,
) -> list[LeafError]:
    dtypes = [(array.dtype, subject.value_dtype) for array in subject.arrays]
    return leaf_errors(gradients, expected, doubts or [0.0] * len(expected), dtypes, tolerance)


def _in_double(array: Any) -> np.ndarray:
    array = np.asarray(array)
    return array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)


def _rounded_up(number: float) -> str:
    """Two digits of `number`, which spell no less than it."""
    unit = 10.0 ** (math.floor(math.log10(number)) - 1)
    return f"{math.ceil(number / unit) * unit:.1e}"
