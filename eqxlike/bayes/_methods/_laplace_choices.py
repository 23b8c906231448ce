"""Choices of a Laplace approximation: prior scales of greatest evidence, and the width."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
from jax.scipy.linalg import cho_solve
from jaxtyping import Array, Float, PRNGKeyArray

from ... import tree_at
from .._distributions import (
    IndependentPrior,
    NormalPrior,
    Prior,
    PriorByPath,
    PriorOfLayers,
    pattern_name,
)
from .._libraries import distributions, is_distribution
from .._method import Problem
from ._curvature import (
    Normal,
    RotatedNormal,
    dense_curvature,
    diagonal_curvature,
    kronecker_curvature,
    kronecker_size,
    outputs_and_covariance,
    positive,
    positive_cholesky,
)
from ._gauss_newton import SMALL, AroundMode, Part, parts_of, positive_root, prior_diagonal

MAX_BYTES = 4 * 2**30
"""Memory limit of a curvature, in bytes."""

MAX_FULL = 2000
"""Maximum number of unknowns for a dense precision by default: its cost is cubic."""

# Smallest increase of the log evidence, in nats, for which new scales are accepted.
_LEAST_GAIN = 0.05
_MAX_LOG_FACTOR = math.log(1e6)
_NEWTON_STEPS = 40


class Fit(NamedTuple):
    """A mode, log factors of the prior scales, and the log evidence for these scales."""

    place: Float[Array, " d"]
    log_factors: Float[Array, " g"]
    log_evidence: Float[Array, ""]


class Tuned(NamedTuple):
    """State of an optimiser run that also tunes the prior scales.

    - `place`, `optimiser`: unknowns and optimiser state, for the scales of `log_factors`.
    - `log_factors`: logs of the factors of the scales.
    - `best`: the fit with the greatest evidence so far.
    - `change`: largest change of a log factor in the last tuning; 0 if that tuning found nothing
      better.
    """

    place: Float[Array, " d"]
    optimiser: Any
    log_factors: Float[Array, " g"]
    best: Fit
    change: Float[Array, ""]


def untuned(problem: Problem, place: Float[Array, " d"], optimiser: Any) -> Tuned:
    """The state before the first tuning."""
    zeros = jnp.zeros(len(scales(problem.target.prior)), place.dtype)
    best = Fit(place, zeros, jnp.asarray(-jnp.inf, place.dtype))
    return Tuned(place, optimiser, zeros, best, jnp.zeros((), place.dtype))


def retuned(problem: Problem, state: Tuned) -> Tuned:
    """If the evidence increased, proposes new scales; otherwise returns to the best fit.

    In a network of several layers, one scale can grow while another shrinks, without any change of
    the outputs or the evidence. Scales that do not increase the evidence are therefore rejected.
    """
    place, evidence, log_factors = _proposed(problem, state.place, state.log_factors)
    is_better = evidence > state.best.log_evidence + _LEAST_GAIN
    fit = Fit(state.place, state.log_factors, evidence)
    best = jtu.tree_map(lambda new, old: jnp.where(is_better, new, old), fit, state.best)
    change = jnp.max(jnp.abs(log_factors - state.log_factors))
    return Tuned(
        jnp.where(is_better, place, best.place),
        state.optimiser,
        jnp.where(is_better, log_factors, best.log_factors),
        best,
        jnp.where(is_better, change, 0),
    )


# --- Reading and replacing the scales of a prior ---


def scales(prior: Prior) -> dict[str, Any]:
    """The scales that can be tuned, by the pattern or path of their parameters."""
    found: dict[str, Any] = {}
    _map_scales(prior, lambda name, scale: found.setdefault(name, scale))
    return found


def name_of(prior: Prior, part: Part, name: str = "**") -> str:
    """The key under which `scales` holds the scale of a parameter's prior."""
    if isinstance(prior, PriorByPath):
        place = prior._place(part.path, part.struct, {part.path: part.struct})
        return name_of(prior.priors[place], part, pattern_name(prior.which[place], place))
    return part.path if isinstance(prior, PriorOfLayers) else name


def with_factors(problem: Problem, log_factors: Float[Array, " g"]) -> Problem:
    """Multiplies the prior scales, in the order of `scales`, by `exp(log_factors)`."""
    factors = dict(zip(scales(problem.target.prior), jnp.exp(log_factors), strict=True))
    prior = _map_scales(
        problem.target.prior,
        lambda name, scale: jnp.asarray(scale, problem.dtype) * factors[name].astype(problem.dtype),
    )
    return tree_at(lambda problem: problem.target.prior, problem, prior)


def _map_scales(prior: Prior, function: Callable[[str, Any], Any], name: str = "**") -> Prior:
    """The prior with the scale of each normal prior replaced by `function(name, scale)`."""
    if isinstance(prior, PriorByPath):
        names = map(pattern_name, prior.which, range(len(prior.which)))
        own = (
            _map_scales(each, function, name)
            for name, each in zip(names, prior.priors, strict=True)
        )
        return PriorByPath(prior.which, tuple(own))
    if isinstance(prior, PriorOfLayers):
        return PriorOfLayers({path: function(path, each) for path, each in prior.scales.items()})
    if isinstance(prior, NormalPrior) and not is_distribution(prior.scale):
        return tree_at(lambda prior: prior.scale, prior, function(name, prior.scale))
    if isinstance(prior, IndependentPrior) and type(prior.distribution) is distributions().Normal:
        normal = prior.distribution
        if normal.batch_shape == ():
            scale = function(name, normal.scale)
            return IndependentPrior(distributions().Normal(normal.loc, scale))
    return prior


