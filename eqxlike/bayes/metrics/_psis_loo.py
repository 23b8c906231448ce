"""Leave-one-out cross-validation without fitting again. `N` is the number of examples."""

import math
import warnings
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Float

_FEWEST_DRAWS = 100
# Chains repeat draws where they refuse a step; the members of an ensemble are fewer.
_FEWEST_DIFFERENT = 50


class LeaveOneOut(NamedTuple):
    """The estimate of `psis_loo`, in nats.

    - `elpd`: the expected log pointwise predictive density, summed over the examples; of two models
      of the same data, the greater is better.
    - `standard_error`: of `elpd`.
    - `p_loo`: the effective number of parameters.
    - `pointwise`: the part of each example in `elpd`, shape `(N,)`. The difference of two models
      has the standard error `sqrt(N) * std(pointwise_1 - pointwise_2, ddof=1)`.
    - `pareto_k`: the shape of the tail of each example's importance weights, shape `(N,)`.
    """

    elpd: float
    standard_error: float
    p_loo: float
    pointwise: np.ndarray
    pareto_k: np.ndarray


def psis_loo(log_likelihoods: Float[Array, "S N"] | Float[Array, "chains draws N"]) -> LeaveOneOut:
    """How well a model predicts each example from all others, to choose between models.

    One posterior serves for all examples: its draws are weighted by `1 / p(y_n | draw)`, and the
    tail of the weights is smoothed by a Pareto distribution (PSIS). Vehtari, Gelman and Gabry
    (2017), "Practical Bayesian model evaluation using leave-one-out cross-validation and WAIC", as
    ArviZ computes it.

    Where an example's Pareto k is large, its weights hang on a few draws, and a warning says so.
    The bound is `min(1 - 1 / log10(S), 0.7)`, of Vehtari, Simpson, Gelman, Yao and Gabry (2024),
    "Pareto Smoothed Importance Sampling".

    The weights hold for draws from the posterior, as Markov chains have them. Draws from an
    approximation, such as `bayes.Laplace` or `bayes.MeanField`, are weighted as if it were the
    posterior, and no Pareto k says how far off it is: the estimate judges the approximation, and
    where that is too narrow it is too high. It would need the weights
    `p(draw, data) / (q(draw) p(y_n | draw))`, with the density `q` of the approximation (Magnusson,
    Andersen, Jonasson and Vehtari, 2019, "Bayesian leave-one-out cross-validation for large data").
    Of a point, `bayes.MAP`, or of a few of them, `bayes.DeepEnsemble`, there is no estimate: hold
    examples out, and compare `bayes.metrics.nll`.

    **Arguments:**

    - `log_likelihoods`: the log likelihood of each example under each draw, in nats; independent
      draws with shape `(S, N)`, or those of Markov chains with shape `(chains, draws, N)`, whose
      autocorrelation is then taken into account. A prediction of the examples that the posterior
      was found from has them: `prediction.component_log_prob(y)`.

    **Returns:** a `LeaveOneOut`, as NumPy holds it.

    **Raises:** `ImportError` if ArviZ is not installed; `ValueError` for another number of axes,
    numbers that are not finite, fewer than 2 examples, fewer than 100 draws, or draws that are all
    alike.

    **Warns:** that `elpd` may be far off, where Pareto k is large, or where fewer than 50 draws are
    different.

    >>> import numpy as np
    >>> means = np.random.default_rng(0).normal(0, 0.1, (400, 1))  # draws from a posterior
    >>> y = np.linspace(-2, 2, 100)
    >>> found = psis_loo(-((y - means) ** 2) / 2 - np.log(2 * np.pi) / 2)
    >>> round(found.elpd), round(found.p_loo), found.pareto_k.shape
    (-161, 1, (100,))
    """
    values = _checked(log_likelihoods)
    statistics = _array_statistics()
    num_different = _num_different(values)
    chains, draws, num_examples = values.shape
    efficiency = 1.0
    if np.ndim(log_likelihoods) == 3:
        # Effective draws of the likelihoods over draws, the mean over the examples.
        likelihoods = np.exp(values - values.max(axis=(0, 1)))
        effective = statistics.ess(likelihoods, chain_axis=0, draw_axis=1, method="mean")
        efficiency = float(np.mean(effective)) / (chains * draws)
    pointwise, pareto_k, p_loo = np.transpose(
        [_of_example(statistics, each, efficiency) for each in np.moveaxis(values, -1, 0)]
    )
    if doubt := _doubt(num_different, pareto_k, chains * draws):
        warnings.warn(f"psis_loo: {doubt}", stacklevel=2)
    return LeaveOneOut(
        elpd=float(np.sum(pointwise)),
        standard_error=float(math.sqrt(num_examples) * np.std(pointwise, ddof=1)),
        p_loo=float(np.sum(p_loo)),
        pointwise=pointwise,
        pareto_k=pareto_k,
    )


