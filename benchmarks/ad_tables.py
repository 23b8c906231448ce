"""The report of `benchmarks.ad_modes` as tables, a row a model, a column a mode or a peer; and the
targets of the modes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks import table
from benchmarks.ad_peers import FLAT, MODULE, NUMPYRO, OURS
from benchmarks.report import Target, at_most, render_targets

MOST = 200
"""The number of characters of an explanation to show. Explanations may be pages long."""

PACKAGES = ("numpyro", "torch", "enzyme-ad")
"""The packages whose versions a report contains."""

Cell = Callable[[Mapping[str, Any]], str]


def render(report: Mapping[str, Any], *, markdown: bool) -> str:
    """The tables of a report, the machine it was measured on, the targets and the notes.

    **Arguments:**

    - `report`: as `benchmarks.ad_modes` makes it.
    - `markdown`: whether to write Markdown rather than plain aligned text.
    """
    rows = report["rows"]
    if not rows:
        return "no models were measured"
    draw = table.markdown_table if markdown else table.text_table
    parts = [
        "Value and gradient, microseconds until the result is ready (ratio to the value "
        f"alone)\n\n{draw(cells(rows, 'modes', _time, ('unknowns', 'primal')))}",
        "Largest relative error of the gradient: float32 to finite differences in float64, "
        "and finite differences to reverse mode\n\n"
        f"{draw(cells(rows, 'modes', _error))}",
        f"Temporary memory, kB\n\n{draw(cells(rows, 'modes', _peak))}",
        f"Trace and compile, milliseconds\n\n{draw(cells(rows, 'modes', _first))}",
    ]
    if any(row["peers"] for row in rows):
        parts.append(
            "Peers: value and gradient, microseconds until the result is ready (ratio to "
            f"the value alone)\n\n{draw(cells(rows, 'peers', _time))}"
        )
    if found := targets(report):
        parts.append(render_targets(found))
    parts.append(f"{table.describe(report)}\n{table.versions(report, PACKAGES)}")
    notes = {note for row in rows for note in row["notes"]} | set(_explanations(rows))
    if notes:
        parts.append("\n".join(sorted(notes)))
    return "\n\n".join(parts)


def cells(
    rows: Sequence[Mapping[str, Any]], of: str, cell: Cell, first: Sequence[str] = ()
) -> list[list[str]]:
    """The cells of a table, starting with the headings.

    **Arguments:**

    - `rows`: the rows of a report.
    - `of`: the kind of columns, "modes" or "peers".
    - `cell`: returns the text of a cell.
    - `first`: the first columns, "unknowns" or "primal" or both.
    """
    names = list(dict.fromkeys(each["mode"] for row in rows for each in row[of]))
    lines = [["", *first, *names]]
    for row in rows:
        before = {"unknowns": str(row["unknowns"]), "primal": _primal(row)}
        own = {each["mode"]: _verdict_or(cell, each) for each in row[of]}
        if own:
            own_cells = [own.get(name, "") for name in names]
            lines.append([title(row), *(before[name] for name in first), *own_cells])
    return lines


def _verdict_or(cell: Cell, of: Mapping[str, Any]) -> str:
    """The cell, followed by the verdict if it is not `ok`."""
    text = cell(of)
    return text if of["verdict"] == "ok" else f"{text} {of['verdict']}".strip()


def _primal(row: Mapping[str, Any]) -> str:
    times = [mode["primal_us"] for mode in row["modes"] if mode["primal_us"] is not None]
    return _number(times[0]) if times else ""


def _time(of: Mapping[str, Any]) -> str:
    if of["gradient_us"] is None:
        return ""
    return f"{_number(of['gradient_us'])} ({of['ratio']:.2f})"


def _error(of: Mapping[str, Any]) -> str:
    return "" if of["max_relative_error"] is None else f"{of['max_relative_error']:.0e}"


def _peak(of: Mapping[str, Any]) -> str:
    return "" if of["peak_bytes"] is None else _number(of["peak_bytes"] / 1000)


def _first(of: Mapping[str, Any]) -> str:
    return "" if of["first_call_ms"] is None else f"{of['first_call_ms']:.0f}"


def _number(number: float) -> str:
    """The number with at most three digits, or as an integer."""
    return f"{number:.{sum(number < power for power in (100, 10))}f}"


def _explanations(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The reason of each verdict, in one line."""
    return [
        f"{title(row)}, {each['mode']}: {' '.join(each['explanation'].split())[:MOST]}"
        for row in rows
        for each in (*row["modes"], *row["peers"])
        if each["explanation"]
    ]


