"""Simulation-based calibration: whether a method finds the posterior of data whose truth is known.

`R` is the number of simulations, `d` that of unknowns.
"""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.random as jr
import numpy as np
from jaxtyping import Int, PRNGKeyArray

from .._numbers import whole_number
from .._pytree import tree_at
from .._transforms import filter_jit
from ._inference._infer import InferenceWarning, inferred
from ._inference._method import Method, Problem
from ._posterior import Posterior


def simulation_ranks(
    target: Posterior,
    method: Method,
    *,
    key: PRNGKeyArray,
    num_simulations: int = 100,
    num_draws: int = 99,
) -> Int[np.ndarray, "R d"]:
    """The ranks of true unknowns among draws from the posteriors of data simulated with them.

    If a method is exact, each rank is uniform on 0 to `num_draws`. A posterior that is too narrow
    piles them up at both ends, one that is too wide in the middle, a biased one at one end (Talts,
    Betancourt, Simpson, Vehtari and Gelman, 2018, "Validating Bayesian Inference Algorithms with
    Simulation-Based Calibration"). `bayes.plot.sbc_ranks` draws them.

    **Arguments:**

    - `target`: the model, whose own targets do not matter: they are simulated for its inputs.
    - `method`: what is tried.
    - `key`: for truths, data and draws.
    - `num_simulations`: how many data sets, R.
    - `num_draws`: from each posterior. Draws of chains should be nearly independent: let the
      method keep many more than this.

    **Returns:** the rank of each unknown, in linked space, in each simulation, shape `(R, d)`.

    **Raises:** what `bayes.infer` raises, and `ValueError` for a number that is not positive.

    **Warns:** `bayes.InferenceWarning`, once for all runs in which something is poor.

    >>> import jax, jax.numpy as jnp
    >>> from eqxlike import bayes, nn
    >>> x = jnp.linspace(-1.0, 1.0, 5)[:, None]
    >>> model = nn.Linear(1, "scalar", key=jax.random.key(0))
    >>> target = bayes.Posterior(model, bayes.normal(), bayes.Gaussian(0.5), (x, x[:, 0]))
    >>> method = bayes.Laplace(steps=300, learning_rate=0.05)
    >>> ranks = bayes.simulation_ranks(
    ...     target, method, key=jax.random.key(1), num_simulations=2, num_draws=9
    ... )
    >>> ranks.shape
    (2, 2)
    """
    num_simulations = whole_number(num_simulations, "num_simulations")
    num_draws = whole_number(num_draws, "num_draws")
    doubts: list[list[str]] = [[] for _ in range(num_simulations)]
    ranks = [
        _ranks(target, method, each, num_draws, told.append)
        for each, told in zip(jr.split(key, num_simulations), doubts, strict=True)
    ]
    _warn(method, doubts)
    return np.stack(ranks)


def _ranks(
    target: Posterior,
    method: Method,
    key: PRNGKeyArray,
    num_draws: int,
    on_doubt: Callable[[str], None],
) -> np.ndarray:
    simulation_key, infer_key, draw_key = jr.split(key, 3)
    truth, y = _simulated(target, simulation_key)
    simulated = tree_at(lambda target: target.data[1], target, y)
    posterior = inferred(simulated, method, on_doubt, key=infer_key)
    samples = posterior.samples(num_draws, key=draw_key)
    draws = _linked(posterior.problem, samples)
    return np.sum(np.asarray(draws) < np.asarray(truth)[None], axis=0)


def _warn(method: Method, doubts: list[list[str]]) -> None:
    poor = [index for index, texts in enumerate(doubts) if texts]
    if poor:
        warnings.warn(
            f"simulation_ranks: {len(poor)} of {len(doubts)} runs of {type(method).__name__} are "
            f"poor. The first, run {poor[0]}: {' '.join(doubts[poor[0]])}",
            InferenceWarning,
            stacklevel=3,
        )


@filter_jit
def _simulated(target: Posterior, key: PRNGKeyArray) -> tuple[Any, Any]:
    unknowns_key, key = jr.split(key)
    unknowns = target.sample_prior(key=unknowns_key)
    return Problem(target).flatten(target.unconstrain(unknowns)), target.simulate(unknowns, key=key)


@filter_jit
def _linked(problem: Problem, samples: Any) -> jax.Array:
    return jax.vmap(lambda each: problem.flatten(problem.target.unconstrain(each)))(samples)