# --- Optimal scales for the linearised network ---


def _proposed(
    problem: Problem, mode: Float[Array, " d"], log_factors: Float[Array, " g"]
) -> tuple[Float[Array, " d"], Float[Array, ""], Float[Array, " g"]]:
    """The scales that maximise the evidence of the network linearised at the mode.

    In the linearised network the likelihood is a normal density around the mode, and the scales
    determine mode and covariance of the posterior (MacKay, 1992, "Bayesian Interpolation"). Up to
    2,000 unknowns the precision is the whole Gauss-Newton matrix. For more unknowns, the precision
    is Kronecker-factored, or diagonal if a Kronecker-factored precision needs too much memory.

    **Arguments:**

    - `mode`: the mode for the scales of `log_factors`.

    **Returns:** the mode for the new scales, or `mode` if it is more probable; the log evidence for
    `log_factors`; and the new log factors.
    """
    parts, names = parts_of(problem), list(scales(problem.target.prior))
    given = AroundMode(with_factors(problem, log_factors), mode, parts)
    gradient = jax.grad(given.negative_log_prior)(given.centre)
    # For each unknown: prior precision, distance from the prior mean, and a one-hot row that marks
    # its scale. All three are zero if the scale is not tuned.
    precisions, distances = jnp.zeros_like(mode), jnp.zeros_like(mode)
    member = jnp.zeros((mode.size, len(names)), mode.dtype)
    for part in parts:
        name = name_of(problem.target.prior, part) if part.kind == "model" else ""
        if name in names:
            place = given.place_of(part)
            own = prior_diagonal(given, part)
            precisions = precisions.at[place].set(own)
            distances = distances.at[place].set(gradient[place] / own)
            member = member.at[place, names.index(name)].set(1)

    if mode.size <= MAX_FULL:
        matrix = dense_curvature(given)
        factor = positive_cholesky(matrix)
        log_det = 2 * jnp.sum(jnp.log(jnp.diagonal(factor)))
        of_data, pull = matrix - jnp.diag(precisions), matrix @ distances
        identity = jnp.eye(mode.size, dtype=mode.dtype)

        def posterior(own: Array) -> tuple[Array, Array, Array, Array]:
            covariance = cho_solve((positive_cholesky(of_data + jnp.diag(own)), True), identity)
            mean = covariance @ pull
            columns, moved = member * own[:, None], member * (own * mean)[:, None]
            crossed = columns.T @ covariance**2 @ columns + 2 * moved.T @ covariance @ moved
            return mean, jnp.diagonal(covariance), mean, crossed
    else:
        is_small = kronecker_size(parts) * mode.dtype.itemsize <= MAX_BYTES
        curvature = kronecker_curvature(given, 1) if is_small else diagonal_curvature(given)
        log_det = curvature.positive().log_det_precision
        # If a prior has one scale per block, its precision is the same in all bases.
        values = jnp.concatenate([block.values.reshape(-1) for block in curvature.blocks])
        of_data, pull = values - precisions, values * curvature.rotated(distances, back=False)

        def posterior(own: Array) -> tuple[Array, Array, Array, Array]:
            variances = 1 / positive(of_data + own)
            mean = variances * pull
            crossed = (own * variances) ** 2 + 2 * (own * mean) ** 2 * variances
            diagonal = jnp.diag(member.T @ crossed)
            return curvature.rotated(mean, back=True), variances, mean, diagonal

    # Derivatives of the log evidence with respect to the log precisions, not the log scales.
    def derivatives(changes: Float[Array, " g"]) -> tuple[Array, Array]:
        own = precisions * (member @ jnp.exp(-2 * changes))
        _, variances, mean, crossed = posterior(own)
        sums = member.T @ (own * (variances + mean**2))
        return (jnp.sum(member, axis=0) - sums) / 2, (crossed - jnp.diag(sums)) / 2

    def newton(carry: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        index, changes, gradient, hessian = carry
        values, vectors = jnp.linalg.eigh(hessian)
        step = vectors @ (vectors.T @ gradient / jnp.maximum(jnp.abs(values), 1e-3))
        step = step / jnp.maximum(1, jnp.max(jnp.abs(step)))
        changes = jnp.clip(changes - step / 2, lowest, highest)
        return index + 1, changes, *derivatives(changes)

    lowest, highest = -_MAX_LOG_FACTOR - log_factors, _MAX_LOG_FACTOR - log_factors
    start = jnp.zeros_like(log_factors)
    _, changes, *_ = jax.lax.while_loop(
        lambda carry: (carry[0] < _NEWTON_STEPS) & (jnp.max(jnp.abs(carry[2])) > 1e-2),
        newton,
        (jnp.zeros((), jnp.int32), start, *derivatives(start)),
    )
    log_joint = given.log_likelihood() - given.negative_log_prior(mode)
    evidence = log_joint + mode.size * math.log(2 * math.pi) / 2 - log_det / 2
    moved = mode + posterior(precisions * (member @ jnp.exp(-2 * changes)))[0] - distances
    changed = with_factors(problem, log_factors + changes)

    def log_density(place: Array) -> Array:
        around = AroundMode(changed, place, parts)
        return around.log_likelihood() - around.negative_log_prior(place)

    is_nearer = log_density(moved) > log_density(mode)
    return jnp.where(is_nearer, moved, mode), evidence, log_factors + changes


# --- The width, chosen by leave-one-out cross-validation ---
#
# If a network fits its data perfectly, its log density has almost no curvature at the mode, and the
# normal approximation is about as wide as the prior. A narrower normal distribution may predict
# better.


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
