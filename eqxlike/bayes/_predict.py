"""Predictive distributions of a fitted posterior, for any method.

`S` is the number of draws, `B` the number of inputs.
"""

from collections.abc import Callable
from typing import Any, Concatenate, TypeVar

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
from jaxtyping import Array, PRNGKeyArray, PyTree, Shaped

from .. import filter_eval_shape, filter_jit
from .._check_numbers import whole_number
from ..nn import sample_posterior
from ._distributions import Likelihood
from ._fitted import FittedPosterior, map_batches
from ._libraries import as_libraries_compute, distributions, is_distribution
from ._mixtures import CategoricalMixture, Mixture
from ._posterior import Unknowns, num_examples, struct_of_example


def predict(
    posterior: FittedPosterior,
    x: PyTree[Shaped[Array, "B ..."]],
    *,
    key: PRNGKeyArray,
    num_samples: int | None = None,
    batch_size: int = 256,
) -> Mixture | CategoricalMixture:
    """Predictive distributions of the targets for given inputs: mixtures over all draws.

    **Arguments:**

    - `posterior`: the result of `bayes.infer`.
    - `x`: inputs with a leading axis of examples, as in the data of the target.
    - `key`: random key for the draws.
    - `num_samples`: number of draws. By default all draws that the method kept, or 100 if the
      method can make new draws.
    - `batch_size`: number of inputs that are processed at once, which limits memory. It changes
      results only by rounding.

    **Returns:** for the likelihoods `Categorical` and `Bernoulli`, a `bayes.CategoricalMixture`
    with `probabilities`, `entropy`, its parts `epistemic` and `aleatoric`, and `log_prob`. For
    other likelihoods, a `bayes.Mixture` with `mean`, `variance`, its parts `epistemic` and
    `aleatoric`, `quantile`, `interval` and `log_prob`.

    **Raises:** `TypeError` if `posterior` is not the result of `bayes.infer`. `ValueError` if `x`
    does not have the structure and shapes of the data's inputs, or `num_samples` or `batch_size` is
    not a positive integer.

    >>> import jax, jax.numpy as jnp
    >>> from eqxlike import bayes, nn
    >>> x = jnp.linspace(-1.0, 1.0, 20)[:, None]
    >>> model = nn.Linear(1, "scalar", key=jax.random.key(0))
    >>> target = bayes.Posterior(model, bayes.normal(), bayes.Gaussian(0.1), (x, 2 * x[:, 0]))
    >>> posterior = bayes.infer(target, bayes.MAP(), key=jax.random.key(1), progress=False)
    >>> prediction = bayes.predict(posterior, x[:3], key=jax.random.key(2))
    >>> prediction.mean.shape, prediction.interval(0.9)[0].shape
    ((3,), (3,))
    """
    if not isinstance(posterior, FittedPosterior):
        raise TypeError(
            "predict: posterior must be a bayes.FittedPosterior, the result of `bayes.infer`; got "
            f"{type(posterior).__name__}."
        )
    x = jtu.tree_map(jnp.asarray, x)
    _check_inputs(x, posterior.target.data[0])
    batch_size = whole_number(batch_size, "batch_size")
    draw_key, key = jr.split(key)
    draws = posterior.samples(num_samples, key=draw_key)
    outputs, unknowns = _outputs(posterior, draws, x, key, batch_size)
    return _mixture(posterior.target.likelihood, outputs, unknowns)


def _check_inputs(x: Any, known: Any) -> None:
    if not num_examples(x, "predict"):
        raise ValueError("predict: x has no examples.")
    ours, theirs = struct_of_example(x), struct_of_example(known)
    shapes, expected = (jtu.tree_map(lambda each: each.shape, tree) for tree in (ours, theirs))
    if jtu.tree_structure(ours) != jtu.tree_structure(theirs) or shapes != expected:
        is_one_input = jtu.tree_map(jnp.shape, x) == expected
        hint = " For one input, pass `x[None]`." if is_one_input else ""
        raise ValueError(
            f"predict: expected a batch of inputs of shape {expected}, as in the data; got inputs "
            f"of shape {shapes}.{hint}"
        )


