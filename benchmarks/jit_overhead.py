"""The cost of a call of a compiled function: filter_jit, raw `jax.jit`, Equinox and NNX.

A check before timing ensures that all columns of a row compute the same numbers.
`benchmarks.timing` describes the method. Ctrl-C prints the finished rows.

To add a row, write a function that returns a `Case` and name it in `CASES`. Profiling has the same
cases.
"""

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

import eqxlike
from benchmarks import bayesian, cases, command, networks
from benchmarks.cases import Case, Work
from benchmarks.timing import Call

NAME = "benchmarks.jit_overhead"
ROUNDS = command.Rounds(default=200, quick=15)


def compare(name: str, work: Callable[[Any], Work], nnx: Callable[[Any], Call]) -> Case:
    """The case that calls a computation in every way.

    **Arguments:**

    - `name`: the name of the row.
    - `work`: makes the computation with the Modules of a library, eqxlike or Equinox.
    - `nnx`: makes the call of the same computation with NNX, from `benchmarks.nnx_networks`.
    """

    def equinox() -> Work:
        return work(importlib.import_module("equinox"))

    return Case(
        name,
        {
            cases.FLAT: lambda: cases.on_flat_list(work(eqxlike)),
            cases.MODULE: lambda: cases.on_module(work(eqxlike)),
            cases.OURS: lambda: cases.filtered(work(eqxlike)),
            cases.WATCHED: lambda: cases.watched(work(eqxlike)),
            cases.EQUINOX_MODULE: lambda: cases.on_module(equinox()),
            cases.EQUINOX: lambda: cases.filtered(equinox()),
            cases.NNX: lambda: nnx(importlib.import_module("benchmarks.nnx_networks")),
        },
    )


def identity() -> Case:
    """A model without arrays that returns its input, to measure only the overhead of a call."""
    x = functools.partial(networks.normal, 1, 1, seed=1)

    def work(library: Any) -> Work:
        return Work(library, networks.forward, (library.nn.Identity(),), (x(),))

    return compare("Identity, (1, 1)", work, lambda peer: peer.forward(peer.Identity(), x()))


def mlp_forward(depth: int, width: int, batch: int | None = None) -> Case:
    """An MLP applied to one example, or to a batch with `vmap`."""
    function = networks.forward if batch is None else networks.forward_batch
    shape = (width,) if batch is None else (batch, width)
    x = functools.partial(networks.normal, *shape, seed=1)

    def work(library: Any) -> Work:
        return Work(library, function, (networks.mlp(library, width, depth),), (x(),))

    name = f"MLP forward, depth {depth}, width {width}"
    return compare(
        name if batch is None else f"{name}, batch {batch}",
        work,
        lambda peer: peer.forward(peer.mlp(width, depth), x()),
    )


def adam_step(depth: int, width: int, batch: int = 32) -> Case:
    """A step of Adam on the mean squared error of an MLP. Each step starts from the last state."""

    def data() -> tuple[jax.Array, jax.Array]:
        return networks.normal(batch, width, seed=1), networks.normal(batch, width, seed=2)

    def work(library: Any) -> Work:
        state = networks.training_state(library, networks.mlp(library, width, depth))
        step = networks.training_step(library, networks.mean_squared_error)
        return Work(library, step, state, data(), feeds_back=True)

    return compare(
        f"Adam step, depth {depth}, width {width}, batch {batch}",
        work,
        lambda peer: peer.training_step(peer.mlp(width, depth), peer.mean_squared_error, data()),
    )


def elbo_step(batch: int = 64) -> Case:
    """A step of Adam on the minibatch ELBO of a Bayesian network, from the last state and key."""
    key = functools.partial(jax.random.key, 0)

    def work(library: Any) -> Work:
        model = bayesian.network() if library is eqxlike else bayesian.equinox_network(library)
        state = (*networks.training_state(library, model), key())
        return Work(
            library, bayesian.elbo_step(library), state, bayesian.data(batch), feeds_back=True
        )

    sizes = f"{bayesian.FEATURES}-{bayesian.WIDTH}-{bayesian.CLASSES}"
    return compare(
        f"ELBO step, {sizes}, batch {batch}",
        work,
        lambda peer: peer.elbo_step(key(), bayesian.data(batch)),
    )


CASES: tuple[Case, ...] = (
    identity(),
    *(mlp_forward(2, 2**power) for power in (5, 6, 7, 8)),
    *(mlp_forward(2, 2**power, batch=1000) for power in (5, 6, 7, 8)),
    mlp_forward(2, 8),
    mlp_forward(8, 32),
    mlp_forward(64, 8),
    adam_step(2, 8),
    adam_step(8, 32),
    adam_step(64, 8),
    elbo_step(),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints. Returns 2 for a wrong argument and 130 after Ctrl-C."""
    return command.measure_cases(arguments, NAME, __doc__, ROUNDS, CASES)


if __name__ == "__main__":
    sys.exit(main())
