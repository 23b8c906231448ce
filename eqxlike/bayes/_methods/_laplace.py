"""The Laplace approximation: a normal distribution around the mode."""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import optax
from jaxtyping import Array, Float, PRNGKeyArray, Shaped

from ... import Module
from ..._check_numbers import positive_number
from ...extend import Which, path_matches
from .._distributions import Bernoulli, Categorical, Gaussian
from .._libraries import check_kind
from .._method import Draws, Problem, Record, Step
from .._posterior import Unknowns
from ._curvature import (
    Normal,
    dense_normal,
    diagonal_curvature,
    kronecker_curvature,
    kronecker_size,
    outputs_and_covariance,
)
from ._descent import Descent, Optimised
from ._gauss_newton import AroundMode, Part, parts_of, positive_root
from ._laplace_choices import (
    MAX_BYTES,
    MAX_FULL,
    Width,
    name_of,
    retuned,
    scales,
    standard_noise,
    untuned,
    width_for,
    with_factors,
)

Structure = Literal["full", "diagonal", "kronecker", "last_layer"]
Predictive = Literal["linearised", "probit", "sampled"]

_NORMALS: dict[Structure, Callable[[AroundMode], Normal]] = {
    "full": dense_normal,
    "last_layer": dense_normal,
    "kronecker": lambda around: kronecker_curvature(around).positive(),
    "diagonal": lambda around: diagonal_curvature(around).positive(),
}
# Additional steps for tuning the prior, as a fraction of `steps`, and the number of tunings.
_TUNING_FRACTION, _NUM_TUNINGS = 0.5, 5


class LaplacePosterior(Module):
    """The result of `bayes.Laplace`. It is the field `found` of a `bayes.FittedPosterior`.

    - `mode`: the most probable unknowns in linked space.
    - `normal`: the distribution of the varying unknowns minus the mode.
    - `log_evidence`: the log density of the data.
    - `log_factors`: logarithms of the factors by which tuning multiplied the prior scales; `None`
      without tuning.
    - `log_factor_change`: change of `log_factors` in the last tuning.
    - `width`: the factor of the covariance, and leave-one-out NLLs. `normal` already includes the
      factor.
    """

    mode: Float[Array, " d"]
    normal: Normal
    log_evidence: Float[Array, ""]
    log_factors: Float[Array, " g"] | None
    log_factor_change: Float[Array, ""] | None
    width: Width


