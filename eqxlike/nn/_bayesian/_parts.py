"""Conversion between Bayesian models and their means and scales."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import PyTree

from ... import is_array
from .._conv import Conv
from .._inputs import check_instance
from .._linear import Linear
from ._gaussian_layer import (
    Estimator,
    check_estimator,
    is_bayesian,
    with_posterior_scales,
    with_rhos,
)
from ._layers import BayesianConv, BayesianLinear


def posterior_mean(model: PyTree) -> PyTree:
    """Replaces every `BayesianLayer` in a pytree by an ordinary layer with the posterior means.

    The new model returns the same outputs as `model` in inference mode, and needs no key.

    **Arguments:**

    - `model`: any pytree. Everything except `BayesianLayer`s is unchanged.

    **Returns:** the model with a `Linear` for each `BayesianLinear` and a `Conv` for each
    `BayesianConv`. Frozen arrays stay frozen.

    **Raises:** `TypeError` if `model` is a class, or has a custom `BayesianLayer` without a method
    `mean_layer`.

    >>> import jax
    >>> from eqxlike import nn
    >>> model = nn.BayesianMLP(2, 1, width_size=8, depth=1, key=jax.random.key(0))
    >>> type(posterior_mean(model).layers[0]).__name__
    'Linear'
    """
    check_instance(model, "posterior_mean")
    return _map_layers(model, "mean_layer", lambda leaf: leaf)


def posterior_scales(model: PyTree) -> PyTree:
    """The posterior standard deviations of a model.

    **Returns:** a tree like `posterior_mean(model)`, with standard deviations for the arrays of
    `BayesianLayer`s, and `None` for all other leaves.

    **Raises:** `TypeError` if `model` is a class, or has a `BayesianLayer` without a method
    `posterior_scales`.

    >>> import jax
    >>> from eqxlike import nn
    >>> layer = nn.Linear(2, 1, key=jax.random.key(0))
    >>> scales = posterior_scales([layer, nn.BayesianLinear.around(layer, posterior_scale=0.1)])
    >>> scales[0].weight, round(float(scales[1].bias[0]), 6)
    (None, 0.1)
    """
    check_instance(model, "posterior_scales")
    return _map_layers(model, "posterior_scales", lambda leaf: None)


def prior_scales(model: PyTree) -> PyTree:
    """The prior standard deviations of a model, in a tree like the result of `posterior_scales`.

    >>> import jax
    >>> from eqxlike import nn
    >>> layer = nn.BayesianLinear(4, 1, prior_scale=2.0, key=jax.random.key(0))
    >>> prior_scales(layer).weight.tolist()
    [[1.0, 1.0, 1.0, 1.0]]
    """
    check_instance(model, "prior_scales")
    return _map_layers(model, "prior_scales", lambda leaf: None)


def _map_layers(model: PyTree, method: str, other: Callable[[Any], Any]) -> PyTree:
    """Replaces `BayesianLayer`s by the results of `method`, and other leaves by `other(leaf)`."""

    def change(path: jtu.KeyPath, node: Any) -> Any:
        if not is_bayesian(node):
            return other(node)
        if not hasattr(node, method):
            raise TypeError(
                f"{type(node).__name__} at model{jtu.keystr(path)} has no method `{method}`, which "
                "is needed to split it into means and scales. Define it as `nn.BayesianLayer` "
                "describes."
            )
        return getattr(node, method)()

    return jtu.tree_map_with_path(change, model, is_leaf=is_bayesian)


def bayesian_from_parts(
    network: PyTree, scales: PyTree, estimator: Estimator, *, are_rhos: bool = False
) -> PyTree:
    """Converts `Linear` and `Conv` layers to Bayesian layers with given means and scales.

    This is the inverse of `posterior_mean` and `posterior_scales`.

    **Arguments:**

    - `network`: a Module or any pytree. Its arrays are the posterior means.
    - `scales`: a tree like `network`, with posterior standard deviations for arrays. Leaves may be
      `None` or missing.
    - `estimator`: estimator of all layers.
    - `are_rhos`: whether `scales` contains `rho` instead of the standard deviation `softplus(rho)`.

    **Returns:** the network with Bayesian layers. Each `Linear` or `Conv` with scales for all its
    arrays becomes a `BayesianLinear` or a `BayesianConv`. Other arrays with scales are unchanged,
    so the caller must draw samples of these arrays. `layers_with_estimators` returns `False` for
    these arrays.

    **Raises:**

    - `TypeError` if `network` is a class.
    - `ValueError` if the estimator is unknown.
    - `ValueError` if a scale and its array differ in shape.
    - `ValueError` if `network` has no array for a scale.

    >>> import jax, jax.numpy as jnp
    >>> from eqxlike import nn
    >>> network = [nn.Linear(2, 1, key=jax.random.key(0)), nn.LayerNorm(1)]
    >>> scales = jax.tree.map(jnp.ones_like, network)
    >>> [type(layer).__name__ for layer in bayesian_from_parts(network, scales, "local")]
    ['BayesianLinear', 'LayerNorm']
    """
    check_instance(network, "bayesian_from_parts")
    check_estimator(estimator)
    nodes, treedef, parts = _match_scales(network, scales)

    set_scales = with_rhos if are_rhos else with_posterior_scales

    def bayesian(node: Any, scale: Any) -> Any:
        if scale is None:
            return node
        make: Any = BayesianLinear.around if isinstance(node, Linear) else BayesianConv
        return set_scales(make(node, estimator=estimator), scale)

    return treedef.unflatten(map(bayesian, nodes, parts))


def layers_with_estimators(network: PyTree, scales: PyTree) -> PyTree[bool]:
    """Returns which arrays `bayesian_from_parts` converts to parameters of Bayesian layers.

    **Returns:** a tree like `network` with booleans. The arrays of a `Linear` or `Conv` become
    `True` if the layer has scales for all its arrays. All other leaves become `False`.

    >>> import jax, jax.numpy as jnp
    >>> from eqxlike import nn
    >>> network = [nn.Linear(2, 1, key=jax.random.key(0)), nn.LayerNorm(1)]
    >>> covered = layers_with_estimators(network, jax.tree.map(jnp.ones_like, network))
    >>> covered[0].weight, covered[1].weight
    (True, False)
    """
    check_instance(network, "layers_with_estimators")
    nodes, treedef, parts = _match_scales(network, scales)
    return treedef.unflatten(
        jtu.tree_map(lambda leaf, is_covered=scale is not None: is_covered, node)
        for node, scale in zip(nodes, parts, strict=True)
    )


def linear_or_conv(node: Any) -> bool:
    """Whether a node is a layer that can become Bayesian. Errors show this function's name."""
    # A subclass that overrides `__call__` may compute something else.
    return type(node).__call__ in (Linear.__call__, Conv.__call__)


