"""Laplace's approximation: a normal distribution around the mode."""

import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, PRNGKeyArray, Shaped

from ..._module import Module
from ..._pytree import Which, path_matches
from .._inference._method import Draws, Problem, Record
from .._libraries import is_distribution
from .._likelihoods import Bernoulli, Categorical, Gaussian
from .._posterior import Unknowns
from .._priors import NormalPrior
from ._curvature import (
    Curvature,
    Normal,
    dense_curvature,
    dense_size,
    diagonal_curvature,
    diagonal_size,
    kronecker_curvature,
    kronecker_size,
)
from ._descent import Descent, Optimised
from ._gauss_newton import AroundMode, Part, block_size, parts_of

Structure = Literal["full", "diagonal", "kronecker", "last_layer"]
Predictive = Literal["linearised", "probit", "sampled"]

_CURVATURES: dict[
    Structure, tuple[Callable[[AroundMode], Curvature], Callable[[tuple[Part, ...]], int]]
] = {
    "full": (dense_curvature, dense_size),
    "last_layer": (dense_curvature, dense_size),
    "kronecker": (kronecker_curvature, kronecker_size),
    "diagonal": (diagonal_curvature, diagonal_size),
}
_MAX_BYTES = 4 * 2**30
# Tuning may change the scale of a prior by at most this factor.
_MAX_FACTOR = 1e6


class LaplacePosterior(Module):
    """What `bayes.Laplace` found: the `found` of a `bayes.FittedPosterior`.

    - `mode`: the most probable vector of unknowns in linked space.
    - `normal`: the distribution of the unknowns that vary, minus their mode.
    - `log_evidence`: the log of the density of the data.
    - `prior_scale`: the scale of the prior that was tuned; `None` if none was.
    """

    mode: Float[Array, " d"]
    normal: Normal
    log_evidence: Float[Array, ""]
    prior_scale: Float[Array, ""] | None


