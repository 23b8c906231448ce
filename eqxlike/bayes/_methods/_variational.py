"""Variational inference: the evidence lower bound for Bayesian layers, mean field, Pathfinder."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from ..._check_numbers import positive_number, whole_number
from ..._dtypes import wider
from ...nn import Conv, Shared, kl_divergence, with_perturbation
from ...nn._bayesian import Estimator, bayesian_from_parts, draw_gaussian, layers_with_estimators
from ...nn._inputs import takes_key
from .._distributions import by_path
from .._libraries import blackjax, is_free, is_normal
from .._method import Draws, Method, Problem, Record, Step, with_keys
from .._posterior import Unknowns, nodes_of, num_examples
from ._descent import Descent, Optimised, descend

Model = TypeVar("Model", bound=Any)
Batch = TypeVar("Batch", bound=Any)


def negative_elbo(
    model: Model,
    log_likelihood: Callable[[Model, Batch, PRNGKeyArray], Float[Array, ""]],
    batch: Batch,
    *,
    num_data: int,
    key: PRNGKeyArray,
    kl_weight: float | Float[Array, ""] = 1.0,
    num_samples: int = 1,
    per_example: bool = False,
) -> Float[Array, ""]:
    """An unbiased estimate of the negative evidence lower bound from a minibatch.

    For N examples, a batch of B, and S draws per example:

        -ELBO ~ kl_weight * KL(q || p) - N / (B S) sum_{b, s} log p(y_b | x_b, w_bs),   w_bs ~ q

    Graves (2011), "Practical Variational Inference for Neural Networks"; Blundell, Cornebise,
    Kavukcuoglu & Wierstra (2015), "Weight Uncertainty in Neural Networks". The factor N / B scales
    the batch to the whole data set, so that the KL counts once. Each example has its own key,
    because independent noise averages out over the batch (Kingma, Salimans & Welling 2015). In each
    of the S draws, examples share the noise that `nn.with_perturbation` describes.

    **Arguments:**

    - `model`: any pytree. The KL is summed over its `nn.BayesianLayer`s.
    - `log_likelihood`: `log_likelihood(model, example, key)` returns the log density of one
      example, shape `()`. `example` is one example of the batch, without the leading axis. Pass
      `key` on to `model(x, key=key)`.
    - `batch`: arrays with leading axis B.
    - `num_data`: N, the number of examples in the training data.
    - `key`: random key for the draws.
    - `kl_weight`: factor of the KL; below 1 for a tempered posterior or a warm-up. Only 1 gives a
      bound on the evidence.
    - `num_samples`: number of draws per example, S.
    - `per_example`: whether to divide by N, so that the loss does not grow with the data.

    **Returns:** shape `()`.

    **Raises:** `ValueError` if the arrays of `batch` have different leading lengths, if the log
    likelihood of an example is not of shape `()`, or if `num_data` or `num_samples` is not a
    positive integer.

    >>> import eqxlike as eqx, jax, jax.numpy as jnp
    >>> from eqxlike import nn
    >>> model = nn.BayesianLinear(3, "scalar", key=jax.random.key(0))
    >>> def log_likelihood(model, example, key):
    ...     x, y = example
    ...     return jax.scipy.stats.norm.logpdf(y, model(x, key=key))
    >>> batch = (jnp.ones((5, 3)), jnp.zeros(5))
    >>> loss = eqx.filter_jit(negative_elbo)
    >>> loss(model, log_likelihood, batch, num_data=50, key=jax.random.key(1)).shape
    ()
    """
    num_data = whole_number(num_data, "num_data")
    num_samples = whole_number(num_samples, "num_samples")
    batch_size = num_examples(batch, "negative_elbo")

    def one_draw(shared_key: PRNGKeyArray, keys: PRNGKeyArray) -> Array:
        network = with_perturbation(model, shared_key)
        terms = jax.vmap(functools.partial(log_likelihood, network))(batch, keys)
        if jnp.shape(terms) != (batch_size,):
            raise ValueError(
                "log_likelihood must return shape () for one example, got shape "
                f"{jnp.shape(terms)[1:]}."
            )
        return terms

    shared_keys = jr.split(jr.fold_in(key, 2**32 - 1), num_samples)
    keys = jr.split(key, (num_samples, batch_size))
    log_likelihoods = jax.vmap(one_draw)(shared_keys, keys)
    kl = kl_divergence(model)
    dtype = wider(kl.dtype, log_likelihoods.dtype)
    expected = jnp.mean(log_likelihoods.astype(dtype))
    kl = kl.astype(dtype) * jnp.asarray(kl_weight, dtype)
    return kl / num_data - expected if per_example else kl - num_data * expected


# --- A normal distribution for each unknown ---


class Normals(NamedTuple):
    """Independent normal distributions of the unknowns in linked space.

    The fields are vectors; inside a loss they are `Unknowns`.

    - `mean`: the means.
    - `rho`: the standard deviations are `softplus(rho)`.
    """

    mean: Any
    rho: Any

    @property
    def scale(self) -> Float[Array, " d"]:
        """The standard deviations."""
        return jax.nn.softplus(self.rho)


class MeanField(Descent):
    """Mean-field variational inference: independent normals, for large data in minibatches.

    A step takes 2 to 3 times the time of a step of `bayes.MAP`, and twice the memory. Do not use
    `MeanField` with a wide prior: it then usually predicts worse than `bayes.MAP`.

    Each unknown has its own normal distribution in linked space. The loss is the negative evidence
    lower bound; for `N` examples

        KL(q || p) - sum_n E_q log p(y_n | x_n, unknowns)

    (Graves, 2011; Blundell, Cornebise, Kavukcuoglu and Wierstra, 2015, "Weight Uncertainty in
    Neural Networks"). The approximation is too narrow if unknowns are correlated. The KL is exact
    for parameters with normal priors; otherwise it is estimated from the draw of the step.

    - `steps`, `learning_rate`, `optimiser`, `batch_size`: as in `bayes.MAP`.
    - `estimator`: how layers `nn.Linear` and `nn.Conv` are sampled. `"local"` samples the output
      for each example and has the least noise (Kingma, Salimans and Welling, 2015, "Variational
      Dropout and the Local Reparameterization Trick"). `"flipout"` samples weights once for all
      examples, with random signs for each example (Wen, Vicol, Ba, Tran and Grosse, 2018).
      `"weights"` samples weights once for all examples. `"local"` and `"flipout"` need a model that
      is called as `model(x, key=key)`. The default for such a model is `"local"`. If the model has
      a convolution, the default is `"flipout"`, because `"local"` would sample each position as if
      the position had its own kernel. For other models the default is `"weights"`. A model that
      calls a layer more than once per example needs `"weights"`. The other estimators would sample
      again at each call.
    - `draws`: number of draws of the unknowns per step, over which the bound is averaged.
    - `kl_weight`: factor of the KL; below 1 for a tempered (cold) posterior, for which the loss is
      not a bound on the evidence (Wenzel et al., 2020, "How Good is the Bayes Posterior in Deep
      Neural Networks Really?").
    - `warm_up`: number of steps over which the KL weight rises from 0.
    - `initial_scale`: initial standard deviations, as a fraction of the standard deviation of the
      entries of each array. Bayesian layers of `nn` start with their own standard deviations.

    >>> from eqxlike import bayes
    >>> method = bayes.MeanField(steps=3000, batch_size=128, estimator="flipout")
    """

    remedy = 'More steps, a narrower prior, or estimator="local" may help.'

    estimator: Estimator | None = None
    draws: int = 1
    kl_weight: float = 1.0
    warm_up: int = 0
    initial_scale: float = 0.1

    def __check_init__(self):
        whole_number(self.draws, "MeanField: draws")
        whole_number(self.warm_up, "MeanField: warm_up", least=0)
        positive_number(self.kl_weight, "MeanField: kl_weight")
        positive_number(self.initial_scale, "MeanField: initial_scale")
        if self.estimator not in (None, "local", "flipout", "weights"):
            raise ValueError(
                'MeanField: estimator must be "local", "flipout" or "weights", got '
                f"{self.estimator!r}."
            )

    def check(self, problem: Problem) -> None:
        super().check(problem)
        network = problem.target.network
        if self.estimator in ("local", "flipout") and not takes_key(network):
            raise ValueError(
                f'MeanField: estimator "{self.estimator}" calls the model as `model(x, key=key)`, '
                f"but {type(network).__name__} takes no `key`. Write `def __call__(self, x, *, "
                'key=None)` and pass the key to its layers, or use estimator="weights".'
            )
        if self.estimator in ("local", "flipout") and nodes_of(Shared, network):
            raise ValueError(
                f'MeanField: estimator "{self.estimator}" samples each layer separately, but '
                f"{type(network).__name__} has layers that share arrays by `nn.Shared`: use "
                'estimator="weights".'
            )

    def doubts(self, problem: Problem) -> tuple[str, ...]:
        return ()

    def init(self, problem: Problem, key: PRNGKeyArray) -> Optimised:
        mean = problem.initial(key)
        scale = self.initial_scale * problem.spread(mean)
        own = problem.target.initial_scales
        if own is not None:
            scale = _with_own(problem, scale, own)
        # The inverse of softplus.
        rho = scale + jnp.log(-jnp.expm1(-scale))
        place = Normals(mean, rho)
        return Optimised(place, self._optimiser().init(place))

    def step(self, problem: Problem, state: Optimised, index: Array, key: PRNGKeyArray) -> Step:
        weight = jnp.asarray(self.kl_weight, problem.dtype)
        if self.warm_up:
            done = (index + 1).astype(problem.dtype) / self.warm_up
            weight = weight * jnp.minimum(done, 1)
        batch_key, key = jr.split(key)
        batch = problem.batch(batch_key, self.batch_size) or problem.target.data
        keys = jr.split(key, self.draws)

        def loss(place: Normals) -> Array:
            place = Normals(*map(problem.unflatten, place))

            def of_draw(key: PRNGKeyArray) -> Array:
                return self._loss_of_draw(problem, place, batch, weight, key)

            # Without vmap, a single draw is cheaper.
            return of_draw(keys[0]) if self.draws == 1 else jnp.mean(jax.vmap(of_draw)(keys))

        state, value = descend(self._optimiser(), problem.differentiable(loss), state)
        return state, {"loss": value}

    def _loss_of_draw(
        self, problem: Problem, place: Normals, batch: Any, weight: Array, key: PRNGKeyArray
    ) -> Array:
        """The negative bound per example, estimated from one draw."""
        draw_key, key = jr.split(key)
        # Each array has its own key, so that XLA removes the sampling of unused arrays.
        linked = with_keys(draw_gaussian, draw_key, place.mean, place.rho)
        log_likelihood = jnp.mean(self._log_likelihood(problem, place, linked, batch, key))
        kl = _kl(problem, place, linked)
        return weight * kl / problem.target.num_data - log_likelihood

    def _log_likelihood(
        self, problem: Problem, place: Normals, linked: Unknowns, batch: Any, key: PRNGKeyArray
    ) -> Float[Array, " B"]:
        """The log density of each example, for one draw in total or for one draw per example."""
        target = problem.target
        unknowns, _ = target.constrain(linked)
        estimator = self._estimator_of(target.network)
        if estimator == "weights":
            return target.log_likelihood(unknowns, batch)
        model = _with_random_layers(problem, place, unknowns, estimator)
        shared_key, key = jr.split(key)
        model = with_perturbation(model, shared_key)
        x, y = batch
        keys = jr.split(key, num_examples(batch, "MeanField"))

        def of_one(x: Any, y: Any, key: PRNGKeyArray) -> Array:
            return target.likelihood.log_prob(model(x, key=key), unknowns.likelihood, y)

        return jax.vmap(of_one)(x, y, keys)

    def _estimator_of(self, network: Any) -> Estimator:
        if self.estimator is not None:
            return self.estimator
        if not takes_key(network) or nodes_of(Shared, network):
            return "weights"
        return "flipout" if nodes_of(Conv, network) else "local"

    def finish(
        self, problem: Problem, states: Optimised, records: Record, key: PRNGKeyArray
    ) -> Normals:
        return jtu.tree_map(lambda leaf: leaf[0], states.place)

    def point_estimate(self, problem: Problem, found: Normals) -> Float[Array, " d"]:
        return found.mean

    def sample(self, problem: Problem, found: Normals, num: int, key: PRNGKeyArray) -> Draws:
        noise = jr.normal(key, (num, problem.size), found.mean.dtype)
        return found.mean[None] + found.scale[None] * noise


def _kl(problem: Problem, place: Normals, linked: Unknowns) -> Float[Array, ""]:
    """KL(q || prior), exact for parameters with normal priors, otherwise estimated from the draw.

    For a posterior `N(mean, s^2)`, the expected log density of the prior `N(m, p^2)` is its log
    density at `mean`, minus `s^2 / (2 p^2)`.
    """
    target = problem.target
    priors = target.parameter_priors(target.constrain(linked)[0])
    # Layers and draws compute the same expression, so XLA computes it only once.
    scales = jtu.tree_map(jax.nn.softplus, place.rho)
    leaves, treedef = jtu.tree_flatten(linked.model)
    excess = jnp.zeros((), problem.dtype)
    parts = priors.values(), jtu.tree_leaves(place.mean.model), jtu.tree_leaves(scales.model)
    for index, (prior, mean, scale) in enumerate(zip(*parts, strict=True)):
        if is_normal(prior):
            leaves[index] = mean
            excess += jnp.sum(scale**2 / prior.variance) / 2
    mixed = Unknowns(jtu.tree_unflatten(treedef, leaves), linked.likelihood, linked.prior)
    unknowns, log_det = target.constrain(mixed)
    log_prior = target.log_prior(unknowns) + log_det - excess
    log_scales = sum(jnp.sum(jnp.log(scale)) for scale in jtu.tree_leaves(scales))
    entropy = log_scales + problem.size * (1 + math.log(2 * math.pi)) / 2
    return -entropy - log_prior


def _with_random_layers(
    problem: Problem, place: Normals, unknowns: Unknowns, estimator: Estimator
) -> Any:
    """The network of a draw, with Bayesian layers in place of `Linear` and `Conv` layers."""
    target = problem.target
    priors = target.parameter_priors(unknowns).values()
    means, rhos = (jtu.tree_leaves(each.model) for each in (place.mean, place.rho))
    treedef = jtu.tree_structure(unknowns.model)
    rho_tree = jtu.tree_unflatten(
        treedef, [rho if is_free(prior) else None for prior, rho in zip(priors, rhos, strict=True)]
    )
    is_covered = by_path(layers_with_estimators(target.model(unknowns), rho_tree))
    drawn = by_path(unknowns.model).items()
    leaves = [
        mean if is_covered[path] else leaf for (path, leaf), mean in zip(drawn, means, strict=True)
    ]
    tree = jtu.tree_unflatten(treedef, leaves)
    network = target.model(Unknowns(tree, unknowns.likelihood, unknowns.prior))
    return bayesian_from_parts(network, rho_tree, estimator, are_rhos=True)


def _with_own(problem: Problem, scale: Float[Array, " d"], own: PyTree) -> Float[Array, " d"]:
    """The standard deviations `scale`, with the standard deviations `own` for Bayesian layers."""
    linked, known = problem.unflatten(scale), by_path(own)
    leaves = [
        known.get(path, leaf).astype(leaf.dtype) for path, leaf in by_path(linked.model).items()
    ]
    model = jtu.tree_unflatten(jtu.tree_structure(linked.model), leaves)
    return problem.flatten(Unknowns(model, linked.likelihood, linked.prior))


# --- Pathfinder: normal approximations along the paths of L-BFGS ---


# Maximum number of gradients of a line search.
_MAX_GRADIENTS = 30


class Path(NamedTuple):
    """The result of one path.

    - `draws`: draws from the best normal distribution of the path.
    - `log_ratios`: log posterior density minus log normal density of each draw, in nats.
    - `end`: the last position of the path.
    """

    draws: Float[Array, "*n d"]
    log_ratios: Float[Array, "*n"]
    end: Float[Array, "*c d"]


class Resampled(NamedTuple):
    """Draws of all paths with their importance weights.

    - `end`: the last position of the path that ends at the highest log density.
    - `probabilities`: normalised importance weights of the draws.
    - `log_evidence`: log of the mean ratio of the densities.
    - `pareto_k`: estimated Pareto shape of the largest ratios. Above 0.7, a few draws dominate.
    """

    end: Float[Array, " d"]
    draws: Float[Array, "n d"]
    probabilities: Float[Array, " n"]
    log_evidence: Float[Array, ""]
    pareto_k: Float[Array, ""]


class Pathfinder(Method):
    """Pathfinder: normal approximations along the path of L-BFGS, for simple posteriors.

    It costs `paths` runs of L-BFGS, `elbo_draws` log densities at each position of a path, and
    memory for `paths * draws` draws. Do not use it for networks: their posterior is usually far
    from normal, so that a few draws have all the weight. `diagnostics.pareto_k` shows this.

    At each position of a path, the inverse Hessian estimate of L-BFGS defines a normal
    distribution. A path returns draws from the distribution with the largest ELBO. The draws of all
    paths are resampled by importance weights, with the largest weights smoothed (Zhang, Carpenter,
    Gelman and Vehtari, 2022, "Pathfinder: Parallel Quasi-Newton Variational Inference"; Vehtari et
    al., 2024, "Pareto Smoothed Importance Sampling"; BlackJAX's implementation). The weights also
    estimate the evidence.

    - `paths`: number of paths. Their initial values are more dispersed than the posterior.
    - `path_steps`: maximum number of steps of a path.
    - `history`: number of steps that the inverse Hessian estimate uses.
    - `elbo_draws`: number of draws for the ELBO at each position.
    - `draws`: number of draws that each path returns.

    >>> from eqxlike import bayes
    >>> method = bayes.Pathfinder(paths=4)
    """

    remedy = "Try `bayes.Laplace`, or Markov chains such as `bayes.NUTS`."

    paths: int = 8
    path_steps: int = 100
    history: int = 10
    elbo_draws: int = 25
    draws: int = 1000

    def __check_init__(self):
        for name in ("paths", "path_steps", "history", "elbo_draws"):
            whole_number(getattr(self, name), f"Pathfinder: {name}")
        # PSIS cannot fit a tail to fewer draws.
        whole_number(self.draws, "Pathfinder: draws", least=25)

    @property
    def num_chains(self) -> int:
        return self.paths

    @property
    def num_steps(self) -> int:
        return 0

    def init(self, problem: Problem, key: PRNGKeyArray) -> Path:
        place_key, path_key, elbo_key, key = jr.split(key, 4)
        pathfinder = blackjax().vi.pathfinder
        density = problem.log_density

        def weighted(key: PRNGKeyArray, normal: Any, num: int) -> tuple[Array, Array]:
            draws, log_normal = pathfinder.sample(key, normal, num)
            log_posterior = jax.lax.map(density, draws, batch_size=self.elbo_draws)
            return draws, log_posterior - log_normal

        # BlackJAX's choice of the best distribution is not used: see `_centred`.
        place = problem.dispersed(place_key).astype(float)
        options = {"maxiter": self.path_steps, "maxcor": self.history, "maxls": _MAX_GRADIENTS}
        _, info = pathfinder.approximate(path_key, density, place, num_samples=1, **options)

        def elbo(normal: Any) -> tuple[Array, Any]:
            normal = _centred(normal, density)
            return jnp.mean(weighted(elbo_key, normal, self.elbo_draws)[1]), normal

        # `lax.map` instead of `vmap` saves memory.
        elbos, path = jax.lax.map(elbo, info.path)
        # After the last step, the rest of the path repeats the last position.
        moved = jnp.any(info.path.position[1:] != info.path.position[:-1], axis=1)
        is_place = jnp.concatenate([jnp.ones(1, bool), moved])
        best = jnp.argmax(jnp.where(is_place & jnp.isfinite(elbos), elbos, -jnp.inf))
        normal = jax.tree.map(lambda each: each[best], path)
        return Path(*weighted(key, normal, self.draws), info.path.position[-1])

    def step(self, problem: Problem, state: Path, index: Array, key: PRNGKeyArray) -> Step:
        return state, {}

    def finish(
        self, problem: Problem, states: Path, records: Record, key: PRNGKeyArray
    ) -> Resampled:
        densities = jax.lax.map(problem.log_density, states.end)
        end = states.end[jnp.argmax(jnp.where(jnp.isnan(densities), -jnp.inf, densities))]
        log_ratios = states.log_ratios.reshape(-1)
        log_ratios = jnp.where(jnp.isnan(log_ratios), -jnp.inf, log_ratios)
        log_evidence = jax.nn.logsumexp(log_ratios) - math.log(log_ratios.size)
        log_weights, pareto_k = blackjax().diagnostics.psis_weights(log_ratios)
        draws = states.draws.reshape(-1, states.draws.shape[-1])
        return Resampled(end, draws, jnp.exp(log_weights), log_evidence, pareto_k)

    def sample(self, problem: Problem, found: Resampled, num: int, key: PRNGKeyArray) -> Draws:
        return found.draws[jr.choice(key, len(found.draws), (num,), p=found.probabilities)]

    def point_estimate(self, problem: Problem, found: Resampled) -> Float[Array, " d"]:
        return found.end

    def log_evidence(self, problem: Problem, found: Resampled) -> Float[Array, ""]:
        return found.log_evidence

    def diagnosed(self, problem: Problem, found: Resampled) -> dict[str, Any]:
        return {"pareto_k": float(found.pareto_k)}


def _centred(normal: Any, log_density: Any) -> Any:
    """A normal distribution of a path, with its mean moved by the correct Newton step.

    BlackJAX 1.7.1 moves the mean in the opposite direction, because it uses the gradient of the
    negative log density. The result has a gradient of zero, so that BlackJAX does not move the mean
    again.
    """
    gradient = jax.grad(log_density)(normal.position)
    low_rank = normal.beta @ (normal.gamma @ (normal.beta.T @ gradient))
    mean = normal.position + normal.alpha * gradient + low_rank
    return normal._replace(position=mean, grad_position=jnp.zeros_like(gradient))
