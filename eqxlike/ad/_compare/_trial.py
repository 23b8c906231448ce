"""What each mode is put through before it is timed."""

import dataclasses
from typing import Any

from jaxtyping import PyTree

from .._measuring import Call, Pace, compiled_anew, pace_of
from .._modes import Enzyme, Mode
from ._comparison import ComparisonRow
from ._errors import described
from ._reference import Reference, reference_gradient
from ._subject import Subject
from ._verdict import Judgement, judged


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
            program = compiled_anew(subject.value_and_grad(mode), subject.args)
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
    program = compiled_anew(subject.function, subject.args)

    def primal() -> Any:
        return subject.value_of(program.run())

    value = primal()
    return Trial(subject, primal, value, program.has_loop, pace_of(program, budget_s), tolerance)
