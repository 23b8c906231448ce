"""Reinforcement learning: a policy learns to balance a pole on a cart, with policy gradients.

The environment is a function in JAX, so an update plays 64 episodes at once in one compiled call.
The reward is 1 for each time step until the pole falls, for at most 200 steps. An update makes an
action more likely if the reward that follows it is above the mean of all episodes at that time, and
less likely if it is below (REINFORCE with a baseline; Williams 1992).

The constants are from Barto, Sutton and Anderson (1983), as in Gymnasium's CartPole-v1.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

import eqxlike as eqx
from eqxlike import loops, nn

NUM_EPISODES, NUM_TIMES, DISCOUNT = 64, 200, 0.99
GRAVITY, CART_KG, POLE_KG, HALF_POLE_M, FORCE_N, TIME_S = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02


def move(state: jax.Array, action: jax.Array) -> jax.Array:
    """The next state: position and speed of the cart, angle and angular speed of the pole."""
    _, speed, angle, turning = state
    force = jnp.where(action == 1, FORCE_N, -FORCE_N)
    mass = CART_KG + POLE_KG
    push = (force + POLE_KG * HALF_POLE_M * turning**2 * jnp.sin(angle)) / mass
    inertia = HALF_POLE_M * (4 / 3 - POLE_KG * jnp.cos(angle) ** 2 / mass)
    angular = (GRAVITY * jnp.sin(angle) - jnp.cos(angle) * push) / inertia
    linear = push - POLE_KG * HALF_POLE_M * angular * jnp.cos(angle) / mass
    return state + TIME_S * jnp.stack([speed, linear, turning, angular])


def play(policy: nn.MLP, key: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Plays an episode. Returns states (T, 4), actions (T,), and whether the pole stands (T,)."""

    def step(carry: Any, key: jax.Array) -> Any:
        state, stands = carry
        action = jax.random.categorical(key, policy(state))
        after = move(state, action)
        still = stands & (jnp.abs(after[0]) < 2.4) & (jnp.abs(after[2]) < 0.21)
        return (after, still), (state, action, stands)

    start_key, key = jax.random.split(key)
    start = jax.random.uniform(start_key, (4,), minval=-0.05, maxval=0.05)
    return loops.scan(step, (start, jnp.array(True)), jax.random.split(key, NUM_TIMES))[1]


def returns(stands: jax.Array) -> jax.Array:
    """The discounted sum of future rewards at each time, shape (T,)."""

    def add(total: jax.Array, reward: jax.Array) -> Any:
        total = reward + DISCOUNT * total
        return total, total

    return loops.scan(add, jnp.array(0.0), stands.astype(jnp.float32), reverse=True)[1]


@eqx.filter_jit
def update(policy: nn.MLP, opt_state: Any, optimiser: Any, key: jax.Array) -> Any:
    keys = jax.random.split(key, NUM_EPISODES)
    states, actions, stands = jax.vmap(lambda key: play(policy, key))(keys)
    gains = jax.vmap(returns)(stands)
    gains = jnp.where(stands, gains - jnp.mean(gains, axis=0, keepdims=True), 0.0)

    def loss(policy: nn.MLP) -> jax.Array:
        log_p = jax.nn.log_softmax(jax.vmap(jax.vmap(policy))(states))
        chosen = jnp.take_along_axis(log_p, actions[..., None], axis=-1)[..., 0]
        return -jnp.sum(chosen * gains) / jnp.sum(stands)

    updates, opt_state = optimiser.update(eqx.filter_grad(loss)(policy), opt_state)
    return eqx.apply_updates(policy, updates), opt_state, jnp.mean(jnp.sum(stands, axis=1))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--updates", type=int, default=100)
    options = parser.parse_args(arguments)
    policy = nn.MLP(4, 2, 32, depth=1, activation=jnp.tanh, key=jax.random.key(0))
    optimiser = optax.adam(1e-2)
    opt_state = optimiser.init(eqx.filter(policy, eqx.is_inexact_array))
    for index in range(options.updates):
        key = jax.random.fold_in(jax.random.key(1), index)
        policy, opt_state, mean_length = update(policy, opt_state, optimiser, key)
        if index % 20 == 0 or index == options.updates - 1:
            print(f"update {index:3}: the pole stands for {mean_length:5.1f} of {NUM_TIMES} steps")


if __name__ == "__main__":
    main()
