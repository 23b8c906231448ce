"""The width of a Laplace approximation, chosen by leave-one-out cross-validation.

If a network fits its data perfectly, its log density has almost no curvature at the mode, and the
normal approximation is about as wide as the prior. A narrower normal distribution may predict
better.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
from jaxtyping import Array, Float, PRNGKeyArray

from ._curvature import Normal, RotatedNormal, outputs_and_covariance
from ._gauss_newton import SMALL, AroundMode, positive_root

# Candidate factors of the covariance.
_WIDTHS = (1 / 1024, 1 / 256, 1 / 64, 1 / 16, 1 / 4, 1.0)
_MAX_HELD_OUT, _MIN_HELD_OUT, _NUM_DRAWS = 512, 64, 64
# Number of simulated targets, over all examples.
_NUM_TARGETS = 2048
_MAX_LEVERAGE = 0.99


class Width(NamedTuple):
    """A width and its leave-one-out scores.

    - `value`: factor of the covariance.
    - `nll`: NLL per left-out example, in nats, for this width.
    - `least_nll`, `nll_of_one`: NLL per left-out example for the best width that passes the tests
      of `width_for`, and for width 1. Both equal `nll` if the user chose the width.
    """

    value: Float[Array, ""]
    nll: Float[Array, ""]
    least_nll: Float[Array, ""]
    nll_of_one: Float[Array, ""]


def width_for(around: AroundMode, normal: Normal, fixed: float | None, key: PRNGKeyArray) -> Width:
    """The user's width `fixed` with its score, or the width that leave-one-out chooses.

    Width 1 is the approximation of the posterior. A narrower width must pass two tests:

    - It predicts better than width 1 by more than two standard errors.
    - Its advantage exceeds, by more than 2.5 standard deviations, the mean advantage on targets
      simulated from the predictions of width 1. This second test is needed because a narrow width
      may pass the first test by chance: a few examples may contain no outlier that refutes the
      width.

    If any width passes, the result is the narrowest width that is at most two standard errors worse
    than the best passing width. It is not the best passing width itself, because the Newton step
    makes narrow widths look too bad if classes are separable. Examples of high leverage depend on
    each other, so an example counts as `1 - leverage` examples in standard errors.
    """
    if fixed is not None:
        width = jnp.asarray(fixed, around.mode.dtype)
        nll = jnp.mean(_leave_one_out(around, normal, width[None], key, 0).nlls)
        return Width(width, nll, nll, nll)
    widths = jnp.asarray(_WIDTHS, around.mode.dtype)
    num = _num_held_out(around)
    scores = _leave_one_out(around, normal, widths, key, max(4, _NUM_TARGETS // num))
    effective = jnp.sum(1 - scores.leverages)

    def error(differences: Float[Array, "n w"]) -> Float[Array, " w"]:
        return jnp.std(differences, axis=0) / jnp.sqrt(effective)

    nlls, gains = jnp.mean(scores.nlls, axis=0), scores.nlls[:, -1:] - scores.nlls
    gain, expected = jnp.mean(gains, axis=0), jnp.mean(scores.expected_gains, axis=0)
    deviation = jnp.sqrt(jnp.mean(scores.variances, axis=0) / effective)
    passes = (gain > 2 * error(gains)) & (gain - expected > 2.5 * deviation) & (num > 1)
    passes = passes.at[-1].set(~jnp.any(passes))
    best = jnp.argmin(jnp.where(passes, nlls, jnp.inf))
    losses = scores.nlls - scores.nlls[:, best, None]
    is_as_good = jnp.mean(losses, axis=0) <= 2 * error(losses)
    # The first index is the narrowest width.
    chosen = jnp.argmax(is_as_good & (jnp.any(passes[:-1]) | passes))
    return Width(widths[chosen], nlls[chosen], nlls[best], nlls[-1])


def _num_held_out(around: AroundMode) -> int:
    """The number of examples to leave out: fewer if each example has many outputs."""
    most = max(_MAX_HELD_OUT * SMALL // max(around.output.size, SMALL), _MIN_HELD_OUT)
    return min(around.problem.target.num_data, most)


class _Scores(NamedTuple):
    """Leave-one-out scores of `n` examples for `w` widths. The last width is 1.

    - `nlls`: NLL of the target.
    - `expected_gains`, `variances`: mean and variance of the gain over simulated targets. The gain
      is the NLL of width 1 minus the NLL of this width. Targets are simulated from the predictions
      of width 1.
    - `leverages`: greatest leverage of the example's outputs.
    """

    nlls: Float[Array, "n w"]
    expected_gains: Float[Array, "n w"]
    variances: Float[Array, "n w"]
    leverages: Float[Array, " n"]


def _leave_one_out(
    around: AroundMode,
    normal: Normal,
    widths: Float[Array, " w"],
    key: PRNGKeyArray,
    num_targets: int,
) -> _Scores:
    """Approximate leave-one-out scores of at most 512 random examples.

    A Newton step of the linearised network removes an example. Let `V = J P^-1 J^T`, let `r` be the
    gradient of the example's log likelihood with respect to its outputs, and `A A^T` the negative
    Hessian of this log likelihood. The step moves the outputs by `-W r`. Here `W = V + V A (I - A^T
    V A)^-1 A^T V` is also the new covariance of the outputs (Pregibon, 1981, "Logistic Regression
    Diagnostics"; Rad and Maleki, 2020, "A Scalable Estimate of the Out-of-Sample Prediction Error
    via Approximate Leave-One-Out Cross-Validation").

    **Arguments:**

    - `num_targets`: number of simulated targets per example. With 0, all gains are 0.
    """
    target, mode = around.problem.target, around.mode
    order_key, noise_key, target_key = jr.split(key, 3)
    order = jr.permutation(order_key, target.num_data)[: _num_held_out(around)]
    own, struct = around.problem.unknowns(mode).likelihood, around.output
    noise = standard_noise(noise_key, _NUM_DRAWS, struct.size, mode.dtype)

    def of_example(pair: tuple[Array, PRNGKeyArray]) -> _Scores:
        index, key = pair
        x, y = jtu.tree_map(lambda leaf: leaf[index], target.data)

        def log_prob(outputs: Array, y: Any) -> Array:
            outputs = outputs.reshape(struct.shape).astype(struct.dtype)
            return target.likelihood.log_prob(outputs, own, y).astype(mode.dtype)

        outputs, covariance = outputs_and_covariance(around, normal, x)
        root = positive_root(-jax.hessian(log_prob)(outputs, y))
        leverages = root.T @ covariance @ root
        greatest = _greatest_eigenvalue(leverages)
        if isinstance(normal, RotatedNormal):
            jacobian, _ = around.jacobian(x)
            covariance = normal.without(root.T @ jacobian).covariance_of(jacobian)
        else:
            leverages = leverages * jnp.minimum(1, _MAX_LEVERAGE / jnp.maximum(greatest, 1e-30))
            rows = root.T @ covariance
            free = jnp.eye(struct.size, dtype=mode.dtype) - leverages
            rest = jax.scipy.linalg.solve(free, rows, assume_a="pos")
            covariance = covariance + rows.T @ rest
        outputs = outputs - covariance @ jax.grad(log_prob)(outputs, y)
        moved = noise @ positive_root(covariance).T

        def log_density(y: Any) -> Float[Array, " w"]:
            def at(width: Array) -> Array:
                places = outputs[None] + jnp.sqrt(width) * moved
                return jax.nn.logsumexp(jax.vmap(lambda place: log_prob(place, y))(places))

            return jax.vmap(at)(widths) - math.log(_NUM_DRAWS)

        nlls = -log_density(y)
        leverage = jnp.minimum(greatest, _MAX_LEVERAGE)
        if not num_targets:
            return _Scores(nlls, jnp.zeros_like(nlls), jnp.zeros_like(nlls), leverage)

        def drawn(key: PRNGKeyArray) -> Float[Array, " w"]:
            place_key, key = jr.split(key)
            place = outputs + moved[jr.randint(place_key, (), 0, _NUM_DRAWS)]
            place = place.reshape(struct.shape).astype(struct.dtype)
            sample = target.likelihood.distribution(place, own).sample(key)
            return log_density(jtu.tree_map(lambda new, old: new.astype(old.dtype), sample, y))

        log_densities = jax.vmap(drawn)(jr.split(key, num_targets))
        gains = log_densities - log_densities[:, -1:]
        return _Scores(nlls, jnp.mean(gains, axis=0), jnp.var(gains, axis=0), leverage)

    pairs = order, jr.split(target_key, len(order))
    size = around.batch_size(3 * struct.size * around.centre.nbytes, len(order))
    return jax.lax.map(of_example, pairs, batch_size=size)


def _greatest_eigenvalue(matrix: Float[Array, "C C"]) -> Float[Array, ""]:
    """The greatest eigenvalue of a positive semidefinite matrix."""
    if matrix.shape[0] <= SMALL:
        return jnp.linalg.eigvalsh(matrix)[-1]
    first = matrix[jnp.argmax(jnp.diagonal(matrix))]

    def iterate(_: Any, vector: Array) -> Array:
        return matrix @ (vector / jnp.maximum(jnp.linalg.norm(vector), 1e-30))

    return jnp.linalg.norm(jax.lax.fori_loop(0, 50, iterate, first))


def standard_noise(key: PRNGKeyArray, num: int, size: int, dtype: Any) -> Float[Array, "S C"]:
    """Standard normal draws, adjusted to have exact mean and covariance if `num > size`.

    For `size=1`, the draws are quantiles.
    """
    if size == 1:
        middles = (jnp.arange(num, dtype=dtype) + 0.5) / num
        points = jax.scipy.special.ndtri(middles)
        points = points - jnp.mean(points)
        return (points / jnp.sqrt(jnp.mean(points**2)))[:, None]
    # All batches share this noise on purpose. Rebuilding the key from its data avoids the error of
    # `jax.debug_key_reuse`.
    key = jr.wrap_key_data(jr.key_data(key), impl=jr.key_impl(key))
    noise = jr.normal(key, (num, size), dtype)
    if num <= size:
        return noise
    noise = noise - jnp.mean(noise, axis=0, keepdims=True)
    left, _, right = jnp.linalg.svd(noise, full_matrices=False)
    return math.sqrt(num) * left @ right
