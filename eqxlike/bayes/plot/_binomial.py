"""Quantiles of the binomial distribution, between which counts of calibrated things lie."""

import numpy as np


def binomial_quantile(probability: float, num_trials: int, chances: np.ndarray) -> np.ndarray:
    """The least count that at least this probability lies at or below, for each of the chances.

    **Arguments:**

    - `probability`: between 0 and 1.
    - `num_trials`: how often.
    - `chances`: of each trial, between 0 and 1, shape `(K,)`.

    **Returns:** shape `(K,)`.
    """
    counts = np.arange(num_trials + 1)
    log_factorials = np.concatenate([[0], np.cumsum(np.log(np.arange(1, num_trials + 1)))])
    ways = log_factorials[-1] - log_factorials - log_factorials[::-1]
    # Of a chance of 0 or 1 the log is kept finite, so that 0 times it is 0.
    log_chances = np.log(np.maximum(chances, 1e-300))[:, None]
    log_others = np.log(np.maximum(1 - chances, 1e-300))[:, None]
    masses = np.exp(ways + counts * log_chances + counts[::-1] * log_others)
    return np.sum(np.cumsum(masses, axis=1) < probability, axis=1)
