"""What a comparison of modes found: rows, as data, text, JSON and a picture."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Literal

from ..._tables import align, grouped, new_figure, rich_table, tidy

Verdict = Literal["ok", "wrong", "nan", "error"]


@dataclasses.dataclass(frozen=True)
class ComparisonRow:
    """One mode in a `Comparison`. What was not measured, or XLA does not report, is `None`.

    Times are medians, in microseconds a call of the compiled function. One that is named `dispatch`
    runs until the call returns, any other until the result is ready.

    - `mode`: the name of the mode.
    - `verdict`: `"ok"`; `"wrong"`, if the gradient is not that of the reference; `"nan"`, if it is
      not finite; or `"error"`, if there is none.
    - `explanation`: why the verdict is what it is; empty where there is nothing to say.
    - `primal_us`, `primal_dispatch_us`: of the function itself, in the same rounds.
    - `gradient_us`, `gradient_dispatch_us`: of its value and gradient by this mode.
    - `ratio`: of `gradient_us` to `primal_us`, the median of those of the rounds.
    - `rounds`: the number of rounds that were timed.
    - `first_call_ms`: milliseconds to trace and compile value and gradient.
    - `traced_operations`: the equations of their jaxpr, with those of the programs inside it.
    - `compiled_operations`: the instructions of the program that XLA made of it.
    - `peak_bytes`: the temporary memory that this program needs, by XLA's analysis.
    - `max_relative_error`: the largest error of the gradient, over all leaves: see `compare`.
    - `worst_path`: the path of the leaf where it is; if the verdict is not `"ok"`, of that which
      decides it.
    """

    mode: str
    verdict: Verdict
    explanation: str = ""
    primal_us: float | None = None
    primal_dispatch_us: float | None = None
    gradient_us: float | None = None
    gradient_dispatch_us: float | None = None
    ratio: float | None = None
    rounds: int = 0
    first_call_ms: float | None = None
    traced_operations: int | None = None
    compiled_operations: int | None = None
    peak_bytes: int | None = None
    max_relative_error: float | None = None
    worst_path: str | None = None

    @property
    def cells(self) -> tuple[str, ...]:
        """The row as text."""
        return (
            self.mode,
            _time(self.primal_us),
            _time(self.gradient_us),
            "-" if self.ratio is None else f"{self.ratio:.2f}",
            f"{_time(self.primal_dispatch_us)} / {_time(self.gradient_dispatch_us)}",
            _time(self.first_call_ms),
            f"{grouped(self.traced_operations)} / {grouped(self.compiled_operations)}",
            grouped(self.peak_bytes),
            "-" if self.max_relative_error is None else f"{self.max_relative_error:.1e}",
            self.verdict,
        )


HEADER = (
    "Mode",
    "Primal us",
    "Gradient us",
    "Ratio",
    "Dispatch us",
    "First call ms",
    "Operations",
    "Peak bytes",
    "Error",
    "Verdict",
)


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison:
    """The output of `compare`; `str` and `repr` show it as a table, `rich.print` as one of rich.

    - `rows`: a `ComparisonRow` for each mode, in the order given.
    - `reference`: the name of the mode that gradients were compared with; `None` if with none.
    - `tolerance`: the largest relative error that is `"ok"`; `None` if it goes by dtype.
    - `machine`: the machine, and the versions of what ran on it.
    """

    rows: tuple[ComparisonRow, ...]
    reference: str | None = None
    tolerance: float | None = None
    machine: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def best(self) -> ComparisonRow | None:
        """The fastest mode whose verdict is `"ok"`; `None` if there is none."""
        ok = (row for row in self.rows if row.verdict == "ok")
        timed = [(row.gradient_us, row) for row in ok if row.gradient_us is not None]
        return min(timed, key=lambda pair: pair[0], default=(None, None))[1]

    def __str__(self) -> str:
        return "\n".join([align(HEADER, [row.cells for row in self.rows]), *self.notes])

    __repr__ = __str__

    def table(self) -> Any:
        """The same as a `rich.table.Table`.

        **Raises:** `ImportError` if rich is not installed.
        """
        try:
            return rich_table(HEADER, [row.cells for row in self.rows], "\n".join(self.notes))
        except ImportError as error:
            raise ImportError(
                "Comparison.table needs rich: `pip install 'eqxlike[train]'`. `str` needs nothing."
            ) from error

    def __rich__(self) -> Any:
        return self.table()

    @property
    def notes(self) -> list[str]:
        """The lines below the table."""
        explained = [f"{row.mode}: {_shortened(row)}" for row in self.rows if row.explanation]
        where = [str(self.machine[key]) for key in ("cpu", "device") if key in self.machine][-1:]
        where += [f"jax {self.machine['jax']}"] if "jax" in self.machine else []
        if self.reference is not None:
            where.append(f"error: relative to {self.reference} in float64")
        return [
            *explained,
            "Dispatch: of primal / gradient. Operations: traced / compiled.",
            *(["; ".join(where)] if where else []),
        ]

    def to_json(self) -> str:
        """All of it as JSON, which `Comparison.from_json` reads."""
        return json.dumps(dataclasses.asdict(self), indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> "Comparison":
        """The Comparison whose `to_json` is `text`.

        **Raises:** `ValueError` if it is that of none.
        """
        try:
            fields = json.loads(text)
            rows = tuple(ComparisonRow(**row) for row in fields.pop("rows"))
            return cls(rows, **fields)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"Comparison.from_json expects what Comparison.to_json wrote; {error}."
            ) from error

    def plot(self) -> Any:
        """Time against memory: a point for each mode that was measured.

        **Returns:** a `matplotlib.figure.Figure`; `savefig` writes it to a file.

        **Raises:** `ImportError` if matplotlib is not installed, and `ValueError` if no mode was
        measured.
        """
        rows = [
            row for row in self.rows if row.gradient_us is not None and row.peak_bytes is not None
        ]
        if not rows:
            raise ValueError("Comparison.plot: no mode was measured, so there is nothing to draw.")
        figure = new_figure(8, 4.5, "Comparison.plot")
        axes = figure.add_subplot()
        for row in rows:
            place, marker = (row.gradient_us, row.peak_bytes), _MARKERS[row.verdict]
            axes.scatter(*place, marker=marker, label=f"{row.mode}: {row.verdict}", alpha=0.7)
        # Logarithmic from one byte on, and with a place for none.
        axes.set_yscale("symlog", linthresh=1, linscale=0.3)
        sizes: list[Any] = [row.peak_bytes for row in rows]
        axes.set(xscale="log", ylim=(min(sizes) / 10 or -0.5, 10 * max(sizes) or 1))
        axes.set_xlabel("Time of value and gradient (microseconds)")
        axes.set_ylabel("Peak temporary memory (bytes)")
        tidy(axes)
        figure.legend(title="Mode: verdict", loc="outside right upper", frameon=False)
        return figure


def _time(number: float | None) -> str:
    if number is None:
        return "-"
    return grouped(number) if number >= 100 else f"{number:.1f}"


def _shortened(row: ComparisonRow) -> str:
    """The first line of the explanation, which may be one of JAX's of several pages."""
    first, _, rest = row.explanation.partition("\n")
    return f"{first} [...]" if rest else first


_MARKERS = {"ok": "o", "wrong": "X", "nan": "s", "error": "v"}
