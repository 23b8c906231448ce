"""How often the steps of a loop are run again, with a given number of saved carries."""

import functools

import jax
import jax.numpy as jnp
import pytest

from eqxlike import loops


@functools.cache
def fewest_runs(steps, carries):
    """The fewest steps to run so that `steps` are reversed from a saved carry, by trying all.

    `carries` may be saved at one time, the one at the start among them.
    """
    if steps <= 1:
        return 0
    if carries == 1:
        return steps * (steps - 1) // 2
    return min(
        first + fewest_runs(first, carries) + fewest_runs(steps - first, carries - 1)
        for first in range(1, steps)
    )


@pytest.mark.parametrize("checkpoints", [1, 2, 3, 5])
@pytest.mark.parametrize("steps", [1, 2, 7, 23])
def test_no_schedule_runs_fewer_steps(steps, checkpoints):
    runs = []

    def step(x):
        jax.debug.callback(lambda: runs.append(1))
        return jnp.sin(x)

    def loop(x):
        return loops.while_loop(
            lambda carry: carry[0] < steps,
            lambda carry: (carry[0] + 1, step(carry[1])),
            (0, x),
            kind="checkpointed",
            checkpoints=checkpoints,
        )[1]

    jax.block_until_ready(jax.grad(loop)(1.0))
    jax.effects_barrier()
    # Once to see how many steps there are, and once more each where its derivative is taken.
    assert len(runs) == steps + fewest_runs(steps, checkpoints) + steps
