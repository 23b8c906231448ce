"""Laplace's approximation: a normal distribution around the mode."""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jaxtyping import Array, Float, PRNGKeyArray, Shaped

from ..._check_numbers import positive_number
from ..._module import Module
from ..._pytree import Which, path_matches, tree_at
from .._inference._method import Draws, Problem, Record, Step
from .._libraries import distributions, is_distribution
from .._likelihoods import Bernoulli, Categorical, Gaussian
from .._posterior import Unknowns
from .._priors import IndependentPrior, NormalPrior, Prior, PriorByPath, PriorOfLayers
from .._priors import _name as pattern_name
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
from ._gauss_newton import (
    AroundMode,
    Part,
    block_size,
    parts_of,
    positive_factor,
    prior_diagonal,
)

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
# The most unknowns of which the whole precision is kept by default: its cost is cubic.
_MAX_FULL = 2000
# Steps after those to the mode, as a part of them, and how often the scales are tuned in these.
_REFITTED, _NUM_TUNINGS = 0.5, 5


class LaplacePosterior(Module):
    """What `bayes.Laplace` found: the `found` of a `bayes.FittedPosterior`.

    - `mode`: the most probable vector of unknowns in linked space.
    - `normal`: the distribution of the unknowns that vary, minus their mode.
    - `log_evidence`: the log of the density of the data.
    - `log_factors`: by how much the scales of the prior were tuned; `None` if they were not.
    - `log_factor_change`: by how much the last tuning changed them.
    - `width`: what the covariance was multiplied by, and is so in `normal`.
    - `held_out_nll`: by leave-one-out, in nats an example.
    """

    mode: Float[Array, " d"]
    normal: Normal
    log_evidence: Float[Array, ""]
    log_factors: Float[Array, " g"] | None
    log_factor_change: Float[Array, ""] | None
    width: Float[Array, ""]
    held_out_nll: Float[Array, ""]


class Tuned(NamedTuple):
    """A descent, and the logs of the factors of the prior's scales."""

    place: Float[Array, " d"]
    optimiser: Any
    log_factors: Float[Array, " g"]


