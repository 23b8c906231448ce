"""Comparison of modes of differentiation on one function: correctness, time and memory."""

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
from .._transforms._derivatives._grad import check_mode
from ._custom import Checkpointed
from ._modes import Auto, Enzyme, FiniteDifference, Forward, Mode, Reverse
from ._reference import (
    GradientProblem,
    Reference,
    checked_problem,
    default_tolerance,
    format_exception,
    format_mode,
    reference_gradient,
    to_double,
)

_CHUNK = 64
"""Number of directions in a batch of forward mode. This keeps a CPU busy, and limits the memory."""

_MAX_OVERRUN = 30
"""A mode is not run if one call would probably take more than this multiple of `budget_s`."""

_ENZYME_SKIPPED = (
    "Not run: Enzyme may crash the process if the function has a loop. Pass it in `modes` to "
    "run it anyway."
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
    """Checks the gradients of several modes against a reference, and measures their cost.

    The gradient of each mode is compiled, and is compared with the gradient of `reference`. Then
    all modes are timed in turn, and `f` itself is timed too. If a mode fails, its row has the
    error, and the comparison goes on.

    The error of a gradient is the error of its worst leaf. The error of a leaf is the largest
    absolute difference from the reference, divided by the largest derivative of the reference in
    this leaf. But the divisor is at least `sqrt(eps)` times the largest derivative of all leaves,
    because terms that cancel leave rounding errors of this size. A gradient is not `"wrong"` if the
    uncertainty of the reference is as large as the difference. For example, a reference by finite
    differences is invalid at a kink, and imprecise if the function rounds to float32.

    **Arguments:**

    - `f`: any function that `filter_grad` accepts. Its value must be a real scalar.
    - `*args`: the arguments of `f`. The gradient is taken with respect to the floating-point and
      complex arrays of the first argument.
    - `modes`: an iterable of modes, or a mapping from row names to modes. By default, all modes of
      `eqxlike.ad`. `Forward` then has a chunk of 64. `Enzyme` is left out if it is not installed,
      or if `f` has a loop, because a loop may crash Enzyme.
    - `reference`: the mode whose gradient is assumed to be right. This gradient is computed in
      float64: all floating-point arrays of `f` and `args` are cast, except for arrays that a plain
      function closes over. The default, finite differences, evaluates `f` a few times for each
      number in the first argument. So choose another mode if there are many numbers. With `None`,
      there is no reference, and gradients are only checked to be finite.
    - `tolerance`: the largest relative error of a gradient that is `"ok"`. By default, the cube
      root of the machine epsilon of a dtype: the dtype of the leaf or of the value, whichever is
      less precise. For float32 this is 5e-3, so a third of the digits must be right. Finite
      differences in float32 are not more precise than that, and a wrong gradient rarely has even
      one right digit.
    - `has_aux`: whether `f` returns `(value, aux)`. Operations that only `aux` needs are not timed.
    - `rounds`: number of times that each mode is timed.
    - `budget_s`: the largest number of seconds to time one mode. A slow mode runs fewer rounds.

    **Returns:** a `Comparison`. If JAX has compiled a part of `f` before, the times of first calls
    do not include this part.

    **Raises:** `TypeError` or `ValueError`, before any mode is measured:

    - if `f` has no gradient in any mode.
    - if an argument is invalid.
    - if the gradient of the reference cannot be computed or is not finite.

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
    problem = checked_problem(f, args, has_aux)
    has_loop = any(each.primitive.name in ("scan", "while") for each in problem.equations())
    # All calls use the same random keys.
    with jax.debug_key_reuse(False):
        primal = functools.partial(filter_jit(problem.function), *problem.args)
        value = jax.block_until_ready(primal())
        max_evaluations = _MAX_OVERRUN * budget_s / min(1e-6 * _call_us(primal) for _ in range(2))
        problem = dataclasses.replace(problem, max_evaluations=max_evaluations)
        expected = None if reference is None else reference_gradient(problem, reference)
        judge = functools.partial(_verdict, problem, value, expected, tolerance)
        rows: dict[str, ComparisonRow] = {}
        calls: dict[str, Callable[[], Any]] = {}
        for name, mode in named.items():
            if modes is None and isinstance(mode, Enzyme) and has_loop:
                rows[name] = ComparisonRow(name, "error", _ENZYME_SKIPPED)
                continue
            rows[name], call = _run_mode(name, mode, problem, judge)
            if call is not None:
                calls[name] = call
        for name, fields in _time_in_turn(primal, calls, rounds, budget_s).items():
            rows[name] = dataclasses.replace(rows[name], **fields)
    return Comparison(
        rows=tuple(rows.values()),
        reference=None if reference is None else format_mode(reference),
        machine=f"{jax.devices()[0].device_kind}; jax {jax.__version__}",
    )


Verdict = Literal["ok", "wrong", "nan", "error"]


@dataclasses.dataclass(frozen=True)
class ComparisonRow:
    """One mode in a `Comparison`. Values that were not measured or reported are `None`.

    - `mode`: the name of the mode.
    - `verdict`: `"wrong"` if the gradient differs from the reference; `"nan"` if it is not finite;
      `"error"` if there is no gradient; otherwise `"ok"`.
    - `explanation`: the reason for the verdict, or a remark. May be empty if the verdict is `"ok"`.
    - `primal_us`: microseconds to compute only the function; the median over the rounds.
    - `gradient_us`: microseconds to compute value and gradient; the median over the rounds.
    - `ratio`: the median over the rounds of `gradient_us` divided by `primal_us`.
    - `first_call_ms`: milliseconds to trace and compile value and gradient.
    - `peak_bytes`: the temporary memory of the compiled gradient, as XLA reports it.
    - `max_relative_error`: the largest error of a leaf, as defined in `compare`.
    - `worst_path`: if the verdict is `"ok"`, the path of the leaf with the largest error.
      Otherwise, the path of the leaf that caused the verdict.
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
    """The output of `compare`. `str` and `repr` show it as a table.

    - `rows`: a `ComparisonRow` for each mode, in the order of `modes`.
    - `reference`: the name of the reference mode. `None` if there was no reference.
    - `machine`: the device and the version of JAX.
    """

    rows: tuple[ComparisonRow, ...]
    reference: str | None = None
    machine: str = ""

    @property
    def best(self) -> ComparisonRow | None:
        """The fastest mode with the verdict `"ok"`. `None` if no mode has this verdict."""
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
        # Show only the first line, because an error message of JAX may have several pages.
        explained = [row for row in self.rows if row.explanation]
        lines = [f"{row.mode}: {row.explanation.splitlines()[0]}" for row in explained]
        to = f"; error: relative to {self.reference} in float64" if self.reference else ""
        return "\n".join([align(header, cells), *lines, f"{self.machine}{to}"])

    __repr__ = __str__


def _number(number: float | None) -> str:
    return grouped(number) if number is None or number >= 100 else f"{number:.1f}"


def _named_modes(modes: Iterable[Mode] | Mapping[str, Mode] | None) -> dict[str, Mode]:
    """A dictionary of the modes by name. For `None`, it has all available modes."""
    if modes is None:
        modes = [Reverse(), Checkpointed(), Forward(_CHUNK), FiniteDifference()]
        modes += [Enzyme()] if importlib.util.find_spec("enzyme_ad") else []
        modes += [Auto()]
    if isinstance(modes, Mapping):
        named = {str(name): mode for name, mode in modes.items()}
    else:
        named = {}
        for mode in modes:
            name = format_mode(mode)
            named[f"{name} #{len(named) + 1}" if name in named else name] = mode
    if not named:
        raise ValueError("`ad.compare` expects at least one mode; `modes` is empty.")
    for mode in named.values():
        check_mode(mode, "ad.compare")
    return named


# --- The correctness of a mode ---


def _run_mode(
    name: str, mode: Mode, problem: GradientProblem, judge: Callable[..., dict[str, Any]]
) -> tuple[ComparisonRow, Callable[[], Any] | None]:
    """The row of a mode, without times, and the call to time (`None` if the mode failed)."""
    row = ComparisonRow(name, "error")
    try:
        # A new lambda makes `filter_jit` compile again, so that the first call can be timed.
        again: Any = functools.partial(lambda f, /, *args: f(*args), problem.value_and_grad(mode))
        jitted = filter_jit(again)
        start_s = time.perf_counter()
        memory = jitted.lower(*problem.args).compile().memory_analysis()
        first_call_ms = 1e3 * (time.perf_counter() - start_s)
        peak_bytes = None if memory is None else memory.temp_size_in_bytes
        row = dataclasses.replace(row, first_call_ms=first_call_ms, peak_bytes=peak_bytes)
        fields = judge(*jitted(*problem.args))
    except Exception as error:
        return dataclasses.replace(row, explanation=format_exception(error)), None
    return dataclasses.replace(row, **fields), lambda: jitted(*problem.args)[0]


def _verdict(
    problem: GradientProblem,
    right_value: Array,
    reference: Reference | None,
    tolerance: float | None,
    value: Array,
    gradient: PyTree,
) -> dict[str, Any]:
    """The fields of a `ComparisonRow` that say whether the result of a mode is right."""
    gradients = problem.gradients_in(gradient)
    for index, array in enumerate(problem.arrays):
        found, path = gradients[index], problem.path_of(index)
        if not is_array(found) or (found.shape, found.dtype) != (array.shape, array.dtype):
            what = f"is {describe_node(found)}, but the array is {describe_node(array)}"
            what = f"The gradient with respect to {path} {what}."
            return {"verdict": "wrong", "explanation": what, "worst_path": path}
        gradients[index] = found = to_double(found)
        if num_bad := int(np.sum(~np.isfinite(found))):
            what = f"Not finite: {num_bad} of the {found.size} derivatives with respect to {path}."
            return {"verdict": "nan", "explanation": what, "worst_path": path}
    found, right = float(value), float(right_value)
    if not math.isfinite(found):
        what = f"Not finite: the value, {found}."
        return {"verdict": "nan", "explanation": what, "worst_path": "the value"}
    allowed = tolerance or default_tolerance(problem.value_dtype)
    if not abs(found - right) <= allowed * max(abs(right), 1):
        what = f"The value is {found:.6g}, but the function alone returns {right:.6g}."
        return {"verdict": "wrong", "explanation": what, "worst_path": "the value"}
    if reference is None:
        return {"verdict": "ok"}

    errors = reference.errors(gradients, tolerance)
    worst = max(errors, key=lambda each: each.error)
    path = problem.path_of(worst.index)
    fields = {"verdict": "ok", "worst_path": path, "max_relative_error": worst.error}
    if all(each.error <= each.tolerance for each in errors):
        return fields
    # The uncertainties are expensive, so compute them only for a gradient that seems wrong.
    errors = reference.errors(gradients, tolerance, reference.uncertainties)
    if all(each.certain_error <= each.tolerance for each in errors):
        what = (
            f"The gradient with respect to {path} has a relative error of {worst.error:.1e}, "
            "within the uncertainty of the reference: a kink, a minimum, or low precision in the "
            "function."
        )
        return fields | {"explanation": what}
    worst = max(errors, key=lambda each: each.certain_error / each.tolerance)
    # The message rounds this number to two digits. The margin of 10% ensures that the rounded
    # number passes too.
    passing = 1.1 * max(each.certain_error for each in errors)
    path = problem.path_of(worst.index)
    what = f"The gradient with respect to {path} has a relative error of {worst.error:.1e}. "
    what += f"The tolerance is {worst.tolerance:.1e}; {passing:.1e} would have passed."
    return fields | {"verdict": "wrong", "explanation": what, "worst_path": path}


# --- The cost of a mode ---


def _time_in_turn(
    primal: Callable[[], Any], calls: Mapping[str, Callable[[], Any]], rounds: int, budget_s: float
) -> dict[str, dict[str, Any]]:
    """Times the calls. Returns, for each row, the fields that hold times.

    In each round, every call is repeated for a millisecond, but at least once. A call skips the
    remaining rounds if it has used `budget_s` or has failed.
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
                fields[name] = {"verdict": "error", "explanation": format_exception(error)}
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
    """The microseconds until the result of a call is ready, as the mean of `repeats` calls."""
    start_s = time.perf_counter()
    for _ in range(repeats):
        jax.block_until_ready(call())
    return 1e6 * (time.perf_counter() - start_s) / repeats
