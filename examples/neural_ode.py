"""A neural ODE: a network is the right-hand side of an equation that Diffrax solves.

A damped pendulum is released at 64 angles, and observed at 40 times within four seconds, with
noise. A network learns the pendulum's law of motion, which maps angle and speed to their
derivatives. Training differentiates through the steps of the solver. The test uses new angles over
eight seconds, twice as long as in training. The baseline is the best linear law, learned in the
same way. A pendulum that swings high does not obey a linear law.

Diffrax is built on Equinox and runs on eqxlike unchanged, if `install_as_equinox` is called before
Diffrax is imported. `pip install diffrax`.
"""

import argparse
import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import eqxlike as eqx
from eqxlike import nn, train

eqx.install_as_equinox()

import diffrax  # noqa: E402  # pyright: ignore[reportMissingImports]

GRAVITY, FRICTION, NOISE = 9.81, 0.3, 0.05
STEP_S, SEEN_EVERY_S = 0.05, 0.1

Law = Callable[[jax.Array], jax.Array]


class Pendulum(eqx.Module):
    """The true law of motion of a pendulum that is one metre long."""

    def __call__(self, y: jax.Array) -> jax.Array:
        angle, speed = y
        return jnp.stack([speed, -GRAVITY * jnp.sin(angle) - FRICTION * speed])


def solve(law: Law, start: jax.Array, times: jax.Array) -> jax.Array:
    """Angle (rad) and speed (rad/s) at the times, shape (T, 2)."""
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(lambda t, y, law: law(y)),
        diffrax.Tsit5(),
        t0=0.0,
        t1=times[-1],
        dt0=STEP_S,
        y0=start,
        args=law,
        saveat=diffrax.SaveAt(ts=times),
        max_steps=round(times.size * SEEN_EVERY_S / STEP_S) + 2,
    )
    return jnp.asarray(solution.ys)


def times_within(seconds: float) -> jax.Array:
    return SEEN_EVERY_S * jnp.arange(1, round(seconds / SEEN_EVERY_S) + 1)


@eqx.filter_jit
def swings(law: Law, starts: jax.Array, seconds: float) -> jax.Array:
    """The solution from each start, shape (N, T, 2)."""
    return jax.vmap(lambda start: solve(law, start, times_within(seconds)))(starts)


def starts_at(angles: np.ndarray) -> jax.Array:
    """The states of pendulums at rest at these angles."""
    return jnp.stack([jnp.asarray(angles), jnp.zeros(len(angles))], axis=1).astype(jnp.float32)


def loss(law: Any, batch: Any, key: jax.Array, seconds: float) -> jax.Array:
    """The mean squared error over the first seconds."""
    starts, seen = batch
    found = swings(law, starts, seconds)
    return jnp.mean((found - seen[:, : found.shape[1]]) ** 2)


def learned(law: Any, data: Any, steps: int, seconds: float) -> Any:
    """Fits the law to the first quarter of each swing, then to whole swings.

    Early errors grow over a long swing, so fitting whole swings from the start is harder.
    """
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-3))
    for part in (seconds / 4, seconds):
        start = train.TrainState.create(law, optimiser, key=jax.random.key(1))
        step = train.make_step(functools.partial(loss, seconds=part), optimiser)
        batches = train.minibatches(data, 32, seed=0)
        law = train.fit(start, step, batches, num_steps=steps).state.model
    return law


def off(found: jax.Array, truth: jax.Array) -> float:
    """The root mean squared error of the angles, in radians."""
    return float(jnp.sqrt(jnp.mean((found - truth)[..., 0] ** 2)))


def draw(found: dict[str, jax.Array], truth: jax.Array, seconds: float, path: pathlib.Path) -> None:
    """Plots the true angles and the learned laws' angles of some swings over time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.2), layout="constrained")
    chosen = (0, len(truth) // 4, len(truth) // 2)
    times = times_within(2 * seconds)
    for index, (axes, swing) in enumerate(
        zip(figure.subplots(1, len(chosen), sharey=True), chosen, strict=True)
    ):
        axes.axvspan(0, seconds, color="0.93", label="training time")
        axes.plot(times, truth[swing, :, 0], color="black", linewidth=3, alpha=0.35, label="truth")
        for name, swings_found in found.items():
            axes.plot(times, swings_found[swing, :, 0], linewidth=1.3, label=name)
        axes.set_xlabel("time (s)")
        if index == 0:
            axes.set_ylabel("angle (rad)")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    figure.savefig(path, dpi=100)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=1000, metavar="N", help="steps of each fit (1000)"
    )
    parser.add_argument(
        "--seconds", type=float, default=4.0, metavar="S", help="duration of the training data (4)"
    )
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE.png", help="save a picture")
    options = parser.parse_args(arguments)
    random = np.random.default_rng(0)
    starts = starts_at(random.uniform(-2.5, 2.5, 64))
    seen = np.asarray(swings(Pendulum(), starts, options.seconds))
    seen = seen + NOISE * random.normal(size=seen.shape).astype(np.float32)

    new_starts = starts_at(np.linspace(-2.4, 2.4, 16))
    truth = swings(Pendulum(), new_starts, 2 * options.seconds)
    laws = {
        "linear law": nn.Linear(2, 2, key=jax.random.key(0)),
        "network": nn.MLP(2, 2, 32, depth=2, activation=jnp.tanh, key=jax.random.key(0)),
    }
    half, drawn = truth.shape[1] // 2, {}
    print("Error of the angles, in radians, for starts that are not in the training data:")
    print(f"{'':14}{'within the':>14}{'after the':>14}")
    print(f"{'':14}{'training time':>14}{'training time':>14}")
    for name, law in laws.items():
        law = learned(law, (np.asarray(starts), seen), options.steps, options.seconds)
        found = drawn[name] = swings(law, new_starts, 2 * options.seconds)
        parts = off(found[:, :half], truth[:, :half]), off(found[:, half:], truth[:, half:])
        print(f"{name:14}" + "".join(f"{part:14.3f}" for part in parts), flush=True)

    # Compare the angular accelerations of the network and of the true law, at zero speed.
    print("\nAngular acceleration at zero speed, in rad/s^2:")
    print(f"{'angle':>8}{'network':>10}{'truth':>10}")
    for angle in (0.5, 1.0, 1.5, 2.0):
        y = jnp.array([angle, 0.0])
        print(f"{angle:8.1f}{law(y)[1]:10.2f}{Pendulum()(y)[1]:10.2f}")
    if options.out is not None:
        draw(drawn, truth, options.seconds, options.out)


if __name__ == "__main__":
    main()