@filter_jit
def _outputs(
    posterior: FittedPosterior, draws: Unknowns, x: Any, key: PRNGKeyArray, batch_size: int
) -> tuple[Array, Any]:
    """The outputs of all draws for all inputs, and the unknowns of the likelihood."""

    def of_batch(batch: Any) -> Array:
        method, problem = posterior.method, posterior.problem
        return jnp.moveaxis(method.outputs(problem, posterior.found, draws, batch, key), 0, 1)

    outputs = map_batches(of_batch, x, min(batch_size, num_examples(x, "predict")))
    return jnp.moveaxis(outputs, 0, 1), draws.likelihood


def _mixture(likelihood: Likelihood, outputs: Array, unknowns: Any) -> Mixture | CategoricalMixture:
    of_one = filter_eval_shape(
        likelihood.distribution, outputs[0, 0], jtu.tree_map(lambda each: each[0], unknowns)
    )
    kinds = distributions()
    is_binary = isinstance(of_one, kinds.BernoulliLogits | kinds.BernoulliProbs)
    if is_binary or isinstance(of_one, kinds.CategoricalLogits | kinds.CategoricalProbs):
        logits = _of_each(likelihood, outputs, unknowns, lambda each: each.logits)
        if is_binary:
            logits = jnp.stack([jnp.zeros_like(logits), logits], axis=-1)
        return CategoricalMixture(logits)
    components = _of_each(likelihood, outputs, unknowns, lambda each: each)
    return Mixture(_with_leading_axes(components, outputs.shape[:2]))


def _of_each(likelihood: Likelihood, outputs: Array, unknowns: Any, take: Any) -> Any:
    def of_draw(outputs: Array, unknowns: Any) -> Any:
        return jax.vmap(lambda output: take(likelihood.distribution(output, unknowns)))(outputs)

    with as_libraries_compute():
        return jax.vmap(of_draw)(outputs, unknowns)


def _with_leading_axes(distribution: Any, leading: tuple[int, ...]) -> Any:
    """Sets the batch shape of a distribution that `jax.vmap` returned.

    NumPyro's `promote_batch_shape` does not update distributions inside a distribution, such as the
    gamma distribution in a negative binomial. The gamma distribution would then draw one number for
    the whole batch.

    **Arguments:**

    - `leading`: the leading axes that vmap added to all arrays of the distribution.
    """

    def is_part(node: Any) -> bool:
        return node is not distribution and is_distribution(node)

    def of_part(node: Any) -> Any:
        if not is_part(node):
            return node
        # After the leading axes, insert the axes along which the inner distribution is broadcast.
        num_added = max(0, len(distribution.batch_shape) - len(node.batch_shape))
        axes = range(len(leading), len(leading) + num_added)
        node = jtu.tree_map(lambda leaf: jnp.expand_dims(leaf, axes), node)
        return _with_leading_axes(node, (*leading, *(1,) * num_added))

    many = jtu.tree_map(of_part, distribution, is_leaf=is_part)
    many._batch_shape = leading + distribution.batch_shape
    return many


# --- Predictions of models with Bayesian layers: `S` networks, `B` inputs ---


Output = TypeVar("Output")


def predict_samples(
    model: Callable[Concatenate[Any, ...], Output],
    inputs: PyTree[Shaped[Array, "B ..."]],
    *,
    key: PRNGKeyArray,
    num_samples: int,
) -> Output:
    """Outputs of `S` networks drawn from the posterior, each applied to all inputs.

    **Arguments:**

    - `model`: a model with `nn.BayesianLayer`s. Each of these layers is replaced by a draw. The
      network is then called with one example. Put other random layers in inference mode.
    - `inputs`: arrays with leading axis B.
    - `key`: random key for the draws.
    - `num_samples`: number of networks, S.

    **Returns:** outputs with leading axes S, B.

    **Raises:** `ValueError` if `num_samples` is not a positive integer.

    >>> import eqxlike as eqx, jax, jax.numpy as jnp
    >>> from eqxlike import nn
    >>> model = nn.BayesianLinear(3, 4, key=jax.random.key(0))
    >>> predict = eqx.filter_jit(predict_samples)
    >>> predict(model, jnp.ones((5, 3)), key=jax.random.key(1), num_samples=10).shape
    (10, 5, 4)
    """

    def one(key: PRNGKeyArray) -> Any:
        network = sample_posterior(model, key)
        return jax.vmap(lambda example: network(example))(inputs)

    return jax.vmap(one)(jr.split(key, whole_number(num_samples, "num_samples")))
