"""Priors around zero whose width may itself be unknown."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..._numbers import check_scale, positive_number
from .._numpyro import distributions, is_distribution
from .._support import check_positive
from ._prior import Leaves, Prior


class NormalPrior(Prior):
    """What `bayes.normal` returns."""

    loc: float
    scale: Any

    def __check_init__(self):
        if is_distribution(self.scale):
            check_positive(self.scale, "normal: scale")
        else:
            check_scale(self.scale, "normal: scale")

    def hyperpriors(self, leaves: Leaves) -> dict[str, Any]:
        return {"scale": self.scale} if is_distribution(self.scale) else {}

    def of_leaf(self, path: str, leaf: jax.ShapeDtypeStruct, hyper: Mapping[str, Any]) -> Any:
        scale = hyper.get("scale", self.scale)
        loc, scale = (jnp.asarray(each, leaf.dtype) for each in (self.loc, scale))
        return distributions().Normal(loc, scale)


def normal(loc: float = 0.0, scale: Any = 1.0) -> NormalPrior:
    """Independent normal priors.

    **Arguments:**

    - `loc`: the mean of each parameter.
    - `scale`: its standard deviation; or a distribution of NumPyro over positive numbers: then all
      parameters share one scale, which is an unknown too.

    >>> import numpyro.distributions as dist
    >>> hierarchical = normal(0.0, dist.HalfCauchy(1.0))
    """
    return NormalPrior(loc, scale)


class HorseshoePrior(Prior):
    """What `bayes.horseshoe` returns."""

    scale: float

    def __check_init__(self):
        positive_number(self.scale, "horseshoe: scale")

    def hyperpriors(self, leaves: Leaves) -> dict[str, Any]:
        half_cauchy = distributions().HalfCauchy
        local = {
            path: half_cauchy(jnp.ones((), leaf.dtype)).expand(leaf.shape)
            for path, leaf in leaves.items()
        }
        return {"shrinkage": half_cauchy(self.scale), "local": local}

    def of_leaf(self, path: str, leaf: jax.ShapeDtypeStruct, hyper: Mapping[str, Any]) -> Any:
        scale = hyper["shrinkage"].astype(leaf.dtype) * hyper["local"][path]
        return distributions().Normal(jnp.zeros((), leaf.dtype), scale)


def horseshoe(scale: float = 1.0) -> HorseshoePrior:
    """The horseshoe: most parameters near zero, and some anywhere.

    Each is `Normal(0, shrinkage * local)`, with `shrinkage ~ HalfCauchy(scale)` shared by all and
    `local ~ HalfCauchy(1)` for each; all of them are unknowns (Carvalho, Polson and Scott, 2010,
    "The horseshoe estimator for sparse signals").

    **Arguments:**

    - `scale`: the smaller, the more parameters are near zero.
    """
    return HorseshoePrior(scale)
