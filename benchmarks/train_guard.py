"""The cost of a training step's check that all numbers of its new state are finite.

`train.make_step` with and without `check_finite`, and a step that looks at the parameters alone,
for an MLP trained by Adam. All columns compute the same losses, which is checked before anything is
timed. The method is that of `eqxlike._timing`. Ctrl-C prints the rows that are finished.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import eqxlike
from benchmarks import command, networks
from benchmarks.cases import Case
from eqxlike import train
from eqxlike._timing import Call

NAME = "benchmarks.train_guard"
ROUNDS = command.Rounds(default=60, quick=15)

UNCHECKED = "check_finite=False"
PARAMETERS = "parameters checked"
CHECKED = "check_finite=True"

Step = Callable[[train.TrainState, Any], tuple[train.TrainState, jax.Array]]


def loss(model: Any, batch: tuple[jax.Array, jax.Array], key: Any) -> jax.Array:
    """The mean squared error, with the arguments that `make_step` passes."""
    return networks.mean_squared_error(model, *batch)


def unchecked() -> Step:
    """The step that looks at nothing."""
    return train.make_step(loss, networks.optimiser(), check_finite=False)


def checked() -> Step:
    """The step that looks at the whole state."""
    return train.make_step(loss, networks.optimiser())


def parameters_checked() -> Step:
    """A step that keeps its last good state, but does not look at the optimiser's state."""
    plain = unchecked().__wrapped__

    def step(state: train.TrainState, batch: Any) -> tuple[train.TrainState, jax.Array]:
        new, value = plain(state, batch)
        is_good = ~state.is_halted & jnp.isfinite(value) & train.all_finite(new.model)
        chosen = train.tree_where(is_good, new, state)
        return eqxlike.tree_at(lambda state: state.is_halted, chosen, ~is_good), value

    return eqxlike.filter_jit(step, donate=("state",))


def start(depth: int, width: int) -> train.TrainState:
    """The state before the first step."""
    model = networks.mlp(eqxlike, width, depth)
    return train.TrainState.create(model, networks.optimiser(), key=jax.random.key(0))


def adam_step(depth: int, width: int, batch: int = 32) -> Case:
    """The row of one MLP with `depth` hidden layers, `width` features everywhere."""

    def call(make: Callable[[], Step]) -> Call:
        state, step = start(depth, width), make()
        data = networks.normal(batch, width, seed=1), networks.normal(batch, width, seed=2)

        def call() -> jax.Array:
            nonlocal state
            state, value = step(state, data)
            return value

        return call

    builders = {UNCHECKED: unchecked, PARAMETERS: parameters_checked, CHECKED: checked}
    return Case(
        f"Adam step, depth {depth}, width {width}, batch {batch}",
        {column: lambda make=make: call(make) for column, make in builders.items()},
        baseline=UNCHECKED,
    )


ROWS: tuple[Case, ...] = (
    adam_step(2, 8),
    adam_step(8, 32),
    adam_step(64, 8),
    adam_step(2, 256),
    adam_step(2, 1024),
)


def main(arguments: Sequence[str] | None = None, rows: Sequence[Case] = ROWS) -> int:
    """Measures and prints; returns the exit status: 2 for a wrong argument, 130 after Ctrl-C."""
    return command.measure_cases(arguments, NAME, __doc__, ROUNDS, rows)


if __name__ == "__main__":
    sys.exit(main())
