"""A Bayesian network, from its prior to calibrated intervals.

Eighty points lie around a wave. The scale of their noise is unknown and has a prior. The script
first shows what the network predicts before it sees data. Then several methods find the posterior.
For each method, a table shows the NLL of held-out points, the fraction of these points in 90%
intervals, and the noise that the method found. NUTS, exact up to Monte Carlo error, is the
reference.

Mean-field inference fails here. Its loss is lower if it explains the wave as noise than if it moves
many weights away from their prior. With large noise, the data no longer matter. Two remedies are
shown: a known noise, and a warm-up, which increases the prior's weight gradually while the network
finds the wave. Last, conformal prediction widens or narrows the intervals of any method until they
have about their nominal coverage. `--out` plots the results.
"""

import argparse
import pathlib
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from scipy.stats import norm

from eqxlike import bayes, nn

NOISE, LEVEL, HELD_OUT = 0.25, 0.9, 400
UNKNOWN = dist.HalfNormal(1.0)


def wave(x: Any) -> jax.Array:
    return jnp.sin(2 * x[:, 0]) + 0.3 * x[:, 0]


def points(count: int, seed: int) -> tuple[jax.Array, jax.Array]:
    """Inputs of shape (count, 1) and targets of shape (count,)."""
    random = np.random.default_rng(seed)
    x = jnp.asarray(random.uniform(-3.0, 3.0, (count, 1)), jnp.float32)
    return x, wave(x) + NOISE * jnp.asarray(random.normal(size=count), jnp.float32)


def target_with(noise: Any, width: int) -> bayes.Posterior:
    """The network, its prior and the data. `noise` is a number or a prior."""
    network = nn.MLP(1, "scalar", width, depth=2, activation=jnp.tanh, key=jax.random.key(0))
    # The scale decreases with `width`, so that a sum of `width` terms does not grow.
    prior = bayes.prior_by_path(
        {"layers[0].*": bayes.normal(0.0, 1.5), "**": bayes.normal(0.0, 1.5 / width**0.5)}
    )
    return bayes.Posterior(network, prior, bayes.Gaussian(scale=noise), points(80, seed=0))


def methods(steps: int, draws: int) -> dict[str, tuple[Any, bayes.Method]]:
    """The methods by name, each with its noise: a known number or a prior."""
    return {
        "NUTS": (UNKNOWN, bayes.NUTS(num_samples=draws, num_warmup=draws, chains=2)),
        "Laplace": (UNKNOWN, bayes.Laplace(steps=steps, width=1.0)),
        "deep ensemble": (UNKNOWN, bayes.DeepEnsemble(members=8, steps=steps)),
        "mean field": (UNKNOWN, bayes.MeanField(steps=steps)),
        "mean field, noise known": (NOISE, bayes.MeanField(steps=steps)),
        "mean field, warm-up": (UNKNOWN, bayes.MeanField(steps=steps, warm_up=steps // 2)),
    }


def look_at_prior(target: bayes.Posterior, key: jax.Array) -> None:
    """Compares the spread of targets simulated from the prior with the spread of the data."""
    _, y = target.data

    def wide(key: jax.Array) -> jax.Array:
        model_key, noise_key = jax.random.split(key)
        unknowns = target.sample_prior(key=model_key)
        return jnp.std(target.simulate(unknowns, key=noise_key))

    spread = jax.jit(jax.vmap(wide))(jax.random.split(key, 200))
    low, middle, high = np.quantile(spread, [0.05, 0.5, 0.95])
    print(f"Standard deviation of targets from the prior: {middle:.2f}", end=" ")
    print(f"({low:.2f} to {high:.2f}); of the observed targets: {np.std(y):.2f}\n")


def noise_of(posterior: Any, key: jax.Array) -> str:
    """The posterior mean of the noise."""
    found = posterior.samples(100, key=key).likelihood
    return f"{np.mean(found['scale']):.2f}" if found else "known"


def draw(predictions: dict[str, bayes.Mixture], x: jax.Array, path: pathlib.Path) -> None:
    """A panel for each method."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7), layout="constrained")
    panels = figure.subplots(2, -(-len(predictions) // 2), sharex=True, sharey=True).ravel()
    seen_x, seen_y = points(80, seed=0)
    for axes, (name, prediction) in zip(panels, predictions.items(), strict=False):
        bayes.plot.bands(x[:, 0], prediction, truth=wave(x), ax=axes, legend=False)
        axes.plot(seen_x[:, 0], seen_y, ".", color="black", markersize=3)
        axes.set_title(name, fontsize=10)
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=5000, metavar="N", help="training steps (5000)"
    )
    parser.add_argument("--draws", type=int, default=300, metavar="N", help="draws per chain (300)")
    parser.add_argument("--width", type=int, default=12, metavar="N", help="layer width (12)")
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE.png", help="save a picture")
    options = parser.parse_args(arguments)
    keys = iter(jax.random.split(jax.random.key(0), 100))
    look_at_prior(target_with(UNKNOWN, options.width), next(keys))

    (x, y), calibration = points(HELD_OUT, seed=1), points(HELD_OUT, seed=2)
    grid = jnp.linspace(-5.0, 5.0, 200)[:, None]
    best = -norm.logpdf(y, wave(x), NOISE).mean()
    flat = -norm.logpdf(y, np.mean(y), np.std(y)).mean()
    print(f"{'':26}{'NLL':>8}{'in 90%':>9}{'noise':>8}{'conformal':>12}")
    print(f"{'wave and noise known':26}{best:8.3f}{LEVEL:9.1%}{NOISE:8.2f}")
    # Separate keys, so that the picture does not change the table.
    pictures, picture_keys = {}, iter(jax.random.split(jax.random.key(1), 100))
    for name, (noise, method) in methods(options.steps, options.draws).items():
        target = target_with(noise, options.width)
        with warnings.catch_warnings():
            # Warnings about poor posteriors are not needed, because the table shows them.
            warnings.simplefilter("ignore", bayes.InferenceWarning)
            posterior = bayes.infer(target, method, key=next(keys), progress=False)
        prediction: Any = bayes.predict(posterior, x, key=next(keys))
        apart: Any = bayes.predict(posterior, calibration[0], key=next(keys))
        corrected = bayes.conformal_intervals(apart, calibration[1], level=LEVEL)
        nll = bayes.metrics.nll(prediction, y)
        inside = bayes.metrics.coverage(y, *prediction.interval(LEVEL))
        inside_corrected = bayes.metrics.coverage(y, *corrected(prediction))
        noise_found = noise_of(posterior, next(keys))
        print(
            f"{name:26}{nll:8.3f}{inside:9.1%}{noise_found:>8}{inside_corrected:12.1%}", flush=True
        )
        if options.out is not None:
            pictures[name] = bayes.predict(posterior, grid, key=next(picture_keys))
    print(f"{'no network at all':26}{flat:8.3f}{'':9}{np.std(y):8.2f}")
    if options.out is not None:
        draw(pictures, grid, options.out)


if __name__ == "__main__":
    main()
