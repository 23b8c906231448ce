"""The priors that Bayesian layers have themselves."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, PyTree

from .._numpyro import distributions
from ._prior import Prior


class PriorOfLayers(Prior):
    """Normal priors around zero, as wide as the layers of `nn` say whose weights are random.

    - `scales`: the standard deviations of their arrays, by path.
    """

    scales: dict[str, Array]

    def of_leaf(self, path: str, leaf: jax.ShapeDtypeStruct, hyper: Mapping[str, Any]) -> Any:
        if path not in self.scales:
            raise ValueError(
                f"Posterior: {path} is in no layer with random weights, and so has no prior yet. "
                'Give one for all parameters, such as `bayes.prior_by_path({"layers[0].*": ..., '
                '"**": ...})`, or freeze it.'
            )
        scale = self.scales[path].astype(leaf.dtype)
        return distributions().Normal(jnp.zeros((), leaf.dtype), scale)


def prior_of_layers(scales: PyTree) -> PriorOfLayers:
    """**Arguments:**

    - `scales`: what `nn` says are the prior standard deviations of a model.
    """
    leaves = jtu.tree_leaves_with_path(scales)
    return PriorOfLayers({jtu.keystr(path).removeprefix("."): leaf for path, leaf in leaves})
