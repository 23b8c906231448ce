"""NumPyro, which `bayes` takes its distributions, constraints and bijections from."""

import importlib
from typing import Any

from jaxtyping import Array, Float

from ._library_rules import as_libraries_compute


def distributions() -> Any:
    """The module `numpyro.distributions`.

    **Raises:** `ImportError` that says how to install it.
    """
    try:
        return importlib.import_module("numpyro.distributions")
    except ModuleNotFoundError as error:
        raise ImportError(
            "Priors, likelihoods and inference take their distributions from NumPyro: "
            "`pip install 'eqxlike[bayes]'`."
        ) from error


def summed_log_prob(distribution: Any, value: Array) -> Float[Array, ""]:
    """The log density of all numbers of `value` together."""
    with as_libraries_compute():
        return distribution.log_prob(value).sum()


def is_distribution(value: Any) -> bool:
    return isinstance(value, distributions().Distribution)


def check_distribution(value: Any, name: str) -> None:
    """Raises `TypeError` unless `value`, the argument `name`, is a distribution of NumPyro."""
    if not is_distribution(value):
        hint = f": call it, `{value.__name__}(...)`" if isinstance(value, type) else ""
        raise TypeError(
            f"{name} must be a distribution of `numpyro.distributions`, got {value!r}{hint}."
        )