class Laplace(Descent):
    """The Laplace approximation: a normal distribution around the mode of a trained network.

    It costs about as much as training twice. With `structure="full"`, memory grows with the square
    of the number of unknowns, and time with the cube. Do not use it if you need the exact posterior
    (use `bayes.NUTS`) or several modes (use `bayes.DeepEnsemble`).

    References: MacKay (1992), "A Practical Bayesian Framework for Backpropagation Networks";
    Daxberger et al. (2021), "Laplace Redux".

    - The precision is `P = sum_n J_n^T L_n J_n + P_0`, in linked space. Let `u_n` be the outputs
      for example `n` together with the likelihood's unknowns. `J_n` is the Jacobian of `u_n`. `L_n`
      is the Hessian of the example's negative log likelihood with respect to `u_n`. `P_0` is the
      Hessian of the negative log prior.
    - The log evidence is `log p(data, mode) + (k log 2 pi - log det P) / 2`, for `k` varying
      unknowns.
    - The outputs for an input `x` have the distribution `N(f(x), width J P^-1 J^T)`, with the
      Jacobian `J` at `x`.

    The fields:

    - `structure`: structure of the precision. `"full"`, the default up to 2,000 unknowns, has all
      correlations. `"last_layer"`, the default for more unknowns, is dense for the last layer and
      the unknowns of prior and likelihood, and keeps other parameters at the mode. `"kronecker"`
      has a Kronecker-factored block for each matrix or kernel, and a dense block for each other
      array. `"diagonal"` has no correlations.
    - `predictive`: how predictions are made. `"linearised"` uses the normal distribution of the
      linearised network's outputs. This is consistent with the Gauss-Newton matrix (Immer, Korzepa
      and Bauer, 2021, "Improving Predictions of Bayesian Neural Nets via Local Linearization"). For
      one output, the `S` draws are quantiles, with exact mean and variance. For `C` outputs, the
      mean and covariance of the draws are exact if `S > C`. `"probit"` is for classes. It divides
      the logits at the mode by `sqrt(1 + pi / 8 * variance)` (MacKay, 1992, "The Evidence Framework
      Applied to Classification Networks"; Gibbs, 1997, "Bayesian Gaussian Processes for Regression
      and Classification"). For `bayes.Gaussian`, `"probit"` equals `"linearised"`. `"sampled"` uses
      networks with sampled parameters.
    - `width`: factor of the covariance. Width 1 is the Laplace approximation of the posterior. By
      default (`None`), the width is 1 unless a smaller width predicts left-out examples
      significantly better. A warning reports both scores if a smaller width is chosen. A smaller
      width helps if a network fits its data perfectly, because the approximation of the posterior
      is then as wide as the prior. At most 512 examples are left out, one at a time. The network is
      not trained again; its predictions without the example are approximated.
    - `tune_prior`: whether to choose the prior scales that maximise the evidence. Mode and scales
      are then fitted in turn, in `steps / 2` additional steps (Immer et al., 2021, "Scalable
      Marginal Likelihood Estimation for Model Selection in Deep Learning"). All priors must be
      normal with a fixed scale; each pattern of `bayes.prior_by_path` has its own scale. Tune the
      scale if it is a guess. A scale chosen on held-out data may predict better.
      `posterior.diagnostics.choice` reports the chosen scales.
    - `layer`: with `"last_layer"`, a pattern for the paths of the parameters that vary. Patterns
      are described in `bayes.prior_by_path`. By default, all parameters vary in the layer that
      contains the last parameter.

    The other fields are described in `bayes.MAP`. Train to convergence, because the approximation
    is made where training ends. The approximation is exact for a linear model with known noise.

    `posterior.log_evidence` is the log density of the data, for `width=1`. With `"last_layer"`, the
    evidence is the log density of the data and of the parameters that stay at the mode. Use this
    evidence only to compare models in which these parameters are the same.

    >>> from eqxlike import bayes
    >>> method = bayes.Laplace(structure="kronecker", tune_prior=True)
    """

    structure: Structure | None = None
    predictive: Predictive = "linearised"
    tune_prior: bool = False
    layer: Which | None = None
    width: float | None = None

    def __check_init__(self):
        if isinstance(self.steps, str):
            raise ValueError(
                "Laplace: steps, the first argument, must be an integer of at least 1, got "
                f"{self.steps!r}. Pass the structure by keyword: "
                f'`bayes.Laplace(structure="last_layer")`.'
            )
        structures, predictives = (*get_args(Structure), None), get_args(Predictive)
        for name, words in (("structure", structures), ("predictive", predictives)):
            if getattr(self, name) not in words:
                raise ValueError(
                    f"Laplace: {name} must be one of {', '.join(map(repr, words))}, got "
                    f"{getattr(self, name)!r}."
                )
        if self.width is not None:
            positive_number(self.width, "Laplace: width")
        check_kind(self.tune_prior, bool, "Laplace: tune_prior", "a bool")
        if self.layer is not None and self.structure != "last_layer":
            raise ValueError(
                f'Laplace: layer needs structure="last_layer", but structure is {self.structure!r}.'
            )

    def structure_for(self, problem: Problem) -> Structure:
        """The structure of the precision for a problem."""
        if self.structure is not None:
            return self.structure
        return "full" if problem.size <= MAX_FULL else "last_layer"

    def check(self, problem: Problem) -> None:
        super().check(problem)
        self._check_size(problem)
        likelihood, prior = problem.target.likelihood, problem.target.prior
        if self.predictive == "probit" and not isinstance(
            likelihood, Bernoulli | Categorical | Gaussian
        ):
            raise ValueError(
                'Laplace: predictive="probit" needs classes, `bayes.Bernoulli` or '
                f"`bayes.Categorical`; the likelihood is {type(likelihood).__name__}. "
                '"linearised" supports every likelihood.'
            )
        if self.tune_prior:
            fixed = [
                part.path
                for part in parts_of(problem)
                if part.kind == "model" and name_of(prior, part) not in scales(prior)
            ]
            if fixed:
                raise ValueError(
                    "Laplace: tune_prior=True needs normal priors with a fixed scale, "
                    "`bayes.normal(loc, number)` or `dist.Normal(loc, number)`; these parameters "
                    f"have other priors: {', '.join(fixed)}."
                )

    def _check_size(self, problem: Problem) -> None:
        chosen = self.structure_for(problem)
        sizes = {
            structure: _num_stored(structure, self._parts(problem, structure))
            for structure in _NORMALS
            if structure == chosen or structure != "last_layer"
        }
        item = jnp.dtype(problem.dtype).itemsize
        if sizes[chosen] * item <= MAX_BYTES:
            return
        others = [repr(each) for each, size in sizes.items() if size * item <= MAX_BYTES]
        raise ValueError(
            f"Laplace: structure={chosen!r} would need {sizes[chosen] * item / 2**30:.1f} GiB "
            f"({sizes[chosen]:,} numbers) for {problem.size:,} unknowns; the limit is "
            f"{MAX_BYTES / 2**30:.0f} GiB. Use structure="
            f"{' or '.join([*others, repr('last_layer')])}."
        )

    @property
    def num_steps(self) -> int:
        return self.steps + self.tune_prior * self._num_tuning_steps

    @property
    def _num_tuning_steps(self) -> int:
        return math.ceil(_TUNING_FRACTION * self.steps)

    def _optimiser(self) -> optax.GradientTransformationExtraArgs:
        if self.optimiser is not None:
            return super()._optimiser()
        schedules = [
            optax.cosine_decay_schedule(self.learning_rate, num)
            for num in (self.steps, self._num_tuning_steps)
        ]
        schedule = optax.join_schedules(schedules, [self.steps])
        return optax.with_extra_args_support(optax.adam(schedule))

    def init(self, problem: Problem, key: PRNGKeyArray) -> Any:
        state = super().init(problem, key)
        if not self.tune_prior:
            return state
        return untuned(problem, *state)

    def step(self, problem: Problem, state: Any, index: Array, key: PRNGKeyArray) -> Step:
        if not self.tune_prior:
            return super().step(problem, state, index, key)
        every = max(1, self._num_tuning_steps // _NUM_TUNINGS)
        state = jax.lax.cond(
            (index >= self.steps) & ((index - self.steps) % every == 0),
            lambda: retuned(problem, state),
            lambda: state,
        )
        after, record = super().step(
            with_factors(problem, state.log_factors),
            Optimised(state.place, state.optimiser),
            index,
            key,
        )
        return state._replace(place=after.place, optimiser=after.optimiser), record

    def finish(
        self, problem: Problem, states: Any, records: Record, key: PRNGKeyArray
    ) -> LaplacePosterior:
        mode, log_factors, change = states.place[0], None, None
        if self.tune_prior:
            state = retuned(problem, jtu.tree_map(lambda each: each[0], states))
            (mode, log_factors, _), change = state.best, state.change
            problem = with_factors(problem, log_factors)
        around = self._around(problem, mode)
        normal = _NORMALS[self.structure_for(problem)](around)
        log_joint = around.log_likelihood() - around.negative_log_prior(around.centre)
        log_volume = around.centre.size * math.log(2 * math.pi) - normal.log_det_precision
        width = width_for(around, normal, self.width, key)
        return LaplacePosterior(
            mode, normal.times(width.value), log_joint + log_volume / 2, log_factors, change, width
        )

    def sample(
        self, problem: Problem, found: LaplacePosterior, num: int, key: PRNGKeyArray
    ) -> Draws:
        around = self._around(problem, found.mode)
        noise = jr.normal(key, (num, *around.centre.shape), found.mode.dtype)
        moved = around.centre[None] + found.normal.draw(noise)
        return jax.vmap(around.vector)(moved)

    def point_estimate(self, problem: Problem, found: LaplacePosterior) -> Float[Array, " d"]:
        return found.mode

    @property
    def remedy(self) -> str:
        if self.width is None:
            return 'Another structure, a narrower prior, or predictive="linearised" may help.'
        return "Use `width=None`, which chooses the width by leave-one-out, or another structure."

    @property
    def leaves_out(self) -> bool:
        return self.width is None

    def diagnosed(self, problem: Problem, found: LaplacePosterior) -> dict[str, Any]:
        if found.log_factors is not None:
            problem = with_factors(problem, found.log_factors)
        value, nll, least_nll, nll_of_one = map(float, found.width)
        shown = [
            f"structure {self.structure_for(problem)}",
            f"width {value:.3g}, leave-one-out NLL {nll:.4g}",
        ]
        known: dict[str, Any] = {}
        if self.width is None and value < 1:
            known["warnings"] = (
                f"the covariance was multiplied by {value:.3g}, because smaller widths improve the "
                f"NLL of left-out examples from {nll_of_one:.3g} (width=1, which approximates the "
                f"posterior) to {least_nll:.3g} nats. The draws are narrower than the posterior. A "
                "narrower prior, tune_prior=True, or `bayes.NUTS` may need no such correction.",
            )
        if found.log_factor_change is not None:
            shown += [
                f"prior scale of {name} {np.mean(scale):.3g}"
                for name, scale in scales(problem.target.prior).items()
            ]
            known["prior_change"] = float(found.log_factor_change)
        known["choice"] = "; ".join(shown)
        return known | self.diagnosed_at(problem, found.mode[None])

    def log_evidence(self, problem: Problem, found: LaplacePosterior) -> Float[Array, ""]:
        return found.log_evidence

    def outputs(
        self, problem: Problem, found: LaplacePosterior, draws: Unknowns, x: Any, key: PRNGKeyArray
    ) -> Shaped[Array, "S B ..."]:
        if self.predictive == "sampled":
            return super().outputs(problem, found, draws, x, key)
        around = self._around(problem, found.mode)
        num = jtu.tree_leaves(draws.model)[0].shape[0]
        struct = around.output
        is_probit = self.predictive == "probit" and not isinstance(
            problem.target.likelihood, Gaussian
        )
        if struct.size == 1 and num < 2 and not is_probit:
            raise ValueError(
                "Laplace: a single draw has no variance; use num_samples of at least 2, or "
                'predictive="sampled".'
            )
        noise = standard_noise(key, num, struct.size, found.mode.dtype)

        def of_input(x: Any) -> Float[Array, "S C"]:
            mean, covariance = outputs_and_covariance(around, found.normal, x)
            if is_probit:
                scale = jnp.sqrt(1 + math.pi / 8 * jnp.diagonal(covariance))
                return jnp.broadcast_to((mean / scale)[None], noise.shape)
            return mean[None] + noise @ positive_root(covariance).T

        bytes_of_one = 3 * struct.size * around.centre.nbytes + 2 * noise.nbytes
        size = around.batch_size(bytes_of_one, jtu.tree_leaves(x)[0].shape[0])
        outputs = jnp.moveaxis(jax.lax.map(of_input, x, batch_size=size), 1, 0)
        return outputs.reshape(*outputs.shape[:2], *struct.shape).astype(struct.dtype)

    def _around(self, problem: Problem, mode: Float[Array, " d"]) -> AroundMode:
        return AroundMode(problem, mode, self._parts(problem, self.structure_for(problem)))

    def _parts(self, problem: Problem, structure: Structure) -> tuple[Part, ...]:
        """The arrays of varying unknowns."""
        parts = parts_of(problem)
        if structure != "last_layer":
            return parts
        parameters = [part for part in parts if part.kind == "model"]
        if self.layer is None:
            varying = [part for part in parameters if part.layer == parameters[-1].layer]
        else:
            matches = functools.partial(path_matches, self.layer)
            varying = [part for part in parameters if matches(part.path, part.struct)]
        if not varying:
            raise ValueError(
                f"Laplace: layer {self.layer!r} matches no parameter. The parameters are "
                f"{', '.join(part.path for part in parameters)}."
            )
        return (*varying, *(part for part in parts if part.kind != "model"))


def _num_stored(structure: Structure, parts: tuple[Part, ...]) -> int:
    """How many numbers the curvature consists of."""
    if structure == "kronecker":
        return kronecker_size(parts)
    size = sum(part.size for part in parts)
    return size if structure == "diagonal" else size**2
