"""The cases of benchmarks and profiling. Each case is a row of the table.

A case builds a column only on request, so that a library that is not installed only adds a note. To
add a row, write a function that returns a `Case` and add it to `CASES`. Rows may have different
columns.
"""

import dataclasses
import functools
import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import jax
import numpy as np

import eqxlike
from benchmarks import bayesian, columns, networks
from benchmarks.columns import Work
from benchmarks.timing import Call


@dataclasses.dataclass(frozen=True)
class Case:
    """A computation in all ways that are compared.

    - `name`: the name of the row.
    - `builders`: functions that make the call of each column, in the order of the table. A function
      raises ImportError if a library is not installed.
    - `baseline`: the column that is the denominator of ratios.
    """

    name: str
    builders: Mapping[str, Callable[[], Call]]
    baseline: str = columns.MODULE

    @property
    def slug(self) -> str:
        """The name in a form for file names."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")


class Named(Protocol):
    """A row of a benchmark that can be selected by name."""

    @property
    def name(self) -> str:
        """The name."""
        ...


NamedT = TypeVar("NamedT", bound=Named)


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
            columns.FLAT: lambda: columns.on_flat_list(work(eqxlike)),
            columns.MODULE: lambda: columns.on_module(work(eqxlike)),
            columns.OURS: lambda: columns.filtered(work(eqxlike)),
            columns.WATCHED: lambda: columns.watched(work(eqxlike)),
            columns.EQUINOX_MODULE: lambda: columns.on_module(equinox()),
            columns.EQUINOX: lambda: columns.filtered(equinox()),
            columns.NNX: lambda: nnx(importlib.import_module("benchmarks.nnx_networks")),
        },
    )


def identity() -> Case:
    """A model without arrays that returns its input, to measure only the overhead of a call."""
    x = functools.partial(networks.normal, 1, 1, seed=1)

    def work(library: Any) -> Work:
        return Work(library, networks.forward, (library.nn.Identity(),), (x(),), False)

    return compare("Identity, (1, 1)", work, lambda peer: peer.forward(peer.Identity(), x()))


def mlp_forward(depth: int, width: int, batch: int | None = None) -> Case:
    """An MLP applied to one example, or to a batch with `vmap`."""
    function = networks.forward if batch is None else networks.forward_batch
    shape = (width,) if batch is None else (batch, width)
    x = functools.partial(networks.normal, *shape, seed=1)

    def work(library: Any) -> Work:
        return Work(library, function, (networks.mlp(library, width, depth),), (x(),), False)

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
        return Work(library, step, state, data(), True)

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
        return Work(library, bayesian.elbo_step(library), state, bayesian.data(batch), True)

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


def select(pattern: str) -> tuple[Case, ...]:
    """The cases of `CASES` whose name matches `pattern`."""
    return find(pattern, CASES)


def find(pattern: str, among: Sequence[NamedT]) -> tuple[NamedT, ...]:
    """The rows whose name matches the regular expression `pattern`, ignoring case.

    **Raises:** `ValueError` if no row matches, or `pattern` is not a regular expression.
    """
    try:
        found = tuple(row for row in among if re.search(pattern, row.name, re.IGNORECASE))
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
    if not found:
        names = "\n  ".join(row.name for row in among)
        raise ValueError(f"no case matches {pattern!r}; there are\n  {names}")
    return found


def build(case: Case) -> tuple[dict[str, Call], list[str]]:
    """Builds the columns of a case.

    **Returns:** the calls by column, and a note for each column that is left out.
    """
    calls, notes = {}, []
    for column, builder in case.builders.items():
        try:
            calls[column] = builder()
        except ImportError as error:
            notes.append(f"{column} is left out: {error}")
    return calls, notes


def check_agreement(calls: Mapping[str, Call], times: int = 3) -> None:
    """Checks that all columns return the same numbers, in several calls.

    **Raises:** `AssertionError` that names the column that differs from the first column, the call,
    and the numbers.
    """
    results = {column: [np.asarray(call()) for _ in range(times)] for column, call in calls.items()}
    (first, expected), *others = results.items()
    for column, actual in others:
        for number, (one, other) in enumerate(zip(actual, expected, strict=True), start=1):
            message = f"{column!r} differs from {first!r} at call {number}"
            # The tolerance for sums in a different order, relative to their largest number.
            atol = 1e-5 * max(1.0, float(np.max(np.abs(other), initial=0.0)))
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=atol, err_msg=message)