class Laplace(Descent):
    """A normal distribution around the mode, for the uncertainty of a network trained anyway.

    It costs about two trainings, and `"full"` the square of the unknowns in memory and their cube
    in time. Do not use it where the exact posterior (`bayes.NUTS`) or several modes
    (`bayes.DeepEnsemble`) matter.

    References: MacKay (1992), "A Practical Bayesian Framework for Backpropagation Networks";
    Daxberger et al. (2021), "Laplace Redux".

    - The precision is `P = sum_n J_n^T L_n J_n + P_0` (`_curvature`): `J_n` is the Jacobian of the
      outputs for example `n` and of the unknowns of the likelihood, `L_n` the Hessian of minus its
      log density in both, and `P_0` the Hessian of minus the log prior, all in linked space.
    - The log evidence is `log p(data, mode) + (k log 2 pi - log det P) / 2`, for the `k` unknowns
      that vary.
    - The outputs for an input `x` have the distribution `N(f(x), width J P^-1 J^T)`, with `J` the
      Jacobian at `x` (`_output_moments`).

    The fields:

    - `structure`: how much of the precision is kept: `"full"`, the default up to 2,000 unknowns;
      `"last_layer"`, beyond, all of it for the last layer and the unknowns of prior and likelihood,
      while others stay at the mode; `"kronecker"`, a Kronecker product for each matrix or kernel,
      and all of each other array; `"diagonal"`.
    - `predictive`: what predictions are made from. `"linearised"`, the normal distribution of the
      outputs of the linearised network, which fits the Gauss-Newton matrix (Immer, Korzepa and
      Bauer, 2021, "Improving Predictions of Bayesian Neural Nets via Local Linearization"): for
      one output the `S` draws of it are quantiles, with the exact mean and variance; for `C`
      outputs the mean and covariance are exact if `S > C`. `"probit"`, for classes, logits at the
      mode divided by `sqrt(1 + pi / 8 * variance)` (MacKay, 1992, "The Evidence Framework Applied
      to Classification Networks"; Gibbs, 1997, "Bayesian Gaussian Processes for Regression and
      Classification"); for `bayes.Gaussian` it is `"linearised"`. `"sampled"`, networks with drawn
      parameters.
    - `width`: what the covariance is multiplied by, since that of a network that fits its data is
      as wide as the prior. By default one of six numbers up to 1: the best by approximate
      leave-one-out on at most 512 examples, or nearly zero, the mode alone, if none is better by
      more than two standard errors. 1 is the approximation of the posterior itself.
    - `tune_prior`: whether the scales of the prior, normal with a number as scale, also of each
      pattern of `bayes.prior_by_path`, are chosen to maximise the evidence, in half as many steps
      again, in which mode and scales are fitted in turn (Immer et al., 2021, "Scalable Marginal
      Likelihood Estimation for Model Selection in Deep Learning"). It helps where the scale is a
      guess; a scale that held-out data chose may predict better. `posterior.diagnostics.choice`
      has the scales.
    - `layer`: for `"last_layer"`, which parameters vary, a pattern of paths as for
      `bayes.prior_by_path`. By default those of the layer of the last parameter.

    The other fields are those of `bayes.MAP`. Train to convergence: the approximation is made where
    training ends. It is exact for a linear model with known noise, with
    `structure="full", width=1`.

    `posterior.log_evidence` is the log density of the data, for a `width` of 1; with `"last_layer"`
    that of the data and the parameters that stay at the mode, so that it compares only models in
    which these are the same.

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
                f"{self.steps!r}. Give the structure by its name: "
                f'`bayes.Laplace(structure="last_layer")`.'
            )
        for name, words in (("structure", Structure), ("predictive", Predictive)):
            if name == "structure" and self.structure is None:
                continue
            if getattr(self, name) not in get_args(words):
                raise ValueError(
                    f"Laplace: {name} must be one of {', '.join(map(repr, get_args(words)))}, got "
                    f"{getattr(self, name)!r}."
                )
        if self.width is not None:
            positive_number(self.width, "Laplace: width")
        if not isinstance(self.tune_prior, bool):
            raise TypeError(f"Laplace: tune_prior must be a bool, got {self.tune_prior!r}.")
        if self.layer is not None and self.structure != "last_layer":
            raise ValueError(
                f'Laplace: layer is for structure="last_layer", and structure is '
                f"{self.structure!r}."
            )

    def structure_for(self, problem: Problem) -> Structure:
        """The structure that is kept of the precision for a problem."""
        if self.structure is not None:
            return self.structure
        return "full" if problem.size <= _MAX_FULL else "last_layer"

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
        if self.tune_prior:
            fixed = [
                part.path
                for part in parts_of(problem)
                if part.kind == "model" and _name_of(prior, part) not in _scales(prior)
            ]
            if fixed:
                raise ValueError(
                    "Laplace: tune_prior=True chooses the scales of normal priors, "
                    "`bayes.normal(loc, number)` or `dist.Normal(loc, number)`, and the prior of "
                    f"{', '.join(fixed)} is another."
                )

    def _check_size(self, problem: Problem) -> None:
        chosen = self.structure_for(problem)
        sizes = {
            structure: size(self._parts(problem, structure))
            for structure, (_, size) in _CURVATURES.items()
            if structure == chosen or structure != "last_layer"
        }
        item = jnp.dtype(problem.dtype).itemsize
        if sizes[chosen] * item <= _MAX_BYTES:
            return
        others = [repr(each) for each, size in sizes.items() if size * item <= _MAX_BYTES]
        raise ValueError(
            f"Laplace: structure={chosen!r} would keep {sizes[chosen]:,} numbers, "
            f"{sizes[chosen] * item / 2**30:.1f} GiB, for {problem.size:,} unknowns; at "
            f"most {_MAX_BYTES / 2**30:.0f} GiB are taken. Structures that do: "
            f"{', '.join([*others, repr('last_layer')])}."
        )

    @property
    def num_steps(self) -> int:
        return self.steps + self.tune_prior * self._num_refitted

    @property
    def _num_refitted(self) -> int:
        return math.ceil(_REFITTED * self.steps)

    def _optimiser(self) -> optax.GradientTransformationExtraArgs:
        if self.optimiser is not None:
            return super()._optimiser()
        schedules = [
            optax.cosine_decay_schedule(self.learning_rate, num)
            for num in (self.steps, self._num_refitted)
        ]
        schedule = optax.join_schedules(schedules, [self.steps])
        return optax.with_extra_args_support(optax.adam(schedule))

    def init(self, problem: Problem, key: PRNGKeyArray) -> Any:
        state = super().init(problem, key)
        if not self.tune_prior:
            return state
        num = len(_scales(problem.target.prior))
        return Tuned(state.place, state.optimiser, jnp.zeros(num, state.place.dtype))

    def step(self, problem: Problem, state: Any, index: Array, key: PRNGKeyArray) -> Step:
        if not self.tune_prior:
            return super().step(problem, state, index, key)
        every = max(1, self._num_refitted // _NUM_TUNINGS)
        log_factors = jax.lax.cond(
            (index >= self.steps) & ((index - self.steps) % every == 0),
            lambda: _tuned(problem, state.place, state.log_factors),
            lambda: state.log_factors,
        )
        after, record = super().step(
            _with_factors(problem, log_factors), Optimised(state.place, state.optimiser), index, key
        )
        return Tuned(after.place, after.optimiser, log_factors), record

    def finish(
        self, problem: Problem, states: Any, records: Record, key: PRNGKeyArray
    ) -> LaplacePosterior:
        mode, log_factors, change = states.place[0], None, None
        if self.tune_prior:
            before = states.log_factors[0]
            log_factors = _tuned(problem, mode, before)
            change = jnp.max(jnp.abs(log_factors - before))
            problem = _with_factors(problem, log_factors)
        around = self._around(problem, mode)
        normal = _CURVATURES[self.structure_for(problem)][0](around).normal()
        log_joint = around.log_likelihood() - around.negative_log_prior(around.centre)
        log_volume = around.centre.size * math.log(2 * math.pi) - normal.log_det_precision
        widths = jnp.asarray(_WIDTHS if self.width is None else [self.width], mode.dtype)
        width, nll = _least_loss(widths, _leave_one_out(around, normal, widths, key))
        return LaplacePosterior(
            mode, normal.times(width), log_joint + log_volume / 2, log_factors, change, width, nll
        )

    def _given(self, problem: Problem, found: LaplacePosterior) -> Problem:
        """The problem with the scales that were tuned."""
        return problem if found.log_factors is None else _with_factors(problem, found.log_factors)

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
        return "`width=None`, by which leave-one-out chooses it, or another structure may help."

    def diagnosed(self, problem: Problem, found: LaplacePosterior) -> dict[str, Any]:
        given = self._given(problem, found)
        shown = [
            f"structure {self.structure_for(problem)}",
            f"width {float(found.width):.3g}, leave-one-out NLL {float(found.held_out_nll):.4g}",
        ]
        known: dict[str, Any] = {}
        if found.log_factor_change is not None:
            scales = _scales(given.target.prior).items()
            shown += [f"prior scale of {name} {np.mean(each):.3g}" for name, each in scales]
            known["prior_change"] = float(found.log_factor_change)
        known["choice"] = "; ".join(shown)
        return known | self.diagnosed_at(given, found.mode[None])

    def log_evidence(self, problem: Problem, found: LaplacePosterior) -> Float[Array, ""]:
        return found.log_evidence

    def outputs(
        self, problem: Problem, found: LaplacePosterior, draws: Unknowns, x: Any, key: PRNGKeyArray
    ) -> Shaped[Array, "S B ..."]:
        if self.predictive == "sampled":
            return super().outputs(problem, found, draws, x, key)
        around = self._around(problem, found.mode)
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

    def _around(self, problem: Problem, mode: Float[Array, " d"]) -> AroundMode:
        return AroundMode(problem, mode, self._parts(problem, self.structure_for(problem)))

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


# --- The scales of priors, chosen by the evidence ---


# How far the ratio of two scales is believed to be the given one, as the standard deviation of its
# log. Data hardly tell the scales of two layers apart where activations are homogeneous, as ReLU:
# what makes one layer larger and the next one smaller changes nothing.
_RATIO_DEVIATION = 0.1
_MAX_LOG_FACTOR = math.log(1e6)
_NEWTON_STEPS = 40


def _map_scales(prior: Prior, function: Callable[[str, Any], Any], name: str = "**") -> Prior:
    """The prior with `function` of name and scale in place of the scale of each normal prior."""
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


def _scales(prior: Prior) -> dict[str, Any]:
    """The scales that can be tuned, by the pattern or path of what they are for."""
    found: dict[str, Any] = {}
    _map_scales(prior, lambda name, scale: found.setdefault(name, scale))
    return found


def _name_of(prior: Prior, part: Part, name: str = "**") -> str:
    """The name that the prior of a parameter has among `_scales`."""
    leaf = jax.ShapeDtypeStruct(part.shape, jnp.float32)
    if isinstance(prior, PriorByPath):
        place = prior._place(part.path, leaf, {part.path: leaf})
        return _name_of(prior.priors[place], part, pattern_name(prior.which[place], place))
    return part.path if isinstance(prior, PriorOfLayers) else name


def _with_factors(problem: Problem, log_factors: Float[Array, " g"]) -> Problem:
    """The problem with scales times `exp(log_factors)`, in the order of `_scales`."""
    factors = dict(zip(_scales(problem.target.prior), jnp.exp(log_factors), strict=True))
    prior = _map_scales(
        problem.target.prior,
        lambda name, scale: jnp.asarray(scale, problem.dtype) * factors[name].astype(problem.dtype),
    )
    return tree_at(lambda problem: problem.target.prior, problem, prior)


def _tuned(
    problem: Problem, mode: Float[Array, " d"], log_factors: Float[Array, " g"]
) -> Float[Array, " g"]:
    """The factors of the scales that maximise the log evidence at a fixed mode.

    The curvature is that of `"kronecker"`, whatever structure is kept, or the diagonal where that
    needs too much memory. With eigenvalues `e_i` of the likelihood's curvature, and `t_i` of the
    prior's, the log evidence is `log p(mode) - sum_i log(e_i + t_i) / 2`, but for a constant
    (MacKay, 1992, "Bayesian Interpolation"). It is concave in the logs of the scales, and Newton's
    method, with steps of at most 1, finds its maximum. A normal prior on the logs of the scales'
    ratios is added, around those given.

    **Arguments:**

    - `log_factors`: those of the scales for which `mode` was found.
    """
    parts = parts_of(problem)
    given = AroundMode(_with_factors(problem, log_factors), mode, parts)
    is_small = kronecker_size(parts) * mode.dtype.itemsize <= _MAX_BYTES
    curvature = kronecker_curvature(given, 1) if is_small else diagonal_curvature(given)
    names = list(_scales(problem.target.prior))
    spectra = []
    for part, block in zip(parts, curvature.blocks, strict=True):
        name = _name_of(problem.target.prior, part) if part.kind == "model" else ""
        if name in names:
            of_prior = block.diagonal_of(prior_diagonal(given, part))
            of_data = jnp.maximum(block.values - of_prior, 0)
            spectra.append((names.index(name), of_data, of_prior))

    def log_evidence(changes: Float[Array, " g"]) -> Float[Array, ""]:
        changed = AroundMode(_with_factors(problem, log_factors + changes), mode, parts)
        total = -changed.negative_log_prior(mode)
        for group, of_data, of_prior in spectra:
            total -= jnp.sum(jnp.log(of_data + of_prior * jnp.exp(-2 * changes[group]))) / 2
        logs = log_factors + changes
        return total - jnp.sum((logs - jnp.mean(logs)) ** 2) / (2 * _RATIO_DEVIATION**2)

    def newton(_: int, changes: Float[Array, " g"]) -> Float[Array, " g"]:
        gradient, hessian = jax.grad(log_evidence)(changes), jax.hessian(log_evidence)(changes)
        step = -jnp.linalg.solve(hessian - 1e-3 * jnp.eye(len(names), dtype=mode.dtype), gradient)
        limit = _MAX_LOG_FACTOR
        step = step / jnp.maximum(1, jnp.max(jnp.abs(step)))
        return jnp.clip(changes + step, -limit - log_factors, limit - log_factors)

    return log_factors + jax.lax.fori_loop(0, _NEWTON_STEPS, newton, jnp.zeros_like(log_factors))


# --- How wide the posterior is, chosen by leave-one-out ---


# By what the covariance may be multiplied. A width of zero, the mode alone, is nearly the first.
_WIDTHS = (1e-6, 1 / 256, 1 / 64, 1 / 16, 1 / 4, 1.0)
_MAX_HELD_OUT, _NUM_DRAWS = 512, 64
_MAX_LEVERAGE = 0.99


def _leave_one_out(
    around: AroundMode, normal: Normal, widths: Float[Array, " w"], key: PRNGKeyArray
) -> Float[Array, "w n"]:
    """The NLL, in nats, of each of some examples predicted without it, for some widths.

    With `V = J P^-1 J^T` of an example, `r` the gradient of its log density in the outputs and
    `R^T R` minus its Hessian, a Newton step of the linearised network takes the example out: it
    moves the outputs by `-W r`, for `W = V + V R^T (I - R V R^T)^-1 R V`, which is their covariance
    then (Pregibon, 1981, "Logistic Regression Diagnostics"; Rad and Maleki, 2020, "A Scalable
    Estimate of the Out-of-Sample Prediction Error via Approximate Leave-One-Out
    Cross-Validation"). At most 512 examples, drawn at random, are taken out.
    """
    target, mode = around.problem.target, around.mode
    order_key, noise_key = jr.split(key)
    order = jr.permutation(order_key, target.num_data)[:_MAX_HELD_OUT]
    own, struct = around.problem.unknowns(mode).likelihood, around.output
    if struct.size == 1:
        noise = _quantiles(_NUM_DRAWS, mode.dtype)[:, None]
    else:
        noise = _whitened_noise(noise_key, _NUM_DRAWS, struct.size, mode.dtype)

    def of_example(index: Array) -> Float[Array, " w"]:
        x, y = jax.tree.map(lambda leaf: leaf[index], target.data)

        def log_prob(outputs: Array) -> Array:
            outputs = outputs.reshape(struct.shape).astype(struct.dtype)
            return target.likelihood.log_prob(outputs, own, y).astype(mode.dtype)

        jacobian, outputs = around.jacobian(x)
        covariance = normal.covariance_of(jacobian)
        root = positive_factor(-jax.hessian(log_prob)(outputs))
        leverages, basis = jnp.linalg.eigh(root @ covariance @ root.T)
        rows = basis.T @ root @ covariance
        free = 1 - jnp.clip(leverages, 0, _MAX_LEVERAGE)
        covariance = covariance + rows.T @ (rows / free[:, None])
        outputs = outputs - covariance @ jax.grad(log_prob)(outputs)
        moved = noise @ _symmetric_root(covariance[None])[0]

        def at(width: Array) -> Array:
            return jax.nn.logsumexp(jax.vmap(log_prob)(outputs + jnp.sqrt(width) * moved))

        return math.log(_NUM_DRAWS) - jax.vmap(at)(widths)

    size = block_size(3 * struct.size * around.centre.nbytes, len(order))
    return jax.lax.map(of_example, order, batch_size=size).T


def _least_loss(
    widths: Float[Array, " w"], nlls: Float[Array, "w n"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The width that predicts best the examples left out, and its mean NLL.

    The first, nearly the mode alone, is left only for one that is better by more than two standard
    errors: where classes can be separated, a Newton step is far too pessimistic about the mode.
    """
    gains, num = nlls[0] - nlls, nlls.shape[-1]
    gain, error = jnp.mean(gains, axis=-1), jnp.std(gains, axis=-1) / math.sqrt(max(num - 1, 1))
    best = jnp.argmax(jnp.where((gain > 2 * error) & (num > 1), gain, 0))
    return widths[best], jnp.mean(nlls[best])


# --- Predictions ---


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