def _checked(log_likelihoods: Any) -> np.ndarray:
    """With shape `(chains, draws, N)`: independent draws are one chain."""
    values = np.asarray(log_likelihoods, np.float64)
    if values.ndim not in (2, 3):
        raise ValueError(
            "psis_loo expects log likelihoods of shape (S, N) or (chains, draws, N), got shape "
            f"{values.shape}."
        )
    values = values[None] if values.ndim == 2 else values
    chains, draws, num_examples = values.shape
    if num_examples < 2:
        raise ValueError(f"psis_loo expects at least 2 examples, got {num_examples}.")
    if chains * draws < _FEWEST_DRAWS:
        raise ValueError(
            f"psis_loo expects at least {_FEWEST_DRAWS} draws, got {chains * draws}: the tail of "
            "fewer says nothing."
        )
    if not np.isfinite(values).all():
        raise ValueError(
            f"psis_loo: {np.sum(~np.isfinite(values))} of {values.size} log likelihoods are not "
            "finite."
        )
    return values


def _num_different(values: np.ndarray) -> int:
    """How many draws are different.

    **Raises:** `ValueError` if they are all alike.
    """
    rows = values.reshape(-1, values.shape[-1])
    found = len({row.tobytes() for row in rows})
    if found == 1:
        raise ValueError(
            f"psis_loo: all {len(rows)} draws give each example the same log likelihood, as those "
            'of `bayes.MAP` or of `bayes.Laplace(predictive="probit")` do: without draws from a '
            "posterior nothing says what leaving an example out would change. Take draws, such as "
            "those of `bayes.NUTS`, or hold examples out and compare `bayes.metrics.nll`."
        )
    return found


def _array_statistics() -> Any:
    try:
        from arviz_stats.base.array import array_stats
    except ImportError as error:
        raise ImportError("psis_loo needs ArviZ: `pip install 'eqxlike[arviz]'`.") from error
    return array_stats


def _of_example(
    statistics: Any, values: np.ndarray, efficiency: float
) -> tuple[float, float, float]:
    """`(elpd, Pareto k, p_loo)` of one example, from values of shape `(chains, draws)`."""
    if np.ptp(values) == 0:  # all draws weigh the same
        return values[0, 0], -math.inf, 0.0
    try:
        with np.errstate(all="ignore"):
            found = statistics.loo(values, chain_axis=0, draw_axis=1, r_eff=efficiency)
    except ValueError:  # ArviZ fits no tail of equal weights
        found = (math.nan,) * 3
    if not np.isfinite(found).all():
        # Without smoothing, and with a tail of which nothing is known.
        size = math.log(values.size)
        elpd = size - float(np.logaddexp.reduce(-values, axis=None))
        return elpd, math.inf, float(np.logaddexp.reduce(values, axis=None)) - size - elpd
    elpd, pareto_k, p_loo = map(float, found)
    return elpd, pareto_k, p_loo


def _doubt(num_different: int, pareto_k: np.ndarray, num_draws: int) -> str | None:
    """Why the estimate may be far off, in words."""
    if num_different < _FEWEST_DIFFERENT:
        return (
            f"of {num_draws} draws only {num_different} are different, as of an ensemble or of "
            "chains that hardly move: they are not draws from a posterior, and `elpd` may be far "
            "off, whatever Pareto k is. Take draws, such as those of `bayes.NUTS`, or hold "
            "examples out and compare `bayes.metrics.nll`."
        )
    bound = min(1 - 1 / math.log10(num_draws), 0.7)
    is_bad = ~(pareto_k <= bound)  # NaN is bad too
    if not is_bad.any():
        return None
    worst = int(np.argmax(np.where(np.isnan(pareto_k), np.inf, pareto_k)))
    return (
        f"{is_bad.sum()} of {len(pareto_k)} examples have a Pareto k above {bound:.2f}; the worst "
        f"is example {worst}, {pareto_k[worst]:.2f}. Their importance weights hang on a few draws, "
        "and `elpd` may be far off. Take more draws, leave those examples out and fit again, or "
        "use K-fold cross-validation."
    )
