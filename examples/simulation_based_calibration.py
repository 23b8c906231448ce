"""Simulation-based calibration of NUTS, Laplace and mean-field inference on a small model.

    python examples/simulation_based_calibration.py [--simulations N] [--out FILE.png]

A line through ten points has a slope, an intercept and an unknown noise. True values are drawn from
the prior, data are simulated from the true values, and posteriors are inferred from the data. The
ranks of the true values among the draws are uniform if the posteriors are correct. The script
prints the ranks in ten bins, and the probability that uniform ranks are as uneven (chi-squared
test).
"""

import argparse
import pathlib
import warnings
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from scipy import stats

from eqxlike import bayes, nn

NUM_DRAWS, NUM_BINS = 99, 10
UNKNOWNS = ("slope", "intercept", "noise")
METHODS = {
    "NUTS": bayes.NUTS(num_samples=500, num_warmup=300, chains=1),
    "Laplace": bayes.Laplace(steps=500, learning_rate=0.05, width=1.0),
    "mean field": bayes.MeanField(steps=2000, learning_rate=0.02),
}


def small_target() -> bayes.Posterior:
    """A line with normal priors, and a noise with a gamma prior."""
    x = jnp.linspace(-1.0, 1.0, 10)[:, None]
    model = nn.Linear(1, "scalar", key=jax.random.key(0))
    likelihood = bayes.Gaussian(dist.Gamma(2.0, 2.0))
    return bayes.Posterior(model, bayes.normal(0.0, 1.0), likelihood, (x, x[:, 0]))


def all_ranks(num_simulations: int) -> dict[str, np.ndarray]:
    """The ranks for each method, shape (simulations, unknowns)."""
    target, key = small_target(), jax.random.key(0)
    found = {}
    for name, method in METHODS.items():
        found[name] = bayes.simulation_ranks(
            target, method, key=key, num_simulations=num_simulations, num_draws=NUM_DRAWS
        )
        for unknown, ranks in zip(UNKNOWNS, found[name].T, strict=True):
            counts = np.histogram(ranks, NUM_BINS, (0, NUM_DRAWS + 1))[0]
            probability = stats.chisquare(counts).pvalue
            print(f"{name:10}  {unknown:9}  {counts}  p = {probability:.3g}", flush=True)
    return found


def draw(found: dict[str, np.ndarray], path: pathlib.Path) -> None:
    """A panel for each method and unknown."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), layout="constrained")
    panels = figure.subplots(len(found), len(UNKNOWNS), squeeze=False)
    for row, (name, ranks) in zip(panels, found.items(), strict=True):
        for axes, unknown, each in zip(row, UNKNOWNS, ranks.T, strict=True):
            bayes.plot.sbc_ranks(each, NUM_DRAWS, num_bins=NUM_BINS, ax=axes)
            axes.set_title(f"{name}: {unknown}", fontsize=10)
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--simulations", type=int, default=200, metavar="N")
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE.png")
    options = parser.parse_args(arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", bayes.InferenceWarning)
        found = all_ranks(options.simulations)
    if options.out is not None:
        draw(found, options.out)


if __name__ == "__main__":
    main()
