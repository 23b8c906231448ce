"""Models with random weights: what their layers have in common, and the model as a whole."""

import abc
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from ..._dtypes import wider
from ..._module import Module
from .._common import check_instance


class BayesianLayer(Module):
    """Base of layers whose weights are random, with a posterior beside a prior.

    What `kl_divergence` and `sample_posterior` ask of a layer; a layer of your own that derives
    from it is found in any model. It is a base, not only a form, so that a model which happens to
    have a method `sample` is not taken for one.

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
    nodes = jax.tree_util.tree_leaves(model, is_leaf=_is_bayesian)
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
    >>> model = nn.BayesianMLP(2, 1, width_size=8, depth=1, key=jax.random.key(0))
    >>> type(sample_posterior(model, jax.random.key(1)).layers[0]).__name__
    'Linear'
    """
    check_instance(model, "sample_posterior")
    nodes, treedef = jax.tree_util.tree_flatten(model, is_leaf=_is_bayesian)
    keys = iter(jr.split(key, max(1, sum(map(_is_bayesian, nodes)))))
    drawn = [node.sample(next(keys)) if _is_bayesian(node) else node for node in nodes]
    return jax.tree_util.tree_unflatten(treedef, drawn)
