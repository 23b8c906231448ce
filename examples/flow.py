"""A normalising flow: an invertible network turns normal numbers into samples of the data.

The data are two half circles with noise. A coupling layer (Dinh et al. 2017, "Density estimation
using Real NVP") keeps one coordinate, and shifts and scales the other coordinate. A network
computes shift and scale from the coordinate that is kept. The layer has an inverse in closed form,
and its log determinant is the logarithm of the scale. The flow is trained by maximum likelihood.
The baseline is the best normal distribution.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import eqxlike as eqx
from eqxlike import nn, train


class Coupling(eqx.Module):
    """Shifts and scales one coordinate by numbers that depend on the other coordinate."""

    network: nn.MLP
    kept: int = eqx.field(static=True)

    def _scale_and_shift(self, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        log_scale, shift = self.network(y[self.kept][None])
        return jnp.tanh(log_scale), shift

    def to_noise(self, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Inverts the layer. Returns the point, and the log determinant of the inverse."""
        log_scale, shift = self._scale_and_shift(y)
        changed = (y[1 - self.kept] - shift) * jnp.exp(-log_scale)
        return y.at[1 - self.kept].set(changed), -log_scale

    def to_data(self, z: jax.Array) -> jax.Array:
        log_scale, shift = self._scale_and_shift(z)
        return z.at[1 - self.kept].set(z[1 - self.kept] * jnp.exp(log_scale) + shift)


class Flow(eqx.Module):
    layers: list[Coupling]

    def __init__(self, num_layers: int, width: int, *, key: jax.Array) -> None:
        keys = jax.random.split(key, num_layers)
        self.layers = [
            Coupling(nn.MLP(1, 2, width, depth=2, key=key), index % 2)
            for index, key in enumerate(keys)
        ]

    def log_prob(self, y: jax.Array) -> jax.Array:
        total = jnp.array(0.0)
        for layer in reversed(self.layers):
            y, log_det = layer.to_noise(y)
            total = total + log_det
        return total + jnp.sum(jax.scipy.stats.norm.logpdf(y))

    def sample(self, key: jax.Array) -> jax.Array:
        z = jax.random.normal(key, (2,))
        for layer in self.layers:
            z = layer.to_data(z)
        return z


def half_circles(num: int, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    angles, is_lower = np.pi * random.random(num), random.random(num) < 0.5
    upper = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    points = np.where(is_lower[:, None], [1.0, 0.5] - upper, upper)
    return (points + 0.1 * random.normal(size=points.shape)).astype(np.float32)


def loss(flow: Flow, batch: Any, key: Any) -> jax.Array:
    return -jnp.mean(jax.vmap(flow.log_prob)(batch))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=2000)
    options = parser.parse_args(arguments)
    seen, held_out = half_circles(2000, 0), half_circles(2000, 1)
    optimiser = optax.adam(3e-3)
    start = train.TrainState.create(
        Flow(6, 32, key=jax.random.key(0)), optimiser, key=jax.random.key(1)
    )
    batches = train.minibatches(seen, 200, seed=0)
    step = train.make_step(loss, optimiser)
    flow = train.fit(start, step, batches, num_steps=options.steps).state.model

    normal = jax.scipy.stats.multivariate_normal.logpdf(held_out, seen.mean(0), np.cov(seen.T))
    print("log-likelihood of a held-out point, in nats:")
    print(f"  normal distribution {jnp.mean(normal):6.2f}")
    print(f"  flow                {-eqx.filter_jit(loss)(flow, held_out, None):6.2f}")
    keys = jax.random.split(jax.random.key(2), 2000)
    samples = eqx.filter_jit(lambda flow: jax.vmap(flow.sample)(keys))(flow)
    print("mean and standard deviation of each coordinate:")
    for name, points in (("data", held_out), ("samples", np.asarray(samples))):
        means, scales = points.mean(0), points.std(0)
        pairs = "  ".join(
            f"{mean:6.2f} {scale:6.2f}" for mean, scale in zip(means, scales, strict=True)
        )
        print(f"  {name:8} {pairs}")


if __name__ == "__main__":
    main()
