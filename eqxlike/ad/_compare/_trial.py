"""What each mode is put through before it is timed."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import PyTree

from ..._pytree import describe_node, is_array
from .._measuring import Call, Pace, freshly_compiled, pace_of
from .._modes import Enzyme, Mode
from ._comparison import ComparisonRow, Verdict
from ._reference import LeafError, Reference, default_tolerance, leaf_errors, reference_gradient
from ._subject import Subject, described

# --- Whether a gradient is right ---


@dataclasses.dataclass(frozen=True)
class Judgement:
    """The fields of the same names in a `ComparisonRow`."""

    verdict: Verdict
    explanation: str = ""
    max_relative_error: float | None = None
    worst_path: str | None = None


def judged(
    subject: Subject,
    output: tuple[Any, PyTree],
    expected_value: Any,
    reference: Reference | None,
    tolerance: float | None,
) -> Judgement:
    """The verdict on what a mode found.

    **Arguments:**

    - `output`: the value and the gradient.
    - `expected_value`: the value of the function, called alone.
    - `reference`: the right gradient; without one, the gradient must only be finite.
    - `tolerance`: the largest error that is right; `None` for that of the dtype.
    """
    value, gradient = output
    try:
        gradients = subject.gradients_in(gradient)
    except (TypeError, ValueError) as error:
        return Judgement("wrong", f"The gradient has another structure than args[0]: {error}")
    problem = (
        _malformed(subject, gradients)
        or _not_finite(subject, value, gradients)
        or _other_value(subject, value, expected_value, tolerance)
    )
    if problem is not None:
        return problem
    if reference is None:
        return Judgement("ok")
    return _compared(subject, list(map(_wide, gradients)), reference, tolerance)


def all_agree(subject: Subject, gradients: Sequence[PyTree]) -> bool:
    """Whether gradients, which are finite, are the same but for rounding."""
    if not gradients:
        return True
    first, *others = [list(map(_wide, subject.gradients_in(each))) for each in gradients]
    return all(
        each.is_ok
        for other in others
        for each in _errors(subject, other, first, [0.0] * len(first))
    )


def _wide(array: Any) -> np.ndarray:
    array = np.asarray(array)
    return array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)


def _malformed(subject: Subject, gradients: list[Any]) -> Judgement | None:
    for place, (found, array) in enumerate(zip(gradients, subject.arrays, strict=True)):
        if not is_array(found) or (found.shape, found.dtype) != (array.shape, array.dtype):
            path = subject.path_of(place)
            what = f"is {describe_node(found)}, and the array is {describe_node(array)}"
            return Judgement("wrong", f"The gradient by {path} {what}.", worst_path=path)
    return None


def _not_finite(subject: Subject, value: Any, gradients: list[Any]) -> Judgement | None:
    for place, found in enumerate(gradients):
        if num_bad := int(np.sum(~np.isfinite(_wide(found)))):
            path = subject.path_of(place)
            what = f"Not finite: {num_bad} of the {found.size} derivatives by {path}."
            return Judgement("nan", what, worst_path=path)
    if not np.isfinite(_wide(value)):
        return Judgement("nan", f"Not finite: the value, {value}.", worst_path="the value")
    return None


def _other_value(
    subject: Subject, value: Any, expected_value: Any, tolerance: float | None
) -> Judgement | None:
    value, expected_value = float(_wide(value)), float(_wide(expected_value))
    allowed = tolerance or default_tolerance(subject.value_dtype)
    if abs(value - expected_value) <= allowed * max(abs(expected_value), 1):
        return None
    what = f"The value is {value:.6g}; that of the function, called alone, is {expected_value:.6g}."
    return Judgement("wrong", what, worst_path="the value")


def _compared(
    subject: Subject, gradients: list[np.ndarray], reference: Reference, tolerance: float | None
) -> Judgement:
    """The verdict on a gradient that is finite."""
    compared = gradients, reference.gradients
    found = _errors(subject, *compared, [0.0] * len(gradients), tolerance)
    worst = max(found, key=lambda each: each.error)
    error, path = worst.error, subject.path_of(worst.place)
    if all(each.is_ok for each in found):
        return Judgement("ok", "", error, path)
    found = _errors(subject, *compared, reference.doubts, tolerance)
    if all(each.is_ok for each in found):
        what = f"The gradient by {path} is off by {error:.1e} of its size, and the reference is as"
        what += " uncertain: a kink, a minimum, or low precision inside the function."
        return Judgement("ok", what, error, path)
    worst = max(found, key=lambda each: each.beyond_doubt / each.tolerance)
    passing = max(each.beyond_doubt for each in found)
    path = subject.path_of(worst.place)
    what = f"The gradient by {path} is off by {worst.error:.1e} of its size. The tolerance is"
    what += f" {worst.tolerance:.1e}; {_rounded_up(passing)} would have passed."
    return Judgement("wrong", what, error, path)


def _errors(
    subject: Subject,
    gradients: list[np.ndarray],
    expected: list[np.ndarray],
    doubts: Sequence[np.ndarray | float],
    tolerance: float | None = None,
) -> list[LeafError]:
    dtypes = [(array.dtype, subject.value_dtype) for array in subject.arrays]
    return leaf_errors(gradients, expected, doubts, dtypes, tolerance)


def _rounded_up(number: float) -> str:
    """Two digits of `number`, which spell no less than it."""
    unit = 10.0 ** (math.floor(math.log10(number)) - 1)
    return f"{math.ceil(number / unit) * unit:.1e}"


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
    - `reference`, `tolerance`: see `judged`.
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
        found = value, gradient
        return judged(self.subject, found, self.value, self.reference, self.tolerance)


def trial_of(subject: Subject, budget_s: float, tolerance: float | None = None) -> Trial:
    """A trial without a reference; the function is compiled and called."""
    program = freshly_compiled(subject.function, subject.args)

    def primal() -> Any:
        return subject.value_of(program.run())

    value = primal()
    return Trial(subject, primal, value, program.has_loop, pace_of(program, budget_s), tolerance)
