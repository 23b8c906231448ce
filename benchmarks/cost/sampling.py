"""NUTS compared with NumPyro's NUTS on the same models, in effective samples a second."""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import MCMC, NUTS

from benchmarks import networks, table
from benchmarks.command import OwnRow
from benchmarks.cost.densities import Stated, logistic_regression, network
from benchmarks.zoo import in_numpyro
from eqxlike import bayes

TABLE = "NUTS"

OURS = "bayes.NUTS"
NUMPYRO = "NumPyro"

CHAINS = 4
MANY_CHAINS = (64, 512, 4096)
# Shorter chains do not converge, so R-hat and the effective sample size are unreliable.
_FEWEST_DRAWS = 100
_MAX_RUN_CHAINS = 8192
"""The maximum of chains times seeds, because runs of many chains take minutes."""
INPUTS = 20


class Run(NamedTuple):
    """The result of one run of all chains.

    - `seconds`: time of warm-up and draws, without compilation.
    - `ess`: the smallest bulk effective sample size of the predictions.
    - `r_hat`: the largest R-hat of the predictions.
    - `gradients`: the mean number of gradients for a draw.
    - `divergences`: the number of draws whose trajectory diverged.
    """

    seconds: float
    ess: float
    r_hat: float
    gradients: float
    divergences: int


class Drawn(NamedTuple):
    """The draws of chains: arrays `(chains, draws, ...)` in tree order, and the cost of each
    draw.
    """

    arrays: tuple[Any, ...]
    gradients: Any
    is_divergent: Any


Sampler = Callable[[int], Drawn]
"""A function that draws with a seed and waits for the draws."""


def rows() -> Iterator[OwnRow]:
    """Each model, with chains in one batch and with sequential chains."""
    for chain_method in ("vectorized", "sequential"):
        # The first model is fast. With longer chains, the fixed costs of a run are negligible.
        yield _row(logistic_regression, 4, chain_method)
        yield _row(lambda: network(5), 1, chain_method)
    for chains in MANY_CHAINS:
        yield _row(logistic_regression, 16 / chains, "vectorized", chains)


def _row(
    make: Callable[[], Stated], times: float, chain_method: Any, chains: int = CHAINS
) -> OwnRow:
    def measured(options: argparse.Namespace) -> dict[str, Any]:
        stated, draws = make(), max(_FEWEST_DRAWS, round(times * options.draws))
        samplers = {
            OURS: ours(stated, draws, chain_method, chains),
            NUMPYRO: by_numpyro(stated, draws, chain_method, chains),
        }
        for sample in samplers.values():
            sample(0)
        runs: dict[str, list[Any]] = {name: [] for name in samplers}
        for seed in range(1, min(options.runs, _MAX_RUN_CHAINS // chains) + 1):
            # The two samplers alternate in going first.
            for name in sorted(samplers, reverse=seed % 2 == 0):
                runs[name].append(_run(stated, samplers[name], seed)._asdict())
        return {"name": name, "table": TABLE, "columns": {}, "notes": [], "runs": runs} | {
            "draws": draws,
            "chains": chains,
        }

    many = "" if chains == CHAINS else f", {chains} chains"
    name = f"{make().name}, {chain_method}{many}"
    return OwnRow(f"{TABLE}; {name}", TABLE, measured)


def ours(stated: Stated, draws: int, chain_method: Any, chains: int) -> Sampler:
    """`bayes.infer`, with its default diagnostics."""
    method = bayes.NUTS(num_samples=draws, num_warmup=draws, chains=chains)
    problem = bayes.Problem(stated.target)

    @jax.jit
    def unflatten(vectors: Any) -> Any:
        return jax.vmap(jax.vmap(problem.unknowns))(vectors)

    def sample(seed: int) -> Drawn:
        key = jax.random.key(seed)
        posterior = bayes.infer(
            stated.target, method, key=key, progress=False, chain_method=chain_method
        )
        records = posterior.records
        unknowns = jax.block_until_ready(unflatten(jnp.asarray(records["draw"])))
        arrays = tuple(jax.tree_util.tree_leaves(unknowns))
        return Drawn(arrays, records["num_gradients"], records["is_divergent"])

    return sample


def by_numpyro(stated: Stated, draws: int, chain_method: str, chains: int) -> Sampler:
    """NumPyro's `MCMC` inside one `jax.jit`. Otherwise it would compile in each run."""
    model, data = in_numpyro.MODELS[stated.name], stated.data

    @jax.jit
    def run(key: Any) -> Any:
        sampler = MCMC(
            NUTS(model),
            num_warmup=draws,
            num_samples=draws,
            num_chains=chains,
            chain_method=chain_method,
            progress_bar=False,
        )
        sampler.run(key, *data, extra_fields=("num_steps", "diverging"))
        extra = sampler.get_extra_fields(group_by_chain=True)
        return sampler.get_samples(group_by_chain=True), extra

    def sample(seed: int) -> Drawn:
        found, extra = jax.block_until_ready(run(jax.random.key(seed)))
        arrays = tuple(found[site] for site in stated.sites)
        return Drawn(arrays, extra["num_steps"], extra["diverging"])

    return sample


def _run(stated: Stated, sample: Sampler, seed: int) -> Run:
    """Draws samples, and computes their effective sample size."""
    start_s = time.perf_counter()
    drawn = sample(seed)
    seconds = time.perf_counter() - start_s
    x = networks.normal(INPUTS, stated.data[0].shape[1], seed=3)
    predict = jax.vmap(jax.vmap(lambda arrays: stated.predict(arrays, x)))
    predictions = np.asarray(jax.jit(predict)(drawn.arrays))
    found = bayes.convergence(predictions)
    return Run(
        seconds,
        float(found.ess_bulk.min()),
        float(found.r_hat.max()),
        float(np.mean(drawn.gradients)),
        int(np.sum(drawn.is_divergent)),
    )


def per_second(runs: Sequence[Mapping[str, Any]]) -> list[float]:
    """Effective samples a second for each seed."""
    return [run["ess"] / run["seconds"] for run in runs]


def ratio(row: Mapping[str, Any]) -> float:
    """The mean over the seeds of our effective samples a second, divided by NumPyro's mean."""
    means = {name: statistics.mean(per_second(runs)) for name, runs in row["runs"].items()}
    return means[OURS] / means[NUMPYRO]


def cells(rows: Sequence[Mapping[str, Any]]) -> table.Rows:
    """The cells of the table, starting with the headings."""
    lines = [
        [
            "",
            "",
            "ESS a second: mean (least to most)",
            "draws",
            "seconds",
            "ESS",
            "R-hat",
            "divergences",
            "gradients a draw",
            "us a gradient",
        ]
    ]
    for row in rows:
        for name, runs in row["runs"].items():
            rates = per_second(runs)

            def mean(of: str, runs: Any = runs) -> float:
                return statistics.mean(run[of] for run in runs)

            steps = 2 * row.get("chains", CHAINS) * row["draws"]
            drawn = [run["gradients"] * steps for run in runs]
            each = [1e6 * run["seconds"] / total for run, total in zip(runs, drawn, strict=True)]
            lines.append(
                [
                    row["name"],
                    name,
                    f"{statistics.mean(rates):.1f} ({min(rates):.1f} to {max(rates):.1f})",
                    str(row["draws"]),
                    f"{mean('seconds'):.2f}",
                    f"{mean('ess'):.0f}",
                    f"{max(run['r_hat'] for run in runs):.3f}",
                    f"{mean('divergences'):.1f}",
                    f"{mean('gradients'):.1f}",
                    f"{statistics.mean(each):.2f}",
                ]
            )
    return lines
