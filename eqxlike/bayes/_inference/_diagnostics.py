"""Whether chains found the posterior: how far they agree, and how many independent draws they hold.

Vehtari, Gelman, Simpson, Carpenter and Buerkner (2021), "Rank-Normalization, Folding, and
Localization: An Improved R-hat for Assessing Convergence of MCMC". Chains have `c` members and `n`
draws each.
"""

import concurrent.futures
import functools
import importlib
import math
import statistics
from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Float

from ... import Module

Draws = Float[np.ndarray, "c n *shape"]


class Convergence(Module):
    """How far chains agree on some numbers, each with an entry.

    - `r_hat`: the spread of all chains over that within one, 1 where they agree; above 1.01 they
      may not have met.
    - `ess_bulk`, `ess_tail`: effective sample sizes, for means and for 5% and 95% quantiles.
    """

    r_hat: Float[np.ndarray, "*shape"]
    ess_bulk: Float[np.ndarray, "*shape"]
    ess_tail: Float[np.ndarray, "*shape"]


# Blocks stay in caches: 4,096 chains of 25 draws of 20 numbers take 0.8 s, and 1.3 s at once.
_BLOCK_SIZE = 2**16


def convergence(draws: Draws) -> Convergence:
    """Diagnostics of each number that chains drew."""
    draws = np.asarray(draws)
    columns = draws.reshape(*draws.shape[:2], math.prod(draws.shape[2:]))
    step = max(1, _BLOCK_SIZE // max(1, math.prod(draws.shape[:2])))

    def of_block(first: int) -> tuple[np.ndarray, ...]:
        return _convergence(columns[..., first : first + step].astype(np.float64, order="C"))

    # NumPy sorts and transforms without the lock of the interpreter.
    with concurrent.futures.ThreadPoolExecutor() as pool:
        blocks = pool.map(of_block, range(0, max(1, columns.shape[-1]), step))
        parts = [np.concatenate(each) for each in zip(*blocks, strict=True)]
    return Convergence(*(each.reshape(draws.shape[2:]) for each in parts))


def _convergence(draws: Float[np.ndarray, "c n b"]) -> tuple[np.ndarray, ...]:
    # Each chain as two: a chain that drifts disagrees with itself.
    half = draws.shape[1] // 2
    halves = np.concatenate([draws[:, :half], draws[:, draws.shape[1] - half :]])
    ranked = _rank_normalised(halves)
    folded = _rank_normalised(np.abs(halves - np.median(halves, axis=(0, 1))))
    tails = [
        (halves <= end).astype(np.float64) for end in np.quantile(draws, [0.05, 0.95], axis=(0, 1))
    ]
    library: Any = importlib.import_module("numpyro.diagnostics")
    with np.errstate(divide="ignore", invalid="ignore"):
        return (
            np.maximum(*map(library.gelman_rubin, (ranked, folded))),
            library.effective_sample_size(ranked),
            np.minimum(*map(library.effective_sample_size, tails)),
        )


# NumPy sorts 20 to 25 times faster than XLA on a CPU: 20 x 15,360 numbers in 8 and 190 ms.
def _rank_normalised(draws: Draws) -> Draws:
    """The normal quantiles of the ranks among all draws of a number; NaN where one of them is."""
    columns = draws.reshape(draws.shape[0] * draws.shape[1], -1)
    size = len(columns)
    normal, ranked = _normal_quantiles(size), np.empty_like(columns)
    for index, column in enumerate(columns.T):
        order = np.argsort(column)
        ordered = column[order]
        # Draws that are the same stand from `start` to `end`, and share the mean of their ranks.
        start = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
        end = np.append(start[1:], size)
        ranked[order, index] = np.repeat(normal[start + end], end - start)
        if np.isnan(ordered[-1]):
            ranked[:, index] = np.nan
    return ranked.reshape(draws.shape)


# All numbers of a run have as many draws.
@functools.lru_cache(maxsize=2)
def _normal_quantiles(size: int) -> Float[np.ndarray, " n"]:
    """The normal quantile of each half rank, `(start + end + 1) / 2`, among `size` draws."""
    quantile = statistics.NormalDist().inv_cdf
    return np.array(
        [quantile((twice / 2 - 3 / 8) / (size + 1 / 4)) for twice in range(1, 2 * size + 1)]
    )


def energy_mixing(energies: Float[np.ndarray, "c n"]) -> Float[np.ndarray, " c"]:
    """E-BFMI of each chain: below 0.3 its momenta are too small for its energies.

    Betancourt (2016), "Diagnosing Suboptimal Cotangent Disintegrations in Hamiltonian Monte Carlo".
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.mean(np.diff(energies, axis=1) ** 2, axis=1) / np.var(energies, axis=1)


class PredictiveScores(Module):
    """Mean negative log predictive densities, in nats an example: lower is better.

    Each is of 512 examples at most, evenly spaced.

    - `posterior`: of the mixture of draws, on the training data.
    - `point`: of one network on the same data, such as the network at the mode; `None` if the
      method names no network.
    - `held_out_posterior`, `held_out_point`: the same on the `held_out` data of `infer`.
    - `held_out_error`: the standard error of `held_out_posterior`, if held-out examples are
      predicted like training examples.
    """

    posterior: float
    point: float | None = None
    held_out_posterior: float | None = None
    held_out_point: float | None = None
    held_out_error: float | None = None


class Diagnostics(Module):
    """How a run went. What a method does not have is `None`.

    - `losses`: `(c, n)`, of each step of an optimiser.
    - `outputs`: `Convergence` of what the networks return for some of the inputs, but for what is
      the same in all draws. Parameters of networks have many equal modes, since hidden units can be
      exchanged; outputs do not.
    - `others`: `Convergence` of the unknowns of prior and likelihood, before their link.
    - `log_density`: `Convergence` of the log density.
    - `divergences`: the number of draws of each chain whose trajectory diverged.
    - `acceptance`: the mean acceptance rate of each chain.
    - `energy`: E-BFMI of each chain.
    - `lost`: the number of draws of each chain that are not finite; with such, nothing is said of
      how far chains agree.
    - `broadening`: the factor by which gradient noise of minibatches widens the variance of draws,
      in the directions of most noise.
    - `pareto_k`: the shape of the tail of importance weights: above 0.7 a few of them decide.
    - `rise`: by how many nats, for each unknown, ten steps of L-BFGS raise the log
      density from where each run of an optimiser ended; for each example, where those are fewer
      than unknowns. Of a normal posterior a draw lies half a nat for each unknown below the mode:
      above 1 a run stopped well before it. Runs on batches of examples do not have it.
    - `choice`: what a method chose itself, in words.
    - `prior_change`: by how much the last tuning of a prior changed the log of a scale: mode and
      scales agree where it is at most 0.05.
    - `predictive`: `PredictiveScores`: how well the draws predict, and how well one network does,
      such as the network at the mode. `bayes.MAP`, ensembles, chains on batches of examples, and
      custom methods without a `point_estimate` name no network, and `bayes.Laplace` without a
      width has compared the draws on examples that it left out: these methods have scores only
      with `held_out=`.
    - `warnings`: what is poor, in words.
    """

    losses: np.ndarray | None = None
    outputs: Convergence | None = None
    others: Convergence | None = None
    log_density: Convergence | None = None
    divergences: np.ndarray | None = None
    acceptance: np.ndarray | None = None
    energy: np.ndarray | None = None
    lost: np.ndarray | None = None
    broadening: float | None = None
    pareto_k: float | None = None
    rise: np.ndarray | None = None
    choice: str | None = None
    prior_change: float | None = None
    predictive: PredictiveScores | None = None
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = []
        if self.losses is not None and self.losses.size:
            lines.append(f"loss: {self.losses[:, 0].mean():.4g} to {self.losses[:, -1].mean():.4g}")
        for name in ("outputs", "others", "log_density"):
            each = getattr(self, name)
            if each is not None:
                lines.append(
                    f"{name}: R-hat at most {np.max(each.r_hat):.3f}, ESS at least "
                    f"{np.min(each.ess_bulk):.0f} (bulk), {np.min(each.ess_tail):.0f} (tail)"
                )
        for name in ("divergences", "acceptance", "energy", "lost", "rise"):
            values = getattr(self, name)
            if values is not None:
                lines.append(f"{name}: " + ", ".join(f"{value:.3g}" for value in values))
        if self.broadening is not None:
            lines.append(f"variance widened by gradient noise: {self.broadening:.3g}")
        if self.pareto_k is not None:
            lines.append(f"Pareto k: {self.pareto_k:.2f}")
        if self.predictive is not None:
            nlls = (
                f"{name} {value:.3g}"
                for name, value in vars(self.predictive).items()
                if value is not None
            )
            lines.append("NLL: " + ", ".join(nlls))
        if self.choice is not None:
            lines.append(f"chosen: {self.choice}")
        return "\n".join(lines + [f"warning: {text}" for text in self.warnings])


def in_words(diagnostics: Diagnostics, remedy: str) -> Iterator[str]:
    """What is poor about a run, and what helps.

    **Arguments:**

    - `remedy`: what helps where draws predict worse than one network.
    """
    losses, rise = diagnostics.losses, diagnostics.rise
    if losses is not None and losses.size and not np.isfinite(losses[:, -1]).all():
        bad = losses[~np.isfinite(losses[:, -1]), -1]
        yield (
            f"the loss of {bad.size} of {len(losses)} runs ended at {bad[0]}: a smaller learning "
            "rate may help."
        )
    if rise is not None and np.any(rise > 1):
        yield (
            f"{int(np.count_nonzero(rise > 1))} of {rise.size} runs stopped before they came to a "
            "mode: from where they ended, ten steps of L-BFGS raise the log density "
            f"by up to {float(np.nanmax(rise)):.3g} nats for each unknown (or example, where those "
            "are fewer), and the posterior is about half a nat for each wide. More steps, a larger "
            "learning_rate, or optimiser=optax.lbfgs() help."
        )
    if diagnostics.prior_change is not None and not diagnostics.prior_change <= 0.05:
        yield (
            f"the last tuning changed a scale of the prior by {diagnostics.prior_change:.0%}, "
            "where 5% or less is good: mode and scales do not agree yet. More steps, or "
            "tune_prior=False, help."
        )
    if diagnostics.divergences is not None and diagnostics.divergences.any():
        yield (
            f"{int(diagnostics.divergences.sum())} trajectories diverged: draws may leave out a "
            "part of the posterior. A higher target_acceptance, or priors that keep scales away "
            "from zero, help."
        )
    yield from _of_convergence("what the networks return", diagnostics.outputs)
    yield from _of_convergence("the unknowns of prior and likelihood", diagnostics.others)
    if diagnostics.energy is not None and np.any(diagnostics.energy < 0.3):
        yield (
            f"E-BFMI is {float(np.min(diagnostics.energy)):.2f}, where 0.3 or more is good: the "
            "chains hardly move from one energy to another. A prior with lighter tails may help."
        )
    if diagnostics.lost is not None and diagnostics.lost.any():
        yield (
            f"{int(np.count_nonzero(diagnostics.lost))} of {diagnostics.lost.size} chains left for "
            "infinity: a smaller step_size helps. Predictions are NaN. A chain of `bayes.SGLD` may "
            "leave from a mode that overfits; `descent_steps=0` begins elsewhere."
        )
    if diagnostics.broadening is not None and diagnostics.broadening > 1.05:
        yield (
            "gradient noise of minibatches widens the variance of draws, in the directions of most "
            f"noise by a factor of about {diagnostics.broadening:.3g}: a smaller step_size or a "
            "larger batch_size helps."
        )
    if diagnostics.pareto_k is not None and not diagnostics.pareto_k <= 0.7:
        yield (
            f"the Pareto k of the importance weights is {diagnostics.pareto_k:.2f}, where 0.7 or "
            "less is good: a few draws have most of the weight, and the evidence is not to be "
            "relied on. The posterior is far from the approximation; `bayes.NUTS` needs none."
        )
    yield from _of_predictive(diagnostics.predictive, remedy)


# In nats an example: by how much one network may predict better, and training data be predicted.
_MAX_LOSS, _MAX_GAP = 0.05, 1.0


def _of_predictive(found: PredictiveScores | None, remedy: str) -> Iterator[str]:
    if found is None:
        return
    data, posterior, point = "the training data", found.posterior, found.point
    if found.held_out_posterior is not None:
        data, posterior, point = "held-out data", found.held_out_posterior, found.held_out_point
    else:
        remedy = f"Unless it overfits, of which `held_out=` tells: {remedy}"
    # Where both give an example no density, neither is worse.
    if point is not None and posterior - point > _MAX_LOSS:
        yield (
            f"draws predict {data} worse than one network does, that of the mode or mean: minus "
            f"the log density is {posterior:.3g} nats an example for them, and {point:.3g} for "
            f"it. {remedy}"
        )
    # By chance a few examples may be far worse.
    if posterior - found.posterior > _MAX_GAP + 3 * (found.held_out_error or 0.0):
        yield (
            f"held-out data are predicted far worse than the training data: minus the log density "
            f"is {posterior:.3g} nats an example, and {found.posterior:.3g} on the training data. "
            "The model overfits: a narrower prior, fewer unknowns or chains may help."
        )


def _of_convergence(name: str, found: Convergence | None) -> Iterator[str]:
    if found is None or not found.r_hat.size:
        return
    r_hat, ess = np.max(found.r_hat), min(np.min(found.ess_bulk), np.min(found.ess_tail))
    if not r_hat < 1.05:
        yield (
            f"the chains disagree on {name}: R-hat is {r_hat:.2f}, where 1.01 or less is good. "
            "Longer chains and a longer warm-up may help."
        )
    elif ess < 100:
        yield f"the draws of {name} count for no more than {ess:.0f} independent ones: draw more."
