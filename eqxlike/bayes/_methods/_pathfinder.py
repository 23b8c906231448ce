"""Pathfinder: normal approximations along the paths of L-BFGS."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, PRNGKeyArray

from ..._check_numbers import whole_number
from .._inference._method import Draws, Method, Problem, Record, Step
from .._libraries import blackjax

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
