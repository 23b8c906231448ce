"""Dropout in predictions too."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
from jaxtyping import Array, PRNGKeyArray

from ..._transforms import filter_eval_shape
from ...nn import Dropout, inference_mode
from .._data import num_examples, struct_of_example
from .._inference import Problem
from .._unknowns import Unknowns
from ._map import MAP


class MCDropout(MAP):
    """Training with dropout, and dropout that stays on in predictions.

    What the networks that are left by different masks disagree on is the epistemic uncertainty
    (Gal and Ghahramani, 2016, "Dropout as a Bayesian Approximation: Representing Model Uncertainty
    in Deep Learning"). It costs no more than training, for a model that has dropout anyway. How
    wide it is comes from the rate `p` of its layers, which no data changes: try some, and compare
    the log density of examples that were held out.

    The model has `nn.Dropout` in it, and is called by `model(x, key=key)`. In training each
    example has masks of its own. A draw is one network, and has the same masks for all inputs;
    with `noise=None` it is the one without dropout.

    The fields are those of `bayes.MAP`. More `steps` serve dropout than a network without.

    >>> import jax
    >>> from eqxlike import bayes, nn
    >>> key1, key2 = jax.random.split(jax.random.key(0))
    >>> layers = [
    ...     nn.Linear(1, 50, key=key1),
    ...     nn.Lambda(jax.nn.relu),
    ...     nn.Dropout(0.1),
    ...     nn.Linear(50, "scalar", key=key2),
    ... ]
    >>> model, method = nn.Sequential(layers), bayes.MCDropout(steps=3000)
    """

    def check(self, problem: Problem) -> None:
        super().check(problem)
        network = problem.target.network
        layers = jtu.tree_leaves(network, is_leaf=_is_dropout)
        rates = [layer.p for layer in layers if _is_dropout(layer)]
        if not any(not isinstance(p, int | float) or p > 0 for p in rates):
            raise ValueError(
                f"MCDropout: {type(network).__name__} has no dropout. Add `nn.Dropout(p=0.1)`, for "
                "instance before its last layer."
            )
        if not takes_key(network):
            raise ValueError(
                f"MCDropout calls the model by `model(x, key=key)`, and {type(network).__name__} "
                "takes no `key`. Write `def __call__(self, x, *, key=None)`, and pass the key to "
                "`nn.Dropout`."
            )
        x = struct_of_example(problem.target.data[0])
        try:
            filter_eval_shape(
                lambda network, x: network(x, key=jr.key(0)), inference_mode(network, False), x
            )
        except RuntimeError as error:
            raise ValueError(
                f"MCDropout: the `key` of {type(network).__name__} does not reach its dropout: "
                f"{error}"
            ) from error

    def loss(self, problem: Problem, key: PRNGKeyArray) -> Callable[[Array], Array]:
        target = problem.target
        batch_key, mask_key = jr.split(key)
        x, y = problem.batch(batch_key, self.batch_size) or target.data
        keys = jr.split(mask_key, num_examples(y, "MCDropout"))

        def loss(place: Array) -> Array:
            unknowns, log_det = target.constrain(problem.unflatten(place))
            network = inference_mode(target.model(unknowns), False)

            def of_one(x: Any, y: Any, key: PRNGKeyArray) -> Array:
                return target.likelihood.log_prob(network(x, key=key), unknowns.likelihood, y)

            log_prior = target.log_prior(unknowns) + log_det
            return -jnp.mean(jax.vmap(of_one)(x, y, keys)) - log_prior / target.num_data

        return problem.differentiable(loss)

    def num_found(self, found: Any) -> None:
        """New masks can be drawn without end."""

    def diagnosed(self, problem: Problem, found: Any) -> dict[str, Any]:
        """Nothing: what descends has masks in it, which the log density has not."""
        return {}

    def noise(self, num: int, key: PRNGKeyArray) -> Array:
        return jr.bits(key, (num, 2), jnp.uint32)

    def network(self, problem: Problem, unknowns: Unknowns) -> Any:
        network = problem.target.model(unknowns)
        if unknowns.noise is None:
            return network
        # A draw keeps its masks, whichever generator is the default by then.
        key = jr.wrap_key_data(unknowns.noise, impl="threefry2x32")
        network = inference_mode(network, False)
        return lambda x: network(x, key=key)


def _is_dropout(node: Any) -> bool:
    return isinstance(node, Dropout)


# --- Networks that are noisy: they are called with a key ---


def takes_key(network: Any) -> bool:
    """Whether a network can be called by `network(x, key=key)`."""
    parameters = inspect.signature(network).parameters.values()
    return any(each.name == "key" or each.kind is each.VAR_KEYWORD for each in parameters)
