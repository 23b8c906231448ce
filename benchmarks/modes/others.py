"""Additional measurements: the memory of a deep network, and parallel branches."""

import eqxlike
from benchmarks.modes.peers import eqxlike_filtered
from benchmarks.timing import measure
from benchmarks.zoo import bayesian_network as network
from benchmarks.zoo.networks import deep_network
from benchmarks.zoo.problem import Problem
from eqxlike import ad


def measure_others(rounds: int) -> dict[str, float]:
    """The measured ratios by name.

    - `checkpointed`: the temporary memory of `Checkpointed` relative to `Reverse`, for a gradient
      of a network of 64 layers.
    - `parallel primal`, `parallel gradient`: the times of the Bayesian network with parallel
      branches relative to the dense one, in the same rounds.
    """
    deep = deep_network(layers=64)
    ratio = peak_bytes(deep, ad.Checkpointed()) / peak_bytes(deep, ad.Reverse())
    return {"checkpointed": ratio, **_parallel_to_dense(rounds)}


def peak_bytes(problem: Problem, mode: ad.Mode) -> int:
    """The temporary memory of value and gradient, as estimated by XLA."""
    gradient = eqxlike.filter_value_and_grad(problem.function, mode=mode)
    compiled = eqxlike.filter_jit(gradient).lower(*problem.start()).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def _parallel_to_dense(rounds: int) -> dict[str, float]:
    width, branches = network.BRANCHED
    dense = eqxlike_filtered(network.bayesian_network(width))
    parallel = eqxlike_filtered(network.parallel_network(width, branches))
    primals = {"dense": dense.primal, "parallel": parallel.primal}
    gradients = {
        "dense": lambda: dense.gradient()[0],
        "parallel": lambda: parallel.gradient()[0],
    }
    return {
        f"parallel {name}": measure(calls, baseline="dense", rounds=rounds)
        .columns["parallel"]
        .completion_ratio.median
        for name, calls in (("primal", primals), ("gradient", gradients))
    }
