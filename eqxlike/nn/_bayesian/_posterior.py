"""Models with random weights: what their layers have in common, and the model as a whole."""

import abc
from collections.abc import Callable
from typing import Any, Self, TypeVar

import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from ..._dtypes import wider
from ..._module import Module
from .._common import check_instance

Tree = TypeVar("Tree", bound=Any)


class BayesianLayer(Module):
    """Base of layers whose weights are random, with a posterior beside a prior.

    What `kl_divergence` and `sample_posterior` ask of a layer; a layer of your own that derives
    from it is found in any model. It is a base, not only a form, so that a model which happens to
    have a method `sample` is not taken for one.

    Methods that it may have beside: `mean_layer()`, the plain layer that `posterior_mean` puts in
    its place; `posterior_scales()` and `prior_scales()`, plain layers of the same structure whose
    arrays are standard deviations, for inference that keeps means and scales apart; and
    `with_perturbation(key)`, which is asked before each step.

    >>> import eqxlike as eqx, jax, jax.numpy as jnp
    >>> class Shift(BayesianLayer):
    ...     mean: jax.Array
    ...     def __call__(self, x, *, key):
    ...         return x + self.mean + jax.random.normal(key)
    ...     def kl(self):
    ...         return self.mean**2 / 2
    ...     def sample(self, key):
    ...         shift = self.mean + jax.random.normal(key)
    ...         return lambda x: x + shift
    >>> float(kl_divergence([Shift(jnp.array(2.0)), Shift(jnp.array(4.0))]))
    10.0
    """

    @abc.abstractmethod
    def kl(self) -> Float[Array, ""]:
        """KL(posterior || prior), shape `()`."""

    @abc.abstractmethod
    def sample(self, key: PRNGKeyArray) -> Any:
        """A layer with weights drawn from the posterior, the same for all inputs."""

    def with_perturbation(self, key: PRNGKeyArray) -> Self:
        """The layer with what the examples of a batch share; itself if that is nothing."""
        del key
        return self


def _is_bayesian(node: Any) -> bool:
    return isinstance(node, BayesianLayer)


def kl_divergence(model: PyTree) -> Float[Array, ""]:
    """KL(posterior || prior) summed over every `BayesianLayer` in a pytree.

    **Returns:** shape `()`; zero if there is none.

    **Raises:** `TypeError` for a class.

    >>> import jax
    >>> from eqxlike import nn
    >>> float(kl_divergence({"plain": nn.Linear(2, 2, key=jax.random.key(0))}))
    0.0
    """
    check_instance(model, "kl_divergence")
    nodes = jtu.tree_leaves(model, is_leaf=_is_bayesian)
    total = jnp.zeros((), jnp.float32)
    for term in (node.kl() for node in nodes if _is_bayesian(node)):
        dtype = wider(total.dtype, term.dtype)
        total = total.astype(dtype) + term.astype(dtype)
    return total


def sample_posterior(model: PyTree, key: PRNGKeyArray) -> PyTree:
    """Draws a network: every `BayesianLayer` in a pytree becomes a plain one, with weights drawn
    from it.

    **Arguments:**

    - `model`: any pytree; what is not a `BayesianLayer` stays.
    - `key`: split into one key for each `BayesianLayer`.

    **Returns:** a model that gives the same output whenever it gets the same input.

    **Raises:** `TypeError` for a class.

    >>> import jax
    >>> from eqxlike import nn
    >>> model = nn.Sequential([nn.BayesianLinear(3, 4, key=jax.random.key(0))])
    >>> type(sample_posterior(model, jax.random.key(1)).layers[0]).__name__
    'Linear'
    """
    check_instance(model, "sample_posterior")
    return _map_with_keys(lambda layer, key: layer.sample(key), model, key)


def with_perturbation(model: Tree, key: PRNGKeyArray) -> Tree:
    """Draws what the examples of a batch share: the perturbation of layers with
    `estimator="flipout"`, and the weights of those with `estimator="weights"`.

    Call it once a step, in the loss, before `jax.vmap` over the examples. A layer is given a part
    of the key, no noise: so there is nothing in the model that an optimiser could take for a
    parameter, and the draw is made inside of `jax.vmap`, where it is made once, since the key of
    the model has no batch axis.

    **Arguments:**

    - `model`: any pytree. What is no `BayesianLayer` stays, as does a layer with
      `estimator="local"`, the default, whose examples share nothing.
    - `key`: another one in each step; split into one key for each `BayesianLayer`.

    **Returns:** the model, whose layers draw alike for all examples until they are given another
    key. `kl_divergence`, `sample_posterior` and `inference_mode` do with it what they do without.

    **Raises:** `TypeError` for a class.

    >>> import eqxlike as eqx, jax, jax.numpy as jnp
    >>> from eqxlike import nn
    >>> model = nn.BayesianLinear(3, 4, estimator="flipout", key=jax.random.key(0))
    >>> def loss(model, x, y, key):
    ...     shared_key, own_key = jax.random.split(key)
    ...     model = nn.with_perturbation(model, shared_key)
    ...     keys = jax.random.split(own_key, len(x))
    ...     outputs = jax.vmap(lambda x, key: model(x, key=key))(x, keys)
    ...     return jnp.sum((outputs - y) ** 2) + nn.kl_divergence(model)
    >>> eqx.filter_jit(loss)(model, jnp.ones((5, 3)), jnp.ones((5, 4)), jax.random.key(1)).shape
    ()
    """
    check_instance(model, "with_perturbation")
    return _map_with_keys(lambda layer, key: layer.with_perturbation(key), model, key)


def _map_with_keys(
    function: Callable[[BayesianLayer, PRNGKeyArray], Any], model: Any, key: PRNGKeyArray
) -> Any:
    nodes, treedef = jtu.tree_flatten(model, is_leaf=_is_bayesian)
    keys = iter(jr.split(key, max(1, sum(map(_is_bayesian, nodes)))))
    return treedef.unflatten(
        [function(node, next(keys)) if _is_bayesian(node) else node for node in nodes]
    )
