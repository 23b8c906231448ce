"""A physics-informed network: it learns a function from a differential equation, without data.

The heat equation, `u_t = 0.1 u_xx` for x in [0, 1], starts at `u(0, x) = sin(pi x)` and is zero at
both ends. The function `u(t, x) = sin(pi x) + t x (1 - x) N(t, x)` satisfies the start and both
ends for every network N. So the loss is only the squared residual of the equation at random points.
`eqxlike.loops.fori_loop` runs all steps of a round in one call. The exact solution is
`exp(-0.1 pi^2 t) sin(pi x)`.
"""

import argparse
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

import eqxlike as eqx
from eqxlike import loops, nn

DIFFUSIVITY = 0.1
NUM_POINTS = 256


class Solution(eqx.Module):
    """The function u of time and position."""

    network: nn.MLP

    def __call__(self, t: jax.Array, x: jax.Array) -> jax.Array:
        correction = self.network(jnp.stack([t, x]))
        return jnp.sin(jnp.pi * x) + t * x * (1 - x) * correction


def residual(u: Solution, t: jax.Array, x: jax.Array) -> jax.Array:
    """The residual of the heat equation at one point: u_t - 0.1 u_xx."""
    u_t = jax.grad(u, argnums=0)(t, x)
    u_xx = jax.grad(jax.grad(u, argnums=1), argnums=1)(t, x)
    return u_t - DIFFUSIVITY * u_xx


def loss(u: Solution, key: jax.Array) -> jax.Array:
    t, x = jax.random.uniform(key, (2, NUM_POINTS))
    return jnp.mean(jax.vmap(functools.partial(residual, u))(t, x) ** 2)


@eqx.filter_jit
def train(u: Solution, opt_state: Any, optimiser: Any, key: jax.Array, num_steps: int) -> Any:
    """Runs the steps of one round, and returns the function and the optimiser's state."""

    def step(index: jax.Array, carry: Any) -> Any:
        u, opt_state = carry
        gradient = eqx.filter_grad(loss)(u, jax.random.fold_in(key, index))
        updates, opt_state = optimiser.update(gradient, opt_state)
        return eqx.apply_updates(u, updates), opt_state

    return loops.fori_loop(0, num_steps, step, (u, opt_state))


def largest_error(u: Solution) -> float:
    """The largest error on a grid, compared with the exact solution."""
    t, x = (each.ravel() for each in jnp.meshgrid(jnp.linspace(0, 1, 21), jnp.linspace(0, 1, 21)))
    exact = jnp.exp(-DIFFUSIVITY * jnp.pi**2 * t) * jnp.sin(jnp.pi * x)
    return float(jnp.max(jnp.abs(jax.vmap(u)(t, x) - exact)))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=500, help="steps in each round (500)")
    options = parser.parse_args(arguments)
    key = jax.random.key(0)
    u = Solution(nn.MLP(2, "scalar", 32, depth=2, activation=jnp.tanh, key=key))
    optimiser = optax.adam(optax.cosine_decay_schedule(3e-3, options.rounds * options.steps))
    opt_state = optimiser.init(eqx.filter(u, eqx.is_inexact_array))
    print(f"after {0:5} steps the largest error is {largest_error(u):.4f}")
    for index in range(options.rounds):
        round_key = jax.random.fold_in(key, index)
        u, opt_state = train(u, opt_state, optimiser, round_key, options.steps)
        done = (index + 1) * options.steps
        print(f"after {done:5} steps the largest error is {largest_error(u):.4f}")


if __name__ == "__main__":
    main()
