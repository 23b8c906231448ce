"""Pathfinder: normal distributions along the paths of an optimiser."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, PRNGKeyArray

from ..._check_numbers import whole_number
from .._inference._method import Draws, Method, Problem, Record, Step
from .._libraries import blackjax

# A line search that needs more gradients than these has lost its way.
_MAX_GRADIENTS = 30


class Path(NamedTuple):
    """What a path gives.

    - `draws`: from the best of its normal distributions.
    - `log_ratios`: by how many nats the posterior is denser there than that.
    - `end`: the last of its places.
    """

    draws: Float[Array, "*n d"]
    log_ratios: Float[Array, "*n"]
    end: Float[Array, "*c d"]


class Resampled(NamedTuple):
    """Draws, their probabilities, and how far to trust these.

    - `end`: of the path that came to the highest log density.
    - `log_evidence`: the log of the mean of the ratios.
    - `pareto_k`: the shape of the tail of the ratios: above 0.7 a few of them decide.
    """

    end: Float[Array, " d"]
    draws: Float[Array, "n d"]
    probabilities: Float[Array, " n"]
    log_evidence: Float[Array, ""]
    pareto_k: Float[Array, ""]


class Pathfinder(Method):
    """Normals from the path of a quasi-Newton optimiser, for a quick look at a simple posterior.

    It costs `paths` runs of L-BFGS with `elbo_draws` log densities at each place, and memory for
    `paths * draws` draws. Do not use it for networks, whose posterior is mostly far from normal:
    few draws then have all the weight, and `diagnostics.pareto_k` says so.

    Each place on the path of L-BFGS has a normal distribution with the inverse Hessian that the
    optimiser knows there; the path gives draws from that of the largest ELBO. Draws of all paths
    are weighed by the density of the posterior over that of the draw, with the largest weights
    smoothed, and drawn by weight (Zhang, Carpenter, Gelman and Vehtari, 2022, "Pathfinder: Parallel
    Quasi-Newton Variational Inference"; Vehtari et al., 2024, "Pareto Smoothed Importance
    Sampling"; BlackJAX's implementation). The weights also estimate the evidence.

    - `paths`: how many there are, from places further apart than the posterior.
    - `path_steps`: the most steps of a path.
    - `history`: how many of them the inverse Hessian is made of.
    - `elbo_draws`: draws for the ELBO of each place.
    - `draws`: that each path gives.

    >>> from eqxlike import bayes
    >>> method = bayes.Pathfinder(paths=4)
    """

    paths: int = 8
    path_steps: int = 100
    history: int = 10
    elbo_draws: int = 25
    draws: int = 1000

    def __check_init__(self):
        for name in ("paths", "path_steps", "history", "elbo_draws"):
            whole_number(getattr(self, name), f"Pathfinder: {name}")
        # With fewer no tail can be fitted.
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

        # BlackJAX's own choice of the best is left alone: see `_centred`.
        place = problem.dispersed(place_key).astype(float)
        options = {"maxiter": self.path_steps, "maxcor": self.history, "maxls": _MAX_GRADIENTS}
        _, info = pathfinder.approximate(path_key, density, place, num_samples=1, **options)

        def elbo(normal: Any) -> tuple[Array, Any]:
            normal = _centred(normal, density)
            return jnp.mean(weighted(elbo_key, normal, self.elbo_draws)[1]), normal

        # One place after another: all of them at once need much memory.
        elbos, path = jax.lax.map(elbo, info.path)
        # After its last step the path repeats its last place.
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

    @property
    def remedy(self) -> str:
        return "`bayes.Laplace`, or chains as of `bayes.NUTS`, may help."

    def log_evidence(self, problem: Problem, found: Resampled) -> Float[Array, ""]:
        return found.log_evidence

    def diagnosed(self, problem: Problem, found: Resampled) -> dict[str, Any]:
        return {"pareto_k": float(found.pareto_k)}


def _centred(normal: Any, log_density: Any) -> Any:
    """A normal of a path with its mean where a Newton step leads from its place.

    BlackJAX 1.7.1 goes to the other side: it takes the gradient of minus the log density for that
    of the log density. A gradient of zero keeps the mean where it is put here.
    """
    gradient = jax.grad(log_density)(normal.position)
    low_rank = normal.beta @ (normal.gamma @ (normal.beta.T @ gradient))
    mean = normal.position + normal.alpha * gradient + low_rank
    return normal._replace(position=mean, grad_position=jnp.zeros_like(gradient))
