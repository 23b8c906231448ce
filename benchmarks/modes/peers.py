"""Value and gradient of a problem with `jax.jit(jax.value_and_grad)`, NumPyro and PyTorch.

To add a peer, write a function that returns the `Peer` for a problem and add it to `PEERS`. It
raises LookupError if the peer does not implement the problem, and ImportError if the peer is not
installed.
"""

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import jax

import eqxlike
from benchmarks.zoo.problem import Problem, by_path

Call = Callable[[], Any]
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


def pytorch(problem: Problem) -> Peer:
    """PyTorch, operation by operation."""
    return _in_torch(problem, compiles=False)


def torch_compile(problem: Problem) -> Peer:
    """PyTorch, compiled."""
    return _in_torch(problem, compiles=True)


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
    "torch.compile": torch_compile,
}


def _on_module(problem: Problem, primal: Any, gradient: Any) -> Peer:
    unknowns, data = problem.start()
    return Peer(
        lambda: primal(unknowns, data),
        lambda: gradient(unknowns, data),
        lambda returned: by_path(returned[1]),
    )


def _in_torch(problem: Problem, *, compiles: bool) -> Peer:
    torch = importlib.import_module("benchmarks.zoo.in_torch")
    primal, gradient = torch.calls(problem, compiles=compiles)
    return Peer(primal, gradient, lambda returned: returned[1])


def _peak_bytes(jitted: Any, *args: Any) -> int:
    return jitted.lower(*args).compile().memory_analysis().temp_size_in_bytes
