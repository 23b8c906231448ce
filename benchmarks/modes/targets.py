"""The targets of the modes on the zoo, and the results of one run."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.modes import enzyme
from benchmarks.modes.peers import FLAT, MODULE, NUMPYRO, OURS
from benchmarks.targets import Target, at_most

NOT_OF_JAX = (enzyme.MODE,)
"""Modes that do not use JAX's derivatives, and have no target."""

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
        if mode["mode"] not in NOT_OF_JAX
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
            if mode["verdict"] == "ok" and mode["gradient_us"] and mode["mode"] not in NOT_OF_JAX
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
