"""From a model to a Bayesian one."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxtyping import Array, Float, PyTree

from ..._pytree import tree_at
from .._bayesian import BayesianConv, BayesianLayer, BayesianLinear, Estimator, linear_or_conv
from .._common import check_instance
from .._linear import Linear
from ._freeze import unfreeze
from ._replace import replace_layers


def to_bayesian(
    model: PyTree,
    where: Callable[[Any], Any | Sequence[Any]] | None = None,
    *,
    prior_scale: float | Float[Array, ""] = 1.0,
    posterior_scale: float = 0.1,
    estimator: Estimator = "local",
) -> PyTree:
    """Gives the layers of a model a posterior around the weights that they have.

    Each `Linear` becomes a `BayesianLinear` and each `Conv` a `BayesianConv`, with the weights of
    the layer as posterior means: so in inference mode the result computes what the model did.
    `kl_divergence`, `sample_posterior` and `bayes.negative_elbo` take it from there.

    Outside inference mode a Bayesian layer needs a key. `Sequential`, `MLP` and
    `MultiheadAttention` pass the one that they are called with on to their layers; a model which
    does not is called with weights drawn: `sample_posterior(model, key)(x)`.

    **Arguments:**

    - `model`: a Module, or any pytree.
    - `where`: a function from the model to a node of it, or to a tuple or list of nodes, as in
      `tree_at`: the layers to turn, or subtrees in which all are. All of `model` if left out.
    - `prior_scale`: of every layer, relative to its fan-in: see `BayesianLinear`. An array is
      learnt, by each layer for itself: also by those that are stored stacked, as in `ScanStack`.
    - `posterior_scale`: the initial spread around the weights, in the same unit.
    - `estimator`: what a layer draws when it is called: `"local"`, its output; `"flipout"` or
      `"weights"`, its weights, for which see `BayesianLinear` and `with_perturbation`.

    **Returns:** the model with Bayesian layers in it. Subclasses of `Linear` and `Conv` that are
    called in their own way stay as they are, as do transposed convolutions.

    **Raises:** `ValueError` if there is no layer to turn, a scale is not positive or the estimator
    unknown; `TypeError` if a layer is not of a real floating dtype, or `model` is a class.

    !!! example

        >>> import eqxlike as eqx, jax, jax.numpy as jnp
        >>> from eqxlike import nn
        >>> model = nn.MLP(2, 1, width_size=8, depth=1, key=jax.random.key(0))
        >>> bayesian = nn.to_bayesian(model, lambda model: model.layers[-1])
        >>> [type(layer).__name__ for layer in bayesian.layers]
        ['Linear', 'BayesianLinear']
        >>> bool(jnp.allclose(nn.inference_mode(bayesian)(jnp.ones(2)), model(jnp.ones(2))))
        True
        >>> eqx.filter_jit(bayesian)(jnp.ones(2), key=jax.random.key(1)).shape
        (1,)
    """
    check_instance(model, "to_bayesian")
    options: Any = {
        "prior_scale": prior_scale,
        "posterior_scale": posterior_scale,
        "estimator": estimator,
    }

    def make(layer: Any) -> BayesianLayer:
        if isinstance(layer, Linear):
            return BayesianLinear.around(layer, **options)
        # The means are trained, also those of a layer that was not.
        return BayesianConv(unfreeze(layer), **options)

    def turn(node: PyTree) -> PyTree:
        return replace_layers(node, linear_or_conv, make)

    return turn(model) if where is None else tree_at(where, model, replace_fn=turn)
