"""Leave-one-out cross-validation without refitting. `N` is the number of examples."""

import math
import warnings
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Float

_FEWEST_DRAWS = 100
# With fewer distinct draws than this, there is a warning. An ensemble has fewer. Markov chains have
# more, although they repeat a draw when they reject a step.
_FEWEST_DIFFERENT = 50


class LeaveOneOut(NamedTuple):
    """The estimate of `psis_loo`, in nats.

    - `elpd`: expected log pointwise predictive density, summed over the examples. Among models of
      the same data, a higher value is better.
    - `standard_error`: standard error of `elpd`.
    - `p_loo`: effective number of parameters.
    - `pointwise`: contribution of each example to `elpd`, shape `(N,)`. The difference between two
      models has the standard error `sqrt(N) * std(pointwise_1 - pointwise_2, ddof=1)`.
    - `pareto_k`: estimated Pareto shape of each example's largest importance weights, an array of
      shape `(N,)`.
    """

    elpd: float
    standard_error: float
    p_loo: float
    pointwise: np.ndarray
    pareto_k: np.ndarray


def psis_loo(log_likelihoods: Float[Array, "S N"] | Float[Array, "chains draws N"]) -> LeaveOneOut:
    """Pareto-smoothed importance sampling leave-one-out cross-validation, to compare models.

    The estimate tells how well a model predicts an example after a fit to all other examples. The
    estimate needs only draws from the posterior given all examples. Draws have the weights `1 /
    p(y_n | draw)`, with the tail smoothed by a Pareto distribution (Vehtari, Gelman and Gabry,
    2017, "Practical Bayesian model evaluation using leave-one-out cross-validation and WAIC";
    ArviZ's implementation).

    If the Pareto k of an example is large, a few draws dominate its weights, and there is a
    warning. The limit is `min(1 - 1 / log10(S), 0.7)` for `S` draws (Vehtari, Simpson, Gelman, Yao
    and Gabry, 2024, "Pareto Smoothed Importance Sampling").

    The weights are correct for draws from the posterior, such as draws of Markov chains. For draws
    from an approximation, such as `bayes.Laplace` or `bayes.MeanField`, the weights evaluate the
    approximation instead of the posterior. Pareto k does not show the difference. The estimate is
    too high if the approximation is too narrow. A correct estimate needs the weights `p(draw, data)
    / (q(draw) p(y_n | draw))`, with the density `q` of the approximation (Magnusson, Andersen,
    Jonasson and Vehtari, 2019, "Bayesian leave-one-out cross-validation for large data"). There is
    no estimate for `bayes.MAP` or for ensembles: compare `bayes.metrics.nll` on held-out examples.

    **Arguments:**

    - `log_likelihoods`: log likelihood of each example under each draw, in nats, shape `(S, N)` for
      independent draws, or `(chains, draws, N)` for Markov chains. The autocorrelation of chains is
      taken into account. For a prediction of the training examples, pass
      `prediction.component_log_prob(y)`.

    **Returns:** a `LeaveOneOut` of NumPy arrays.

    **Raises:** `ImportError` if ArviZ is not installed. `ValueError` if `log_likelihoods` has
    another number of axes, a value that is not finite, fewer than 2 examples or fewer than 100
    draws, or if all draws are the same.

    **Warns:** if Pareto k is large or fewer than 50 draws are distinct, so that `elpd` is
    unreliable.

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
        # The mean effective sample size of the likelihoods of an example, divided by the number of
        # draws.
        likelihoods = np.exp(values - values.max(axis=(0, 1)))
        effective = statistics.ess(likelihoods, chain_axis=0, draw_axis=1, method="mean")
        efficiency = float(np.mean(effective)) / (chains * draws)
    pointwise, pareto_k, p_loo = np.transpose(
        [_of_example(statistics, each, efficiency) for each in np.moveaxis(values, -1, 0)]
    )
    if text := _warning(num_different, pareto_k, chains * draws):
        warnings.warn(f"psis_loo: {text}", stacklevel=2)
    return LeaveOneOut(
        elpd=float(np.sum(pointwise)),
        standard_error=float(math.sqrt(num_examples) * np.std(pointwise, ddof=1)),
        p_loo=float(np.sum(p_loo)),
        pointwise=pointwise,
        pareto_k=pareto_k,
    )


def _checked(log_likelihoods: Any) -> np.ndarray:
    """Log likelihoods of shape `(chains, draws, N)`; independent draws are one chain."""
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
            f"psis_loo expects at least {_FEWEST_DRAWS} draws, to fit the tail of their weights; "
            f"got {chains * draws}."
        )
    if not np.isfinite(values).all():
        raise ValueError(
            f"psis_loo: {np.sum(~np.isfinite(values))} of {values.size} log likelihoods are not "
            "finite."
        )
    return values


def _num_different(values: np.ndarray) -> int:
    """The number of distinct draws. Raises `ValueError` if all are the same."""
    rows = values.reshape(-1, values.shape[-1])
    found = len({row.tobytes() for row in rows})
    if found == 1:
        raise ValueError(
            f"psis_loo: all {len(rows)} draws give each example the same log likelihood, as with "
            '`bayes.MAP` or `bayes.Laplace(predictive="probit")`. Use draws from a posterior, such '
            "as draws of `bayes.NUTS`, or compare `bayes.metrics.nll` on held-out examples."
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
    if np.ptp(values) == 0:  # all draws have the same weight
        return values[0, 0], -math.inf, 0.0
    try:
        with np.errstate(all="ignore"):
            found = statistics.loo(values, chain_axis=0, draw_axis=1, r_eff=efficiency)
    except ValueError:  # ArviZ cannot fit a tail of equal weights
        found = (math.nan,) * 3
    if not np.isfinite(found).all():
        # The estimate without smoothing, with infinite Pareto k.
        size = math.log(values.size)
        elpd = size - float(np.logaddexp.reduce(-values, axis=None))
        return elpd, math.inf, float(np.logaddexp.reduce(values, axis=None)) - size - elpd
    elpd, pareto_k, p_loo = map(float, found)
    return elpd, pareto_k, p_loo


def _warning(num_different: int, pareto_k: np.ndarray, num_draws: int) -> str | None:
    """A warning if the estimate is unreliable."""
    if num_different < _FEWEST_DIFFERENT:
        return (
            f"only {num_different} of {num_draws} draws are distinct, as for an ensemble or for "
            "chains that hardly move. Such draws do not represent a posterior, so `elpd` is "
            "unreliable even if Pareto k is small. Use `bayes.NUTS`, or compare "
            "`bayes.metrics.nll` on held-out examples."
        )
    bound = min(1 - 1 / math.log10(num_draws), 0.7)
    is_bad = ~(pareto_k <= bound)  # NaN is bad too
    if not is_bad.any():
        return None
    worst = int(np.argmax(np.where(np.isnan(pareto_k), np.inf, pareto_k)))
    return (
        f"{is_bad.sum()} of {len(pareto_k)} examples have a Pareto k above {bound:.2f}; the worst "
        f"is example {worst}, {pareto_k[worst]:.2f}. A few draws dominate their importance "
        "weights, so `elpd` is unreliable. Use more draws, refit without each of those examples, "
        "or use K-fold cross-validation."
    )
