"""Scales of normal priors that maximise the evidence."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.scipy.linalg import cho_solve
from jaxtyping import Array, Float

from ... import tree_at
from .._inference._method import Problem
from .._libraries import distributions, is_distribution
from .._priors import IndependentPrior, NormalPrior, Prior, PriorByPath, PriorOfLayers
from .._priors import _name as pattern_name
from ._curvature import (
    dense_curvature,
    diagonal_curvature,
    kronecker_curvature,
    kronecker_size,
    positive,
    positive_cholesky,
)
from ._gauss_newton import AroundMode, Part, parts_of, prior_diagonal

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
    leaf = jax.ShapeDtypeStruct(part.shape, jnp.float32)
    if isinstance(prior, PriorByPath):
        place = prior._place(part.path, leaf, {part.path: leaf})
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
        log_det = curvature.normal().log_det_precision
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
