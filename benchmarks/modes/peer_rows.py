"""Checks and measures all peers on a problem, interleaved. Each peer has a row, like a mode."""

import dataclasses
import time
from collections.abc import Mapping
from statistics import median
from typing import Any

import jax
import numpy as np

import eqxlike
from benchmarks.modes.peers import PEERS, Peer
from benchmarks.timing import measure, ratios
from benchmarks.zoo.problem import Problem, by_path, in_double

TOLERANCE = 1e-4
"""The tolerance of values and gradients of peers compared with double precision, relative to the
largest entry of each array.
"""


@dataclasses.dataclass
class PeerRow:
    """A peer on a problem, with the fields of a row of `ad.Comparison`.

    - `to_ours`: the ratio of `gradient_us` to the time of `filter_value_and_grad`, the median
      over the rounds.
    """

    mode: str
    verdict: str
    explanation: str = ""
    primal_us: float | None = None
    gradient_us: float | None = None
    ratio: float | None = None
    to_ours: float | None = None
    first_call_ms: float | None = None
    peak_bytes: int | None = None
    max_relative_error: float | None = None


def peer_rows(problem: Problem, rounds: int) -> tuple[list[PeerRow], list[str]]:
    """Measures the peers that implement a problem.

    **Returns:** their rows, and a note for each peer that is not installed.
    """
    peers, rows, notes = {}, {}, []
    reference = _reference(problem)
    for name, make in PEERS.items():
        try:
            peer = make(problem)
            rows[name] = _checked(name, peer, reference)
            peers[name] = peer
        except LookupError:
            continue
        except ImportError as error:
            notes.append(f"{name} is left out: {error}")
        except Exception as error:  # a failing peer does not stop the others
            rows[name] = PeerRow(name, "error", f"{type(error).__name__}: {error}")
    _time(peers, rows, rounds)
    return list(rows.values()), notes


def _reference(problem: Problem) -> dict[str, np.ndarray]:
    """The value, under the name "", and the gradients by path, in double precision."""
    with jax.enable_x64(True):
        unknowns, data = in_double(problem.start())
        gradient = eqxlike.filter_jit(eqxlike.filter_value_and_grad(problem.function))
        value, gradients = gradient(unknowns, data)
        return {"": np.asarray(value)} | {
            path: np.asarray(leaf) for path, leaf in by_path(gradients).items()
        }


def _checked(name: str, peer: Peer, reference: Mapping[str, np.ndarray]) -> PeerRow:
    """The row of a peer without its times: first call, memory and error."""
    start_s = time.perf_counter()
    returned = jax.block_until_ready(peer.gradient())
    first_call_ms = 1e3 * (time.perf_counter() - start_s)
    found = {"": returned[0], **peer.by_path(returned)}
    errors = {path: _error(np.asarray(found[path]), leaf) for path, leaf in reference.items()}
    worst = max(errors, key=lambda path: errors[path])
    row = PeerRow(
        name,
        "ok",
        first_call_ms=first_call_ms,
        peak_bytes=peer.peak_bytes(),
        max_relative_error=errors[worst],
    )
    if not errors[worst] <= TOLERANCE:
        where = f"the gradient of {worst}" if worst else "the value"
        explanation = f"{where} is off by {errors[worst]:.1e}, more than {TOLERANCE}"
        return dataclasses.replace(row, verdict="wrong", explanation=explanation)
    return row


def _error(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest error of an array, relative to its largest entry. Infinite if there is a NaN."""
    error = np.max(np.abs(found - expected)) / max(np.max(np.abs(expected)), 1e-30)
    return float(error) if np.isfinite(error) else float("inf")


def _time(peers: Mapping[str, Peer], rows: dict[str, PeerRow], rounds: int) -> None:
    """Times all peers in the same rounds, and adds the times to their rows."""
    calls: dict[Any, Any] = {}
    for name, peer in peers.items():
        calls[f"{name}: primal"] = peer.primal
        # The value is ready together with the gradient. Waiting for it does not flatten a Module.
        calls[name] = lambda peer=peer: peer.gradient()[0]
    if not calls:
        return
    first = next(iter(peers))
    columns = measure(calls, baseline=first, rounds=rounds).columns
    for name in peers:
        primal, gradient = columns[f"{name}: primal"].samples, columns[name].samples
        rows[name] = dataclasses.replace(
            rows[name],
            primal_us=median(primal.completion_us),
            gradient_us=median(gradient.completion_us),
            ratio=median(ratios(gradient.completion_us, primal.completion_us)),
            to_ours=columns[name].completion_ratio.median,
        )