class Laplace(Descent):
    """A normal distribution around the most probable unknowns, as wide as the density is curved.

    It costs little more than `bayes.MAP` (MacKay, 1992, "A Practical Bayesian Framework for
    Backpropagation Networks"; Daxberger et al., 2021, "Laplace Redux"). Its precision is the
    Hessian of minus the log density of unknowns in linked space, in which the network `f` counts as
    linear in its parameters: the generalised Gauss-Newton matrix. For a linear model with known
    noise the posterior is exact.

    - The precision is `P = sum_n J_n^T L_n J_n + P_0` (`_curvature`): `J_n` is the Jacobian of the
      outputs for example `n` and of the unknowns of the likelihood, `L_n` the Hessian of minus its
      log density in both, and `P_0` the Hessian of minus the log prior.
    - The log evidence is `log p(data, mode) + (k log 2 pi - log det P) / 2`, for the `k` unknowns
      that vary (`finish`).
    - The outputs for an input `x` have the distribution `N(f(x), J P^-1 J^T)`, with `J` the
      Jacobian at `x` (`_output_moments`).

    The fields:

    - `structure`: how much of the precision is kept. `"full"`, all of it; `"kronecker"`, a
      Kronecker product for each matrix or kernel, and all of each other array; `"diagonal"`;
      `"last_layer"`, all of it for the last layer and for the unknowns of prior and likelihood,
      while other parameters stay at the mode.
    - `predictive`: what predictions are made from. `"linearised"`, the normal distribution of the
      outputs of the linearised network, which fits the Gauss-Newton matrix (Immer, Korzepa and
      Bauer, 2021, "Improving Predictions of Bayesian Neural Nets via Local Linearization"): for
      one output the `S` draws of it are quantiles, with the exact mean and variance; for `C`
      outputs the mean and covariance are exact if `S > C`. `"probit"`, logits at the mode divided
      by `sqrt(1 + pi / 8 * variance)`, an approximation of the mean probability (MacKay, 1992,
      "The Evidence Framework Applied to Classification Networks"; Gibbs, 1997, "Bayesian Gaussian
      Processes for Regression and Classification", for several classes); for a `bayes.Gaussian`
      likelihood it is `"linearised"`. `"sampled"`, networks with the parameters that are drawn.
    - `tune_prior`: whether the scale of a prior `bayes.normal(loc, number)` is chosen to
      maximise the evidence, at the mode already found. `posterior.found.prior_scale` is that scale;
      a run with it as the prior's number moves the mode as well.
    - `layer`: for `"last_layer"`, which parameters vary, a pattern of paths as for
      `bayes.prior_by_path`. By default those of the layer of the last parameter.

    The other fields are those of `bayes.MAP`. Train to convergence: the approximation is made at
    the place where training ends.

    `posterior.log_evidence` is the log of the density of the data. With `"last_layer"` it is the
    log of the density of the data together with the parameters that stay at the mode, so that it
    compares only models in which these parameters are the same.

    >>> from eqxlike import bayes
    >>> method = bayes.Laplace(structure="kronecker", tune_prior=True)
    """

    structure: Structure = "full"
    predictive: Predictive = "linearised"
    tune_prior: bool = False
    layer: Which | None = None

    def __check_init__(self):
        if isinstance(self.steps, str):
            raise ValueError(
                "Laplace: steps, the first argument, must be an integer of at least 1, got "
                f"{self.steps!r}. Give the structure by its name: "
                f'`bayes.Laplace(structure="last_layer")`.'
            )
        for name, words in (("structure", Structure), ("predictive", Predictive)):
            if getattr(self, name) not in get_args(words):
                raise ValueError(
                    f"Laplace: {name} must be one of {', '.join(map(repr, get_args(words)))}, got "
                    f"{getattr(self, name)!r}."
                )
        if not isinstance(self.tune_prior, bool):
            raise TypeError(f"Laplace: tune_prior must be a bool, got {self.tune_prior!r}.")
        if self.layer is not None and self.structure != "last_layer":
            raise ValueError(
                f'Laplace: layer is for structure="last_layer", and structure is '
                f"{self.structure!r}."
            )

    def check(self, problem: Problem) -> None:
        super().check(problem)
        self._check_size(problem)
        likelihood, prior = problem.target.likelihood, problem.target.prior
        if self.predictive == "probit" and not isinstance(
            likelihood, Bernoulli | Categorical | Gaussian
        ):
            raise ValueError(
                'Laplace: predictive="probit" is for classes, `bayes.Bernoulli` or '
                f"`bayes.Categorical`; the likelihood is {type(likelihood).__name__}. "
                '"linearised" serves every likelihood.'
            )
        if self.tune_prior and (not isinstance(prior, NormalPrior) or is_distribution(prior.scale)):
            raise ValueError(
                "Laplace: tune_prior is for one prior `bayes.normal(loc, number)`, whose number it "
                f"chooses; the prior is {prior!r}."
            )

    def _check_size(self, problem: Problem) -> None:
        sizes = {
            structure: size(self._parts(problem, structure))
            for structure, (_, size) in _CURVATURES.items()
            if structure == self.structure or structure != "last_layer"
        }
        item = jnp.dtype(problem.dtype).itemsize
        if sizes[self.structure] * item <= _MAX_BYTES:
            return
        others = [repr(each) for each, size in sizes.items() if size * item <= _MAX_BYTES]
        raise ValueError(
            f"Laplace: structure={self.structure!r} would keep {sizes[self.structure]:,} numbers, "
            f"{sizes[self.structure] * item / 2**30:.1f} GiB, for {problem.size:,} unknowns; at "
            f"most {_MAX_BYTES / 2**30:.0f} GiB are taken. Structures that do: "
            f"{', '.join([*others, repr('last_layer')])}."
        )

    def finish(
        self, problem: Problem, states: Optimised, records: Record, key: PRNGKeyArray
    ) -> LaplacePosterior:
        mode = states.place[0]
        around = AroundMode(problem, mode, self._parts(problem, self.structure))
        curvature = _CURVATURES[self.structure][0](around)
        log_joint = around.log_likelihood() - around.negative_log_prior(around.centre)
        extra_precision, scale = jnp.zeros((), mode.dtype), None
        if self.tune_prior:
            scale, extra_precision, gained = _tune_prior_scale(around, curvature)
            log_joint = log_joint + gained
        normal = curvature.normal(extra_precision)
        size = around.centre.shape[0]
        log_evidence = log_joint + (size * math.log(2 * math.pi) - normal.log_det_precision) / 2
        return LaplacePosterior(mode, normal, log_evidence, scale)

    def sample(
        self, problem: Problem, found: LaplacePosterior, num: int, key: PRNGKeyArray
    ) -> Draws:
        around = self._around(problem, found)
        noise = jr.normal(key, (num, *around.centre.shape), found.mode.dtype)
        moved = around.centre[None] + found.normal.draw(noise)
        return jax.vmap(around.vector)(moved)

    def diagnosed(self, problem: Problem, found: LaplacePosterior) -> dict[str, Any]:
        return self.diagnosed_at(problem, found.mode[None])

    def log_evidence(self, problem: Problem, found: LaplacePosterior) -> Float[Array, ""]:
        return found.log_evidence

    def outputs(
        self, problem: Problem, found: LaplacePosterior, draws: Unknowns, x: Any, key: PRNGKeyArray
    ) -> Shaped[Array, "S B ..."]:
        if self.predictive == "sampled":
            return super().outputs(problem, found, draws, x, key)
        around = self._around(problem, found)
        num = jax.tree_util.tree_leaves(draws.model)[0].shape[0]
        mean, covariance = _output_moments(around, found.normal, x)
        if self.predictive == "probit" and not isinstance(problem.target.likelihood, Gaussian):
            variance = jnp.diagonal(covariance, axis1=1, axis2=2)
            flat = (mean / jnp.sqrt(1 + math.pi / 8 * variance))[None]
        elif mean.shape[1] == 1:
            if num < 2:
                raise ValueError(
                    'Laplace: one sample has no variance; take at least 2, or predictive="sampled".'
                )
            moved = _quantiles(num, mean.dtype)[:, None] * jnp.sqrt(covariance[:, 0, 0])[None]
            flat = mean[None] + moved[..., None]
        else:
            noise = _whitened_noise(key, num, mean.shape[1], mean.dtype)
            flat = mean[None] + jnp.einsum("bij,sj->sbi", _symmetric_root(covariance), noise)
        struct = around.output
        flat = jnp.broadcast_to(flat, (num, *mean.shape))
        return flat.reshape(num, -1, *struct.shape).astype(struct.dtype)

    def _around(self, problem: Problem, found: LaplacePosterior) -> AroundMode:
        return AroundMode(problem, found.mode, self._parts(problem, self.structure))

    def _parts(self, problem: Problem, structure: Structure) -> tuple[Part, ...]:
        """The arrays of unknowns that vary."""
        parts = parts_of(problem)
        if structure != "last_layer":
            return parts
        parameters = [part for part in parts if part.kind == "model"]
        if self.layer is None:
            varying = [part for part in parameters if part.layer == parameters[-1].layer]
        else:
            varying = [
                part
                for part in parameters
                if path_matches(
                    self.layer, part.path, jax.ShapeDtypeStruct(part.shape, problem.dtype)
                )
            ]
        if not varying:
            raise ValueError(
                f"Laplace: layer {self.layer!r} matches no parameter. The parameters are "
                f"{', '.join(part.path for part in parameters)}."
            )
        return (*varying, *(part for part in parts if part.kind != "model"))


