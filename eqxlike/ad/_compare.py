"""Modes of differentiation next to one another on one function: which are right, and their cost."""

import dataclasses
import functools
import importlib.util
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import Array, PyTree

from .._check_numbers import positive_number, whole_number
from .._pytree import describe_node, is_array
from .._tables import align, grouped
from .._transforms import filter_jit
from .._transforms._derivatives._by_mode import check_mode
from ._modes import Auto, Checkpointed, Enzyme, FiniteDifference, Forward, Mode, Reverse
from ._reference import (
    Reference,
    Subject,
    as_written,
    checked_subject,
    default_tolerance,
    described,
    in_double,
    reference_gradient,
)

_CHUNK = 64
"""So many directions at once keep a CPU busy, and memory within bounds."""

_PATIENCE = 30
"""A call may be predicted to take this many times the budget."""

_NOT_UNASKED = (
    "Not run: Enzyme may end the process where a function has a loop. Name it among the `modes` to "
    "try all the same."
)


def compare(
    f: Callable[..., Any],
    *args: Any,
    modes: Iterable[Mode] | Mapping[str, Mode] | None = None,
    reference: Mode | None = FiniteDifference(4),  # noqa: B008
    tolerance: float | None = None,
    has_aux: bool = False,
    rounds: int = 30,
    budget_s: float = 2.0,
) -> "Comparison":
    """Which modes differentiate `f` rightly at these arguments, and how fast.

    Each mode is compiled, and its gradient is compared with the gradient of `reference`. Then all
    modes are timed in turn, next to `f` alone. A mode that fails has a row that says so, and does
    not stop the others.

    The error of a gradient is the error of its worst leaf: the largest difference, relative to the
    largest derivative of the reference in this leaf. (Where all derivatives of a leaf are below
    `sqrt(eps)` of the largest derivative of all leaves, the error is relative to the latter: the
    terms of such a leaf may cancel up to rounding.) A gradient is not `"wrong"` where the reference
    is uncertain: finite differences do not exist at a kink, and have few digits for a function that
    rounds in float32.

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
    - `has_aux`: whether `f` returns `(value, aux)`. What only `aux` needs is not computed.
    - `rounds`: how often each mode is timed.
    - `budget_s`: the most seconds for which one mode is timed. If they are too few for all rounds,
      there are fewer.

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
    named = _named_modes(modes)
    if reference is not None:
        check_mode(reference, "ad.compare")
    if tolerance is not None:
        tolerance = positive_number(tolerance, "ad.compare: tolerance")
    rounds = whole_number(rounds, "ad.compare: rounds")
    budget_s = positive_number(budget_s, "ad.compare: budget_s")
    subject = checked_subject(f, args, has_aux)
    has_loop = any(each.primitive.name in ("scan", "while") for each in subject.equations())
    # Each call uses the same keys again.
    with jax.debug_key_reuse(False):
        primal = functools.partial(filter_jit(subject.function), *subject.args)
        value = jax.block_until_ready(primal())
        most = _PATIENCE * budget_s / min(1e-6 * _call_us(primal) for _ in range(2))
        subject = dataclasses.replace(subject, max_evaluations=most)
        expected = None if reference is None else reference_gradient(subject, reference)
        rows: dict[str, ComparisonRow] = {}
        calls: dict[str, Callable[[], Any]] = {}
        for name, mode in named.items():
            if modes is None and isinstance(mode, Enzyme) and has_loop:
                rows[name] = ComparisonRow(name, "error", _NOT_UNASKED)
                continue
            rows[name], call = _tried(name, mode, subject, value, expected, tolerance)
            if call is not None:
                calls[name] = call
        for name, fields in _timed_in_turn(primal, calls, rounds, budget_s).items():
            rows[name] = dataclasses.replace(rows[name], **fields)
    return Comparison(
        rows=tuple(rows.values()),
        reference=None if reference is None else as_written(reference),
        machine=f"{jax.devices()[0].device_kind}; jax {jax.__version__}",
    )


Verdict = Literal["ok", "wrong", "nan", "error"]


@dataclasses.dataclass(frozen=True)
class ComparisonRow:
    """One mode in a `Comparison`. What was not measured, or XLA does not report, is `None`.

    - `mode`: the name of the mode.
    - `verdict`: `"ok"`; `"wrong"`, if the gradient differs from the reference; `"nan"`, if it is
      not finite; or `"error"`, if there is none.
    - `explanation`: the reason for the verdict; empty for `"ok"` without remarks.
    - `primal_us`: microseconds until the result of the function itself is ready: the median over
      the rounds.
    - `gradient_us`: the same of its value and gradient by this mode.
    - `ratio`: the median over the rounds of `gradient_us` divided by `primal_us`.
    - `first_call_ms`: milliseconds to trace and compile value and gradient.
    - `peak_bytes`: the temporary memory that this program needs, by XLA's analysis.
    - `max_relative_error`: the largest error of the gradient, over all leaves: see `compare`.
    - `worst_path`: the path of the leaf where it is; if the verdict is not `"ok"`, of that which
      decides it.
    """

    mode: str
    verdict: Verdict
    explanation: str = ""
    primal_us: float | None = None
    gradient_us: float | None = None
    ratio: float | None = None
    first_call_ms: float | None = None
    peak_bytes: int | None = None
    max_relative_error: float | None = None
    worst_path: str | None = None


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison:
    """The output of `compare`; `str` and `repr` show it as a table.

    - `rows`: a `ComparisonRow` for each mode, in the order given.
    - `reference`: the name of the mode that gradients were compared with; `None` if with none.
    - `machine`: the device, and the version of JAX.
    """

    rows: tuple[ComparisonRow, ...]
    reference: str | None = None
    machine: str = ""

    @property
    def best(self) -> ComparisonRow | None:
        """The fastest mode whose verdict is `"ok"`; `None` if there is none."""
        ok = [row for row in self.rows if row.verdict == "ok" and row.gradient_us is not None]
        return min(ok, key=lambda row: row.gradient_us or 0.0, default=None)

    def __str__(self) -> str:
        header = ("Mode", "Primal us", "Gradient us", "Ratio")
        header = (*header, "First call ms", "Peak bytes", "Error", "Verdict")
        cells = [
            (
                row.mode,
                *map(_number, (row.primal_us, row.gradient_us)),
                "-" if row.ratio is None else f"{row.ratio:.2f}",
                _number(row.first_call_ms),
                grouped(row.peak_bytes),
                "-" if row.max_relative_error is None else f"{row.max_relative_error:.1e}",
                row.verdict,
            )
            for row in self.rows
        ]
        # The first line of an explanation, which may be one of JAX's of several pages.
        explained = [row for row in self.rows if row.explanation]
        lines = [f"{row.mode}: {row.explanation.splitlines()[0]}" for row in explained]
        to = f"; error: relative to {self.reference} in float64" if self.reference else ""
        return "\n".join([align(header, cells), *lines, f"{self.machine}{to}"])

    __repr__ = __str__


def _number(number: float | None) -> str:
    return grouped(number) if number is None or number >= 100 else f"{number:.1f}"


def _named_modes(modes: Iterable[Mode] | Mapping[str, Mode] | None) -> dict[str, Mode]:
    """The modes by name; those that there are, for `None`."""
    if modes is None:
        modes = [Reverse(), Checkpointed(), Forward(_CHUNK), FiniteDifference()]
        modes += [Enzyme()] if importlib.util.find_spec("enzyme_ad") else []
        modes += [Auto()]
    if isinstance(modes, Mapping):
        named = {str(name): mode for name, mode in modes.items()}
    else:
        named = {}
        for mode in modes:
            name = as_written(mode)
            named[f"{name} #{len(named) + 1}" if name in named else name] = mode
    if not named:
        raise ValueError("`ad.compare` expects at least one mode; `modes` is empty.")
    for mode in named.values():
        check_mode(mode, "ad.compare")
    return named


# --- Whether a mode is right ---


def _tried(
    name: str,
    mode: Mode,
    subject: Subject,
    value: Array,
    reference: Reference | None,
    tolerance: float | None,
) -> tuple[ComparisonRow, Callable[[], Any] | None]:
    """The row of a mode except its times, and a call to time; `None` if the mode failed."""
    row = ComparisonRow(name, "error")
    try:
        # To `filter_jit` each lambda is another function, which it has not compiled before.
        again: Any = functools.partial(lambda f, /, *args: f(*args), subject.value_and_grad(mode))
        jitted = filter_jit(again)
        start_s = time.perf_counter()
        memory = jitted.lower(*subject.args).compile().memory_analysis()
        first_call_ms = 1e3 * (time.perf_counter() - start_s)
        peak_bytes = None if memory is None else memory.temp_size_in_bytes
        row = dataclasses.replace(row, first_call_ms=first_call_ms, peak_bytes=peak_bytes)
        found, gradient = jitted(*subject.args)
        judged = _judged(subject, found, gradient, value, reference, tolerance)
    except Exception as error:
        return dataclasses.replace(row, explanation=described(error)), None
    fields = ("verdict", "explanation", "worst_path", "max_relative_error")
    row = dataclasses.replace(row, **dict(zip(fields, judged, strict=True)))
    return row, lambda: jitted(*subject.args)[0]


def _judged(
    subject: Subject,
    value: Array,
    gradient: PyTree,
    right_value: Array,
    reference: Reference | None,
    tolerance: float | None,
) -> tuple[Verdict, str, str | None, float | None]:
    """The verdict on a value and a gradient, its explanation, the worst path and its error."""
    try:
        gradients = list(subject.gradients_in(gradient))
    except (TypeError, ValueError) as error:
        return "wrong", f"The gradient has another structure than args[0]: {error}", None, None
    for place, array in enumerate(subject.arrays):
        found, path = gradients[place], subject.path_of(place)
        if not is_array(found) or (found.shape, found.dtype) != (array.shape, array.dtype):
            what = f"is {describe_node(found)}, and the array is {describe_node(array)}"
            return "wrong", f"The gradient by {path} {what}.", path, None
        gradients[place] = found = in_double(found)
        if num_bad := int(np.sum(~np.isfinite(found))):
            what = f"Not finite: {num_bad} of the {found.size} derivatives by {path}."
            return "nan", what, path, None
    found, right = float(value), float(right_value)
    if not math.isfinite(found):
        return "nan", f"Not finite: the value, {found}.", "the value", None
    allowed = tolerance or default_tolerance(subject.value_dtype)
    if not abs(found - right) <= allowed * max(abs(right), 1):
        what = f"The value is {found:.6g}; the function, called alone, returns {right:.6g}."
        return "wrong", what, "the value", None
    if reference is None:
        return "ok", "", None, None

    errors = reference.errors(gradients, tolerance)
    worst = max(errors, key=lambda each: each.error)
    path = subject.path_of(worst.place)
    if all(each.error <= each.tolerance for each in errors):
        return "ok", "", path, worst.error
    # The doubts are computed for what seems wrong alone.
    errors = reference.errors(gradients, tolerance, reference.doubts)
    if all(each.beyond_doubt <= each.tolerance for each in errors):
        what = f"The gradient by {path} is off by {worst.error:.1e} of its size, and the reference "
        what += "is as uncertain: a kink, a minimum, or low precision inside the function."
        return "ok", what, path, worst.error
    far = max(errors, key=lambda each: each.beyond_doubt / each.tolerance)
    # More than 5%, so that it is enough when it is rounded to two digits.
    passing = 1.1 * max(each.beyond_doubt for each in errors)
    path = subject.path_of(far.place)
    what = f"The gradient by {path} is off by {far.error:.1e} of its size. The tolerance is "
    what += f"{far.tolerance:.1e}; {passing:.1e} would have passed."
    return "wrong", what, path, worst.error


# --- What a mode costs ---


def _timed_in_turn(
    primal: Callable[[], Any],
    calls: Mapping[str, Callable[[], Any]],
    rounds: int,
    budget_s: float,
) -> dict[str, dict[str, Any]]:
    """The fields of each row that say how long a call takes.

    In each round all calls take turns, for a millisecond or one call each. A call that has used
    `budget_s`, or that fails, leaves out the remaining rounds.
    """
    times: dict[str, list[float]] = {name: [] for name in ("", *calls)}
    spent_s = dict.fromkeys(times, 0.0)
    fields: dict[str, dict[str, Any]] = {}
    for _ in range(rounds):
        for name, call in {"": primal, **calls}.items():
            if name in fields or spent_s[name] > budget_s:
                continue
            repeats = math.ceil(1e3 / min(times[name], default=1e3))
            try:
                times[name].append(_call_us(call, repeats))
            except Exception as error:
                fields[name] = {"verdict": "error", "explanation": described(error)}
            else:
                spent_s[name] += repeats * times[name][-1] / 1e6
    for name in calls.keys() - fields.keys():
        ratios = [own / base for own, base in zip(times[name], times[""], strict=False)]
        fields[name] = {
            "primal_us": statistics.median(times[""]),
            "gradient_us": statistics.median(times[name]),
            "ratio": statistics.median(ratios),
        }
    return fields


def _call_us(call: Callable[[], Any], repeats: int = 1) -> float:
    """The microseconds until the result of a call is ready, the mean of `repeats` of them."""
    start_s = time.perf_counter()
    for _ in range(repeats):
        jax.block_until_ready(call())
    return 1e6 * (time.perf_counter() - start_s) / repeats
