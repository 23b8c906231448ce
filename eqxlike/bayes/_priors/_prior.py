"""What a prior is."""

import abc
from collections.abc import Mapping
from typing import Any

import jax

from ..._module import Module
from .._numpyro import check_distribution, distributions

Leaves = Mapping[str, jax.ShapeDtypeStruct]
"""The unknown arrays of a model by their paths, such as `layers[0].weight`."""

Hyperpriors = Mapping[str, Any]
"""Distributions by name, or further such mappings."""


class Prior(Module):
    """What is believed of the parameters of a model before it sees data.

    A prior of your own has one method to write, `of_leaf`.
    """

    def hyperpriors(self, leaves: Leaves) -> Hyperpriors:
        """The distributions of what the prior itself does not know, by name.

        **Arguments:**

        - `leaves`: the parameters that the prior is for.
        """
        return {}

    @abc.abstractmethod
    def of_leaf(self, path: str, leaf: jax.ShapeDtypeStruct, hyper: Mapping[str, Any]) -> Any:
        """The distribution of one parameter.

        **Arguments:**

        - `path`: where it is in the model.
        - `leaf`: its shape and dtype.
        - `hyper`: the values of `hyperpriors`, in standard space.

        **Returns:** a distribution of NumPyro, whose draws have the shape of the parameter, or one
        that can be expanded to it.
        """


class IndependentPrior(Prior):
    """One distribution for each number among the parameters."""

    distribution: Any

    def __check_init__(self):
        check_distribution(self.distribution, "prior")

    def of_leaf(self, path: str, leaf: jax.ShapeDtypeStruct, hyper: Mapping[str, Any]) -> Any:
        return self.distribution


def as_prior(prior: Any) -> Prior:
    """`prior`, with a distribution of NumPyro standing for all parameters.

    **Raises:** `TypeError` if it is neither a prior nor a distribution.
    """
    if isinstance(prior, Prior):
        return prior
    if isinstance(prior, distributions().Distribution):
        return IndependentPrior(prior)
    raise TypeError(
        "prior must be a distribution of `numpyro.distributions` or a prior of eqxlike.bayes, such "
        f"as `bayes.normal(0.0, 1.0)`; got {prior!r}."
    )


def fitted(distribution: Any, path: str, leaf: jax.ShapeDtypeStruct) -> Any:
    """The distribution with draws of the shape of the parameter.

    **Raises:** `ValueError` if it cannot have that shape.
    """
    event_dim = len(distribution.event_shape)
    batch = leaf.shape[: len(leaf.shape) - event_dim]
    try:
        expanded = distribution.expand(batch)
    except (ValueError, TypeError):
        expanded = None
    if expanded is None or expanded.batch_shape + expanded.event_shape != leaf.shape:
        raise ValueError(
            f"The prior of {path} does not fit: the parameter has shape {leaf.shape}, and draws of "
            f"{type(distribution).__name__} have batch shape {distribution.batch_shape} and event "
            f"shape {distribution.event_shape}."
        )
    return expanded
