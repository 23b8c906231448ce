"""Problems of the zoo in PyTorch, to time its gradients.

Importing this file imports PyTorch, which is not a dependency. Functions are called with the
unknowns by path and with the data, all of them tensors.
"""

import importlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from benchmarks.zoo.bayesian_network import BRANCHED, WIDTHS, name
from benchmarks.zoo.problem import Problem, by_path

torch: Any = importlib.import_module("torch")
dense: Any = importlib.import_module("torch.nn.functional")

# The problems are small, and several threads would wait for each other and for XLA's threads. On
# two cores, logistic regression took 6,000 us (30,000 us compiled) with two threads, and 230 us
# (120 us compiled) with one thread.
torch.set_num_threads(1)

Tensor = Any
Tensors = Mapping[str, Tensor]


def calls(problem: Problem, *, compiles: bool) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The calls that compute a problem's value, and its value and gradients by path.

    **Arguments:**

    - `compiles`: whether `torch.compile` compiles them.

    **Raises:** `LookupError` if this file does not implement the problem or its link.
    """
    if problem.name not in FUNCTIONS:
        raise LookupError(f"{problem.name} is not written in PyTorch")
    function = FUNCTIONS[problem.name]
    if problem.is_linked:
        function = _linked(function, problem.constraints)
    if compiles:
        torch.compiler.reset()  # PyTorch limits the compilations of a function
        function = torch.compile(function, fullgraph=True, dynamic=False)
    unknowns, data = problem.start()
    leaves = {path: _tensor(leaf).requires_grad_() for path, leaf in by_path(unknowns).items()}
    tensors = [_tensor(array) for array in data]

    def primal() -> Tensor:
        with torch.no_grad():
            return function(leaves, *tensors)

    def gradient() -> tuple[Tensor, dict[str, Tensor]]:
        value = function(leaves, *tensors)
        gradients = torch.autograd.grad(value, list(leaves.values()))
        return value.detach(), dict(zip(leaves, gradients, strict=True))

    return primal, gradient


def bayesian_network(unknowns: Tensors, x: Tensor, y: Tensor) -> Tensor:
    """`bayesian_network.bayesian_network`."""
    units = dense.relu(dense.linear(x, unknowns["hidden.weight"], unknowns["hidden.bias"]))
    return _network_density(unknowns, units, y)


def parallel_network(unknowns: Tensors, x: Tensor, y: Tensor) -> Tensor:
    """`bayesian_network.parallel_network`, with a loop over branches."""
    branches = zip(unknowns["hidden.layers.weight"], unknowns["hidden.layers.bias"], strict=True)
    units = torch.cat([dense.relu(dense.linear(x, *branch)) for branch in branches], dim=1)
    return _network_density(unknowns, units, y)


def logistic_regression(unknowns: Tensors, x: Tensor, y: Tensor) -> Tensor:
    """`bayesian.logistic_regression`."""
    logits = x @ unknowns["weights"] + unknowns["intercept"]
    prior = sum(_normal(leaf, 0.0, 1.0) for leaf in unknowns.values())
    return prior - dense.binary_cross_entropy_with_logits(logits, y, reduction="sum")


def eight_schools(unknowns: Tensors, y: Tensor, errors: Tensor) -> Tensor:
    """`bayesian.eight_schools`."""
    mean, scale, effects = unknowns["mean"], unknowns["scale"], unknowns["effects"]
    half_cauchy = math.log(2 / (5 * math.pi)) - torch.log1p((scale / 5) ** 2)
    prior = _normal(mean, 0.0, 5.0) + half_cauchy + _normal(effects, mean, scale)
    return prior + _normal(y, effects, errors)


def hierarchical_poisson(unknowns: Tensors, group: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """`bayesian.hierarchical_poisson`."""
    mean, scale, effects = unknowns["mean"], unknowns["scale"], unknowns["effects"]
    prior = _normal(mean, 0.0, 1.0) + _normal(unknowns["slope"], 0.0, 1.0)
    prior = prior + math.log(2) + _normal(scale, 0.0, 1.0) + _normal(effects, mean, scale)
    log_rate = effects[group] + unknowns["slope"] * x
    return prior + torch.sum(y * log_rate - torch.exp(log_rate) - torch.lgamma(y + 1))


def convolutional_network(unknowns: Tensors, images: Tensor, labels: Tensor) -> Tensor:
    """`networks.convolutional_network`."""
    x = images
    for layer in (0, 3):
        weight, bias = unknowns[f"layers.{layer}.weight"], unknowns[f"layers.{layer}.bias"]
        x = dense.gelu(dense.conv2d(x, weight, bias.flatten(), padding=1), approximate="tanh")
        x = dense.avg_pool2d(x, 2)
    logits = dense.linear(x.flatten(1), unknowns["layers.7.weight"], unknowns["layers.7.bias"])
    return dense.cross_entropy(logits, labels)


def _network_density(unknowns: Tensors, units: Tensor, y: Tensor) -> Tensor:
    """The log density of a Bayesian network, from the outputs of its hidden layer."""
    sigma = unknowns["sigma"]
    prior = -math.lgamma(0.1) - 0.9 * torch.log(sigma) - sigma
    for path, leaf in unknowns.items():
        if path != "sigma":
            prior = prior + _normal(leaf, 0.0, 1.0)
    return prior + _normal(y, dense.linear(units, unknowns["output.weight"])[:, 0], sigma)


def _normal(x: Tensor, mean: Tensor | float, scale: Tensor | float) -> Tensor:
    """The log density of Normal(mean, scale), summed."""
    log_scale = torch.log(scale) if torch.is_tensor(scale) else math.log(scale)
    return torch.sum(-(((x - mean) / scale) ** 2) / 2 - log_scale - math.log(2 * math.pi) / 2)


def _linked(function: Callable[..., Tensor], constraints: Mapping[str, str]) -> Callable[..., Any]:
    """The function in linked space: positive unknowns are replaced by their logarithms."""
    if others := set(constraints.values()) - {"positive"}:
        raise LookupError(f"{', '.join(sorted(others))} is not linked in PyTorch")

    def linked(unknowns: Tensors, *data: Tensor) -> Tensor:
        images = {path: torch.exp(unknowns[path]) for path in constraints}
        log_det = sum(torch.sum(unknowns[path]) for path in constraints)
        return function({**unknowns, **images}, *data) + log_det

    return linked


def _tensor(array: Any) -> Tensor:
    """Copies an array to a tensor. Integers become 64-bit, because PyTorch needs 64-bit indices."""
    tensor = torch.from_numpy(np.array(array))
    return tensor if tensor.is_floating_point() else tensor.long()


FUNCTIONS: Mapping[str, Callable[..., Tensor]] = {
    **{name(width): bayesian_network for width in WIDTHS},
    name(*BRANCHED): parallel_network,
    "logistic regression": logistic_regression,
    "eight schools": eight_schools,
    "hierarchical Poisson": hierarchical_poisson,
    "convolutional network": convolutional_network,
}