def _tune_prior_scale(
    around: AroundMode, curvature: Curvature
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
    """The best scale of the prior, and how much it adds to the precision of each parameter and to
    the log density at the mode.
    """
    problem, mode = around.problem, around.mode
    prior = problem.target.prior
    assert isinstance(prior, NormalPrior)
    before = jnp.asarray(prior.scale, mode.dtype)
    parameters = [part for part in parts_of(problem) if part.kind == "model"]
    num = parameters[-1].stop
    squared_distance = jnp.sum((mode[:num] - prior.loc) ** 2)
    eigenvalues = curvature.likelihood_eigenvalues(before**-2)
    scale = _best_prior_scale(eigenvalues, squared_distance, num, before)
    extra_precision = scale**-2 - before**-2
    gained = num * jnp.log(before / scale) - squared_distance * extra_precision / 2
    return scale, extra_precision, gained


def _best_prior_scale(
    eigenvalues: Float[Array, " k"],
    squared_distance: Float[Array, ""],
    num_parameters: int,
    scale: Float[Array, ""],
) -> Float[Array, ""]:
    """The scale `s` of the prior that maximises the log evidence at a fixed mode.

    With `t = s**-2`, the derivative of the log evidence by `log t` is
    `(p - t q - sum_i t / (e_i + t)) / 2` (MacKay, 1992, "Bayesian Interpolation"). It
    decreases in `t`, so bisection finds its root.

    **Arguments:**

    - `eigenvalues`: the `e_i`, those of the likelihood's curvature.
    - `squared_distance`: `q`, of the mode from the centre of the prior.
    - `num_parameters`: `p`, how many have the prior.
    - `scale`: the present one. The result is at most a million times larger or smaller.
    """
    eigenvalues = jnp.maximum(eigenvalues, 0)
    width = 2 * math.log(_MAX_FACTOR)

    def halve(_: int, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = (low + high) / 2
        precision = jnp.exp(middle)
        kept = jnp.sum(precision / (eigenvalues + precision))
        is_rising = num_parameters - precision * squared_distance - kept > 0
        return jnp.where(is_rising, middle, low), jnp.where(is_rising, high, middle)

    start = -2 * jnp.log(scale)
    num_halvings = jnp.finfo(start.dtype).nmant + 6
    low, high = jax.lax.fori_loop(0, num_halvings, halve, (start - width, start + width))
    return jnp.exp(-(low + high) / 4)


def _output_moments(
    around: AroundMode, normal: Normal, x: Any
) -> tuple[Float[Array, "B C"], Float[Array, "B C C"]]:
    """Mean and covariance of the outputs of the linearised network."""

    def of_input(x: Any) -> tuple[Array, Array]:
        jacobian, outputs = around.jacobian(x)
        return outputs, normal.covariance_of(jacobian)

    num = jax.tree_util.tree_leaves(x)[0].shape[0]
    num_outputs = math.prod(around.output.shape)
    size = block_size(3 * num_outputs * around.centre.nbytes, num)
    return jax.lax.map(of_input, x, batch_size=size)


def _quantiles(num: int, dtype: Any) -> Float[Array, " S"]:
    """Points of the standard normal distribution, with mean 0 and variance 1."""
    middles = (jnp.arange(num, dtype=dtype) + 0.5) / num
    points = jax.scipy.special.ndtri(middles)
    points = points - jnp.mean(points)
    return points / jnp.sqrt(jnp.mean(points**2))


def _whitened_noise(key: PRNGKeyArray, num: int, size: int, dtype: Any) -> Float[Array, "S C"]:
    """Draws from the standard normal distribution, moved to have its mean and covariance."""
    # All batches share this noise on purpose. Rebuilding the key from its data keeps
    # `jax.debug_key_reuse` from objecting.
    key = jr.wrap_key_data(jr.key_data(key), impl=jr.key_impl(key))
    noise = jr.normal(key, (num, size), dtype)
    if num <= size:
        return noise
    noise = noise - jnp.mean(noise, axis=0, keepdims=True)
    left, _, right = jnp.linalg.svd(noise, full_matrices=False)
    return math.sqrt(num) * left @ right


def _symmetric_root(covariance: Float[Array, "B C C"]) -> Float[Array, "B C C"]:
    """Symmetric roots of matrices that may be singular."""
    values, vectors = jnp.linalg.eigh(covariance)
    scaled = vectors * jnp.sqrt(jnp.maximum(values, 0))[:, None, :]
    return scaled @ jnp.swapaxes(vectors, 1, 2)