def _match_scales(network: PyTree, scales: PyTree) -> tuple[list[Any], Any, list[Any]]:
    """Returns the layers and leaves of `network`, the treedef of `network`, and the scales.

    The list of scales has one entry for each layer or leaf: its scales, or `None` if it cannot
    become Bayesian.
    """
    # An array has the same path string whether it is frozen or not. Matching by path strings
    # therefore works if `network` has frozen arrays and `scales` has none.
    by_path = {jtu.keystr(path): leaf for path, leaf in jtu.tree_leaves_with_path(scales)}
    _check_scales(network, by_path)
    nodes, treedef = jtu.tree_flatten_with_path(network, is_leaf=linear_or_conv)
    return [node for _, node in nodes], treedef, [_scales_of(*each, by_path) for each in nodes]


def _check_scales(network: PyTree, by_path: dict[str, Any]) -> None:
    arrays = {jtu.keystr(path): leaf for path, leaf in jtu.tree_leaves_with_path(network)}
    for path, scale in by_path.items():
        if not is_array(arrays.get(path)):
            raise ValueError(
                f"There is a scale at scales{path}, but no array at network{path}: scales must be "
                "a tree like the network, with `None` for leaves without a scale."
            )
        if jnp.shape(scale) != arrays[path].shape:
            raise ValueError(
                f"Expected scales{path} to have the shape of network{path}, "
                f"{arrays[path].shape}; got {jnp.shape(scale)}."
            )


def _scales_of(path: jtu.KeyPath, node: Any, by_path: dict[str, Any]) -> Any:
    """A copy of the layer `node` with scales as its arrays; `None` if `node` cannot become
    Bayesian.
    """
    if not linear_or_conv(node) or not jnp.issubdtype(node.weight.dtype, jnp.floating):
        return None
    inner, treedef = jtu.tree_flatten_with_path(node)
    found = [by_path.get(jtu.keystr((*path, *each))) for each, _ in inner]
    return None if any(scale is None for scale in found) else treedef.unflatten(found)
