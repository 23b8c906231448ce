"""NumPyro, which `bayes` takes its distributions, constraints and bijections from."""

import importlib
from typing import Any

import jax.numpy as jnp
import jax.tree_util as jtu
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


def with_leading_axes(distribution: Any, leading: tuple[int, ...]) -> Any:
    """A distribution from under `jax.vmap`, which does not tell it that it became many.

    NumPyro's own `promote_batch_shape` does not reach the distributions that one is made of, as the
    gamma distribution in a negative binomial, and those drew one number for all.

    **Arguments:**

    - `leading`: the axes that all of its arrays have in front.
    """

    def is_part(node: Any) -> bool:
        return node is not distribution and is_distribution(node)

    def of_part(node: Any) -> Any:
        if not is_part(node):
            return node
        # Axes that it is broadcast along come after those in front.
        num_added = max(0, len(distribution.batch_shape) - len(node.batch_shape))
        axes = range(len(leading), len(leading) + num_added)
        node = jtu.tree_map(lambda leaf: jnp.expand_dims(leaf, axes), node)
        return with_leading_axes(node, (*leading, *(1,) * num_added))

    many = jtu.tree_map(of_part, distribution, is_leaf=is_part)
    many._batch_shape = leading + distribution.batch_shape
    return many


def check_distribution(value: Any, name: str) -> None:
    """Raises `TypeError` unless `value`, the argument `name`, is a distribution of NumPyro."""
    if not is_distribution(value):
        hint = f": call it, `{value.__name__}(...)`" if isinstance(value, type) else ""
        raise TypeError(
            f"{name} must be a distribution of `numpyro.distributions`, got {value!r}{hint}."
        )
