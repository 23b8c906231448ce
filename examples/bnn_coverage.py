"""Checks the demo's claims about its Bayesian networks on several splits of the data.

    python examples/bnn_coverage.py [--seeds N] [--steps N]

For each seed, a table shows two results on held-out examples: for diabetes, the fraction of true
values in the 90% interval, and for digits, the NLL. Both are compared with a plain network, which
has weight decay and early stopping, and with a linear model. The exit status is 0 if, on average
over the seeds, the Bayesian network's coverage lies within 0.85 to 0.95 and its NLL is no worse
than the plain network's. Otherwise it is 1.
"""

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Sequence

from demo import training
from demo.compare import BAYESIAN, PLAIN, compare

LEAST, MOST = 0.85, 0.95


def metrics(name: training.Name, seed: int, steps: int | None) -> dict[str, dict[str, float]]:
    """Train and evaluate as the demo does; return the metrics of each model."""
    data = training.prepare(name, training.load(name), seed=seed)
    settings = training.settings_for(name, steps=steps, is_quick=False)
    settings = dataclasses.replace(settings, rounds=0)  # do not time calls
    return compare(data, settings, seed=seed, reached={})["metrics"]


def row(label: str, diabetes: dict[str, dict[str, float]], digits: dict) -> str:
    """Return a line of the table."""
    cells = [diabetes[model]["coverage"] for model in (BAYESIAN, PLAIN, "ridge")]
    cells += [digits[model]["nll"] for model in (BAYESIAN, PLAIN, "logistic")]
    return f"{label:>5}" + "".join(f"{cell:>11.4f}" for cell in cells)


def mean(runs: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Return the mean of each metric over runs."""
    return {
        model: {name: statistics.mean(run[model][name] for run in runs) for name in metrics}
        for model, metrics in runs[0].items()
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="seeds 0 to N - 1 (5)")
    parser.add_argument("--steps", type=int, metavar="N", help="training steps (the demo's)")
    options = parser.parse_args(arguments)
    diabetes, digits = [], []
    print(f"{'':>5}{'coverage of the 90% interval':^33}{'NLL of the digits':^33}")
    print(f"{'seed':>5}" + "".join(f"{name:>11}" for name in ("Bayesian", "plain", "linear") * 2))
    for seed in range(options.seeds):
        diabetes.append(metrics("diabetes", seed, options.steps))
        digits.append(metrics("digits", seed, options.steps))
        print(row(str(seed), diabetes[-1], digits[-1]), flush=True)
    average = mean(diabetes), mean(digits)
    print(row("mean", *average))
    is_covered = LEAST <= average[0][BAYESIAN]["coverage"] <= MOST
    is_no_worse = average[1][BAYESIAN]["nll"] <= average[1][PLAIN]["nll"]
    print(f"coverage within {LEAST} to {MOST}: {'yes' if is_covered else 'no'}")
    print(f"NLL no worse than the plain network's: {'yes' if is_no_worse else 'no'}")
    return 0 if is_covered and is_no_worse else 1


if __name__ == "__main__":
    sys.exit(main())
