"""What inference found: a posterior that one draws from."""

import importlib
import math
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from ... import Module, field, filter_jit
from ..._check_numbers import whole_number
from .._libraries import ONCE, Missing, as_libraries_compute
from .._posterior import Data, Posterior, Unknowns, num_examples
from ._diagnostics import (
    Convergence,
    Diagnostics,
    PredictiveScores,
    convergence,
    energy_mixing,
    in_words,
)
from ._files import write_chains
from ._method import Chains, Method, Problem

# The number of inputs whose outputs are followed through a chain.
_MAX_INPUTS = 20
_DEFAULT_DRAWS = 100


class FittedPosterior(Module):
    """The posterior of a target, as a method found it: what `bayes.infer` returns.

    - `problem`: the target, over a vector of unknowns in linked space.
    - `method`: the method.
    - `found`: what draws are made from, as the method has it.
    - `chains`: where the run stood at its end.
    - `key`: that of the run.
    - `nlls`: the fields of `diagnostics.predictive` in their order, with NaN for `None`; empty
      without a comparison.
    """

    problem: Problem
    method: Method
    found: Any
    chains: Chains
    key: PRNGKeyArray
    nlls: np.ndarray = field(default_factory=lambda: np.zeros(0))

    @property
    def target(self) -> Posterior:
        """The target whose posterior it is."""
        return self.problem.target

    @property
    def records(self) -> dict[str, np.ndarray]:
        """What was kept of the steps, by name, with leading axes of chains and of records."""
        return self.chains.records

    def samples(self, num: int | None = None, *, key: PRNGKeyArray) -> Unknowns:
        """Draws of the unknowns, in standard space, each array with a leading axis of draws.

        **Arguments:**

        - `num`: how many. By default all that the method kept, or 100 where it can always make
          more. Of draws that were kept, each comes as often as the others, or once more.
        - `key`: for the draws.

        **Raises:** `ValueError` if the run stopped before its first draw.
        """
        self._check_draws()
        if num is None:
            num = self.method.num_found(self.found) or _DEFAULT_DRAWS
        num = whole_number(num, "num")
        return _samples(self.problem, self.method, self.found, num, key)

    def model(self, sample: Unknowns) -> Any:
        """The network with the unknowns of one draw, a function of one input.

        **Arguments:**

        - `sample`: one draw. Of `samples`, `jax.tree.map(lambda each: each[0], samples)` is the
          first; `jax.vmap` runs over all.

        **Raises:** `ValueError` if `sample` has other shapes than the unknowns.
        """
        return self.method.network(self.problem, sample)

    @property
    def diagnostics(self) -> Diagnostics:
        """How the run went: what its chains agree on, and what is poor, in words."""
        records = self.records
        known: dict[str, Any] = {}
        if "loss" in records:
            known["losses"] = records["loss"]
        if "draw" in records:
            known |= self._convergence_of(records["draw"])
        if "is_divergent" in records:
            known["divergences"] = records["is_divergent"].sum(axis=1)
        if "acceptance" in records and records["acceptance"].size:
            known["acceptance"] = records["acceptance"].mean(axis=1)
        if "broadening" in records and records["broadening"].size:
            known["broadening"] = float(records["broadening"].mean())
        if "energy" in records and records["energy"].shape[1] >= 2:
            known["energy"] = energy_mixing(records["energy"])
        if self.nlls.size:
            others = (None if math.isnan(each) else float(each) for each in self.nlls[1:])
            known["predictive"] = PredictiveScores(float(self.nlls[0]), *others)
        known |= self.method.diagnosed(self.problem, self.found)
        own = known.pop("warnings", ())
        words = in_words(Diagnostics(**known), self.method.remedy)
        return Diagnostics(**known, warnings=(*self._no_draws(), *own, *words))

    def _no_draws(self) -> list[str]:
        """The reason why there are no draws, in words; empty if there are draws."""
        draws = self.records.get("draw")
        if self.method.num_found(self.found) != 0 and (draws is None or draws.size):
            return []
        return [
            f"there are no draws yet: the run stopped after step {self.chains.step} of "
            f"{self.method.num_steps}, before its first draw. To continue the run, call "
            "`bayes.infer` again with the same arguments, including `checkpoint=`."
        ]

    def _check_draws(self) -> None:
        for text in self._no_draws():
            raise ValueError(f"{method_name(self.method)}: {text}")

    def _convergence_of(self, draws: np.ndarray) -> dict[str, Any]:
        lost = np.sum(~np.isfinite(draws).all(axis=2), axis=1)
        if lost.any():
            return {"lost": lost}
        if draws.shape[1] < 4:
            return {}
        known = {}
        followed = _outputs_along_chains(self.problem, jnp.asarray(draws))
        for name, each in zip(("outputs", "others"), map(np.asarray, followed), strict=True):
            if each.shape[-1]:
                # An output that no unknown moves is the same in all draws.
                is_moving = np.ptp(each, axis=(0, 1)) > 0
                known[name] = convergence(each[..., is_moving] if is_moving.any() else each)
        if "log_density" in self.records:
            known["log_density"] = convergence(self.records["log_density"])
        return known

    @property
    def convergence(self) -> Convergence:
        """How far the chains agree on each unknown, as trees of the form of the unknowns.

        **Raises:** `AttributeError` for a method without chains, or with fewer than 4 draws a
        chain.
        """
        if "draw" not in self.records:
            raise Missing(f"{method_name(self.method)} has no chains, and so no convergence.")
        draws = self.records["draw"]
        if draws.shape[1] < 4:
            raise Missing(
                f"{method_name(self.method)}: convergence needs at least 4 draws a chain, "
                f"got {draws.shape[1]} after step {self.chains.step} of {self.method.num_steps}."
            )
        found = convergence(draws)
        trees: list[Any] = [
            self.problem.unflatten(jnp.asarray(each, self.problem.dtype))
            for each in (found.r_hat, found.ess_bulk, found.ess_tail)
        ]
        return Convergence(*trees)

    @property
    def log_evidence(self) -> Float[Array, ""]:
        """The log of the density of the data under the model, in nats.

        **Raises:** `AttributeError` if the method does not estimate it.
        """
        found = self.method.log_evidence(self.problem, self.found)
        if found is None:
            raise Missing(
                f"{method_name(self.method)} has no estimate of the evidence; `bayes.Laplace` and "
                "`bayes.Pathfinder` have."
            )
        return found

    def to_arviz(self, num: int = 1000, *, key: PRNGKeyArray | None = None) -> Any:
        """The draws as ArviZ holds them, with the log likelihood of each example.

        Parameters have their paths as names, and the unknowns of likelihood and prior theirs, such
        as `likelihood.scale`.

        **Arguments:**

        - `num`, `key`: how many draws of a method that has no chains, and their key. Of chains all
          that were kept are there.

        **Returns:** a `DataTree` with the groups `posterior`, `log_likelihood`, `observed_data`
        and, of chains, `sample_stats`.

        **Raises:** `ImportError` if ArviZ is not installed; `TypeError` without a key for a method
        that needs one; `ValueError` if the run stopped before its first draw.
        """
        self._check_draws()
        try:
            arviz: Any = importlib.import_module("arviz_base")
        except ModuleNotFoundError as error:
            raise ImportError("to_arviz needs ArviZ: `pip install 'eqxlike[arviz]'`.") from error
        num_chains, statistics = 1, {}
        if "draw" in self.records:
            draws = self.records["draw"]
            num_chains, flat = draws.shape[0], jnp.asarray(draws.reshape(-1, draws.shape[-1]))
            unknowns = _unknowns(self.problem, flat)
            statistics = {
                theirs: self.records[ours]
                for ours, theirs in _STATISTICS.items()
                if ours in self.records
            }
        elif key is None:
            raise TypeError(f"to_arviz: {method_name(self.method)} draws again, and needs a key.")
        else:
            unknowns = self.samples(num, key=key)

        def by_chain(draws: Any) -> np.ndarray:
            return np.asarray(draws).reshape(num_chains, -1, *draws.shape[1:])

        log_likelihoods = _log_likelihoods(self.problem, self.method, unknowns)
        groups = {
            "posterior": {name: by_chain(each) for name, each in _by_name(unknowns).items()},
            "log_likelihood": {"y": by_chain(log_likelihoods)},
            "observed_data": {
                f"y{jtu.keystr(path)}": np.asarray(leaf)
                for path, leaf in jtu.tree_leaves_with_path(self.target.data[1])
            },
        }
        return arviz.from_dict(groups | ({"sample_stats": statistics} if statistics else {}))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the posterior to a file, for `bayes.load`: arrays and a line of JSON, no code."""
        write_chains(pathlib.Path(path), self.problem, self.method, self.chains, self.key)


def fitted_from(
    problem: Problem, method: Method, chains: Chains, key: PRNGKeyArray
) -> FittedPosterior:
    """The posterior that a run found."""
    found = _finish(method, problem, chains.states, chains.records, key)
    return FittedPosterior(problem, method, found, chains, key)


def method_name(method: Method) -> str:
    """The name of a method for messages."""
    return type(method).__name__


@as_libraries_compute()
@filter_jit(compiler_options=ONCE)
def _finish(method: Method, problem: Problem, states: Any, records: Any, key: PRNGKeyArray) -> Any:
    return method.finish(problem, states, records, jr.fold_in(key, 2))


@as_libraries_compute()
@filter_jit
def _samples(problem: Problem, method: Method, found: Any, num: int, key: PRNGKeyArray) -> Unknowns:
    draw_key, noise_key = jr.split(key)
    vectors = method.sample(problem, found, num, draw_key)
    unknowns = jax.vmap(problem.unknowns)(vectors)
    noise = method.noise(num, noise_key)
    return Unknowns(unknowns.model, unknowns.likelihood, unknowns.prior, noise)


@filter_jit
def _unknowns(problem: Problem, vectors: Array) -> Unknowns:
    return jax.vmap(problem.unknowns)(vectors)


@filter_jit
def _outputs_along_chains(problem: Problem, draws: Array) -> tuple[Array, Array]:
    """Outputs for some inputs, and the unknowns that are not parameters, along chains."""
    x = jtu.tree_map(lambda each: each[:_MAX_INPUTS], problem.target.data[0])

    def of_one(vector: Array) -> tuple[Array, Array]:
        linked = problem.unflatten(vector)
        network = problem.target.model(problem.unknowns(vector))
        outputs = jax.vmap(network)(x)
        others = jtu.tree_leaves((linked.likelihood, linked.prior))
        return outputs.reshape(-1), jnp.concatenate(
            [jnp.zeros(0, vector.dtype), *(each.reshape(-1) for each in others)]
        )

    return jax.lax.map(jax.vmap(of_one), draws)


# --- How well draws predict, and one network ---


# The most examples of a kind; the most memory that draws may need; and how many examples go through
# the networks of all draws at once, which with 100 of them is a batch of 400.
_MAX_COMPARED, _MAX_DRAW_BYTES, _EXAMPLES_AT_ONCE = 512, 2**28, 4


def with_predictive(posterior: FittedPosterior, held_out: Data | None = None) -> FittedPosterior:
    """The posterior with what `diagnostics.predictive` says.

    `bayes.predict` with the key of the run, folded with 3, and 100 samples has the same draws.

    **Arguments:**

    - `held_out`: examples of the form of the data.
    """
    problem, method, found = posterior.problem, posterior.method, posterior.found
    kept = method.num_found(found)
    # Before the data come to the host.
    has_point = type(method).point_estimate is not Method.point_estimate
    if kept == 0 or (held_out is None and (method.leaves_out or not has_point)):
        return posterior
    draw_bytes = problem.size * jnp.dtype(problem.dtype).itemsize
    num_draws = min(kept or _DEFAULT_DRAWS, _DEFAULT_DRAWS, max(2, _MAX_DRAW_BYTES // draw_bytes))
    parts = [_spaced(data) for data in (posterior.target.data, held_out) if data is not None]
    data = jtu.tree_map(
        lambda like, *leaves: np.concatenate([np.asarray(leaf, like.dtype) for leaf in leaves]),
        parts[0],
        *parts,
    )
    pair = _nlls(problem, method, found, data, num_draws, posterior.key, held_out is not None)
    num_trained_on = num_examples(parts[0], "infer")
    # Draws that went to infinity, or a run that is not finished, are said elsewhere.
    if pair is None or np.isnan(pair[0][:num_trained_on]).any():
        return posterior
    nlls = np.stack([np.where(np.isnan(pair[0]), np.inf, pair[0]), pair[1]], axis=1)
    means = [np.mean(each, axis=0) for each in np.split(nlls, [num_trained_on]) if len(each)]
    if held_out is not None:
        num_held_out = len(nlls) - num_trained_on
        with np.errstate(invalid="ignore"):  # infinities among the training data
            means.append(np.std(nlls[:num_trained_on, :1], axis=0) / math.sqrt(num_held_out))
    return FittedPosterior(
        problem, method, found, posterior.chains, posterior.key, np.concatenate(means)
    )


def _spaced(data: Data) -> Data:
    """At most so many examples, evenly spaced."""
    num = num_examples(data, "infer")
    places = np.linspace(0, num - 1, min(num, _MAX_COMPARED)).round().astype(int)
    return jtu.tree_map(lambda leaf: np.asarray(leaf)[places], data)


@as_libraries_compute()
@filter_jit(compiler_options=ONCE)
def _nlls(
    problem: Problem,
    method: Method,
    found: Any,
    data: Data,
    num: int,
    key: PRNGKeyArray,
    has_held_out: bool,
) -> tuple[Float[Array, " B"], Float[Array, " B"]] | None:
    """Minus the log density of each example under the mixture of draws, and under one network.

    If the method names no network, the second is NaN, and without held-out data the result is
    `None`.
    """
    target = problem.target
    place = method.point_estimate(problem, found)
    if place is None and not has_held_out:
        return None
    point = None if place is None else problem.unknowns(place)
    draw_key, key = jr.split(jr.fold_in(key, 3))
    draws = _samples(problem, method, found, num, draw_key)

    def of_batch(batch: Data) -> tuple[Array, Array]:
        x, y = batch

        def of_draw(outputs: Array, own: Any) -> Array:
            return jax.vmap(lambda output, y: target.likelihood.log_prob(output, own, y))(
                outputs, y
            )

        outputs = method.outputs(problem, found, draws, x, key)
        mixed = jax.nn.logsumexp(jax.vmap(of_draw)(outputs, draws.likelihood), axis=0)
        mixed = math.log(num) - mixed
        if point is None:
            return mixed, jnp.full_like(mixed, jnp.nan)
        return mixed, -target.log_likelihood(point, batch)

    size = num_examples(data, "infer")
    index = jnp.minimum(jnp.arange(-(-size // _EXAMPLES_AT_ONCE) * _EXAMPLES_AT_ONCE), size - 1)
    batches = jtu.tree_map(
        lambda leaf: leaf[index].reshape(-1, _EXAMPLES_AT_ONCE, *leaf.shape[1:]), data
    )
    return jtu.tree_map(lambda each: each.reshape(-1)[:size], jax.lax.map(of_batch, batches))


# --- Draws as ArviZ holds them ---


# What ArviZ calls what chains record.
_STATISTICS = {
    "log_density": "lp",
    "acceptance": "acceptance_rate",
    "is_divergent": "diverging",
    "energy": "energy",
    "num_gradients": "n_steps",
}


def _by_name(unknowns: Unknowns) -> dict[str, Array]:
    """Arrays by their paths, such as `layers[0].weight` and `likelihood.scale`."""
    parts = {"": unknowns.model, "likelihood": unknowns.likelihood, "prior": unknowns.prior}
    return {
        (part + "".join(map(_step, path))).removeprefix("."): leaf
        for part, tree in parts.items()
        for path, leaf in jtu.tree_leaves_with_path(tree)
    }


def _step(entry: Any) -> str:
    """One step of a path, that into a dict written as that to an attribute."""
    is_name = isinstance(entry, jtu.DictKey) and isinstance(entry.key, str)
    return f".{entry.key}" if is_name else jtu.keystr((entry,))


@filter_jit
def _log_likelihoods(problem: Problem, method: Method, unknowns: Unknowns) -> Array:
    (x, y), likelihood = problem.target.data, problem.target.likelihood

    def of_one(unknowns: Unknowns) -> Array:
        network, own = method.network(problem, unknowns), unknowns.likelihood
        return jax.vmap(lambda x, y: likelihood.log_prob(network(x), own, y))(x, y)

    return jax.lax.map(of_one, jtu.tree_map(jnp.asarray, unknowns))
