"""Value and gradient of a problem with `jax.jit(jax.value_and_grad)`, NumPyro and PyTorch.

To add a peer, write a function from a problem to a `Peer` and name it in `PEERS`. It raises
LookupError for a problem that the peer lacks, and ImportError if the peer is not installed. Each
peer is checked, and has a row, like a mode. The peers of a problem are measured interleaved.
"""

import dataclasses
import functools
import importlib
import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import jax
import numpy as np

import eqxlike
from benchmarks.timing import Call, measure, ratios
from benchmarks.zoo.problem import Problem, by_path, in_double

Gradients = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Peer:
    """A way to compute value and gradient of a problem.

    - `primal`: computes the value, an array or a tensor.
    - `gradient`: computes the value, and the gradient in any form.
    - `by_path`: converts the result of `gradient` to gradients by path.
    - `peak_bytes`: XLA's estimate of the temporary memory of `gradient`, if XLA compiles it.
    """

    primal: Call
    gradient: Call
    by_path: Callable[[Any], Gradients] = by_path
    peak_bytes: Callable[[], int | None] = lambda: None


def eqxlike_filtered(problem: Problem) -> Peer:
    """`filter_jit(filter_value_and_grad(f))`."""
    primal = eqxlike.filter_jit(problem.function)
    gradient = eqxlike.filter_jit(eqxlike.filter_value_and_grad(problem.function))
    return _on_module(problem, primal, gradient)


def on_module(problem: Problem) -> Peer:
    """`jax.jit(jax.value_and_grad(f))` of the Module, if all of its leaves are arrays.

    **Raises:** `LookupError` if a leaf is not an array.
    """
    unknowns, data = problem.start()
    if not all(map(eqxlike.is_inexact_array, jax.tree_util.tree_leaves(unknowns))):
        raise LookupError(f"{problem.name}: not all leaves are arrays, as jax.jit needs them")
    gradient = jax.jit(jax.value_and_grad(problem.function))
    peer = _on_module(problem, jax.jit(problem.function), gradient)
    return dataclasses.replace(peer, peak_bytes=lambda: _peak_bytes(gradient, unknowns, data))


def on_flat_arrays(problem: Problem) -> Peer:
    """`jax.jit(jax.value_and_grad(f))` of a list of arrays, as users write by hand."""
    unknowns, data = problem.start()
    dynamic, static = eqxlike.partition(unknowns, eqxlike.is_inexact_array)
    arrays, treedef = jax.tree_util.tree_flatten(dynamic)
    paths = list(by_path(unknowns))

    def function(arrays: list[jax.Array], data: Any) -> jax.Array:
        own = jax.tree_util.tree_unflatten(treedef, arrays)
        return problem.function(eqxlike.combine(own, static), data)

    primal, gradient = jax.jit(function), jax.jit(jax.value_and_grad(function))
    return Peer(
        lambda: primal(arrays, data),
        lambda: gradient(arrays, data),
        lambda returned: dict(zip(paths, returned[1], strict=True)),
        lambda: _peak_bytes(gradient, arrays, data),
    )


def numpyro(problem: Problem) -> Peer:
    """Minus `potential_energy` of NumPyro's model, a density of unconstrained unknowns.

    **Raises:** `LookupError` if NumPyro has no model or the unknowns are constrained.
    """
    if problem.constraints and not problem.is_linked:
        raise LookupError("a density in constrained space has no one gradient: NumPyro normalises")
    value = importlib.import_module("benchmarks.zoo.in_numpyro").value(problem)
    unknowns, data = problem.start()
    values = by_path(unknowns)
    primal, gradient = jax.jit(value), jax.jit(jax.value_and_grad(value))
    return Peer(
        lambda: primal(values, data),
        lambda: gradient(values, data),
        lambda returned: returned[1],
        lambda: _peak_bytes(gradient, values, data),
    )


def pytorch(problem: Problem, *, compiles: bool = False) -> Peer:
    """PyTorch, operation by operation or compiled."""
    torch = importlib.import_module("benchmarks.zoo.in_torch")
    primal, gradient = torch.calls(problem, compiles=compiles)
    return Peer(primal, gradient, lambda returned: returned[1])


OURS = "filter_value_and_grad"
NUMPYRO = "NumPyro"
FLAT = "jax.jit, flat arrays"
MODULE = "jax.jit, Module"

PEERS: Mapping[str, Callable[[Problem], Peer]] = {
    OURS: eqxlike_filtered,
    FLAT: on_flat_arrays,
    MODULE: on_module,
    NUMPYRO: numpyro,
    "PyTorch": pytorch,
    "torch.compile": functools.partial(pytorch, compiles=True),
}


def _on_module(problem: Problem, primal: Any, gradient: Any) -> Peer:
    unknowns, data = problem.start()
    return Peer(
        lambda: primal(unknowns, data),
        lambda: gradient(unknowns, data),
        lambda returned: by_path(returned[1]),
    )


def _peak_bytes(jitted: Any, *args: Any) -> int:
    return jitted.lower(*args).compile().memory_analysis().temp_size_in_bytes


# --- rows ---

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