# --- targets ---

ENZYME = "Enzyme"
"""The mode that is not JAX's own, for which there is no target."""

Row = Mapping[str, Any]


def targets(report: Mapping[str, Any]) -> list[Target]:
    """The targets for the rows of a report."""
    rows = report["rows"]
    bayesian = [row for row in rows if row["name"].startswith("Bayesian network")]
    return [
        *_all_are_right(rows),
        *at_most("reverse gradient / primal, 21 to 601 unknowns", 2.5, _of_reverse(rows)),
        *at_most("Auto / fastest mode", 1.1, _of_auto(rows)),
        *at_most(f"{OURS} / {MODULE}", 1.02, _to_peer(rows, OURS, MODULE)),
        *at_most(f"{OURS} / {FLAT}", 1.02, _to_peer(rows, OURS, FLAT)),
        *at_most(f"{OURS} / {NUMPYRO}, Bayesian networks", 1.0, _to_peer(bayesian, OURS, NUMPYRO)),
        *at_most(
            f"our density by {FLAT} / {NUMPYRO}, Bayesian networks",
            1.0,
            _to_peer(bayesian, FLAT, NUMPYRO),
        ),
        *at_most("peak of Forward(64) / what 64 directions of Forward need", 1.5, _chunk(rows)),
        *_of_others(report.get("others") or {}),
    ]


def title(row: Row) -> str:
    """The name of a row: the model, and the space if the model has two spaces."""
    return f"{row['name']}, linked" if row["space"] == "linked" else row["name"]


def _all_are_right(rows: Sequence[Row]) -> Iterator[Target]:
    verdicts = {
        f"{title(row)} by {mode['mode']}": mode["verdict"]
        for row in rows
        for mode in row["modes"]
        if mode["mode"] != ENZYME
    }
    wrong = [f"{name}: {verdict}" for name, verdict in verdicts.items() if verdict != "ok"]
    if verdicts:
        found = f"{len(verdicts) - len(wrong)} of {len(verdicts)}"
        yield Target(
            "every JAX mode is ok on every model", ", not ".join([found, *wrong]), not wrong
        )


def _of_mode(row: Row, name: str) -> Mapping[str, Any]:
    """The entry of a mode in a row, or an empty mapping if the mode failed."""
    found = [mode for mode in row["modes"] if mode["mode"] == name and mode["gradient_us"]]
    return found[0] if found else {}


def _of_reverse(rows: Sequence[Row]) -> dict[str, float]:
    return {
        title(row): reverse["ratio"]
        for row in rows
        if 21 <= row["unknowns"] <= 601 and (reverse := _of_mode(row, "Reverse"))
    }


def _of_auto(rows: Sequence[Row]) -> dict[str, float]:
    found = {}
    for row in rows:
        right = [
            mode["gradient_us"]
            for mode in row["modes"]
            if mode["verdict"] == "ok" and mode["gradient_us"] and mode["mode"] != ENZYME
        ]
        if auto := _of_mode(row, "Auto"):
            found[title(row)] = auto["gradient_us"] / min(right, default=auto["gradient_us"])
    return found


def _to_peer(rows: Sequence[Row], own: str, peer: str) -> dict[str, float]:
    """The times of a peer relative to another peer, if both were timed."""
    found = {}
    for row in rows:
        to_ours = {each["mode"]: each["to_ours"] for each in row["peers"]}
        if to_ours.get(own) and to_ours.get(peer):
            found[title(row)] = to_ours[own] / to_ours[peer]
    return found


def _chunk(rows: Sequence[Row]) -> dict[str, float]:
    return {
        title(row): chunk["peak_bytes"] / (every["peak_bytes"] * 64 / row["unknowns"])
        for row in rows
        if row["unknowns"] == 601
        and (chunk := _of_mode(row, "Forward(64)"))
        and (every := _of_mode(row, "Forward"))
    }


def _of_others(ratios: Mapping[str, float]) -> Iterator[Target]:
    """The targets of the additional measurements in `others`."""
    if not ratios:
        return
    checkpointed = {"temporary memory": ratios["checkpointed"]}
    yield from at_most("Checkpointed / Reverse, 64 layers", 0.5, checkpointed)
    parallel = {name: ratios[f"parallel {name}"] for name in ("primal", "gradient")}
    yield from at_most("parallel branches / one dense layer", 1.2, parallel)
    to_primal = {"of their ratios": parallel["gradient"] / parallel["primal"]}
    yield from at_most("gradient / primal of branches / of one dense layer", 1.0, to_primal)
