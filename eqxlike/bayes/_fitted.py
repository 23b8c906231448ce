"""The result of inference: a fitted posterior with draws, diagnostics and files."""

import contextlib
import dataclasses
import importlib
import json
import math
import numbers
import os
import pathlib
from collections.abc import Callable
from typing import Any, BinaryIO

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from .. import (
    Module,
    field,
    filter_jit,
    is_inexact_array,
    tree_deserialise_leaves,
    tree_serialise_leaves,
)
from .._check_numbers import integer, whole_number
from .._dtypes import is_key
from ..extend import fingerprint, open_to_replace, split
from ._diagnostics import (
    Convergence,
    Diagnostics,
    PredictiveScores,
    convergence,
    energy_mixing,
    in_words,
)
from ._libraries import ONCE, Missing, as_libraries_compute
from ._method import Chains, Method, Problem
from ._posterior import Data, Posterior, Unknowns, num_examples

# Convergence is measured on the network's outputs for this many inputs.
_MAX_INPUTS = 20
_DEFAULT_DRAWS = 100


class FittedPosterior(Module):
    """The fitted posterior that `bayes.infer` returns.

    - `problem`: the target as a density over a vector of unknowns in linked space.
    - `method`: the method that fitted it.
    - `found`: the result of `Method.finish`, from which draws are made.
    - `chains`: the state of the run at its end.
    - `key`: the key of the run.
    - `nlls`: the fields of `diagnostics.predictive` in order, with NaN for `None`; empty if there
      are no scores.
    """

    problem: Problem
    method: Method
    found: Any
    chains: Chains
    key: PRNGKeyArray
    nlls: np.ndarray = field(default_factory=lambda: np.zeros(0))

    @property
    def target(self) -> Posterior:
        """The `bayes.Posterior` that was fitted."""
        return self.problem.target

    @property
    def records(self) -> dict[str, np.ndarray]:
        """The arrays that the steps recorded, by name, with leading axes of chains and records."""
        return self.chains.records

    def samples(self, num: int | None = None, *, key: PRNGKeyArray) -> Unknowns:
        """Draws of the unknowns, in standard space. Each array has a leading axis of draws.

        **Arguments:**

        - `num`: number of draws. By default all draws that the method kept, or 100 if the method
          can make new draws. If `num` exceeds the number of kept draws, draws are repeated as
          evenly as possible.
        - `key`: random key for the draws.

        **Raises:** `ValueError` if the run stopped before its first draw.
        """
        self._check_draws()
        if num is None:
            num = self.method.num_found(self.found) or _DEFAULT_DRAWS
        num = whole_number(num, "num")
        return _samples(self.problem, self.method, self.found, num, key)

    def model(self, sample: Unknowns) -> Any:
        """The network with the unknowns of one draw, as a function of one input.

        **Arguments:**

        - `sample`: one draw, such as `jax.tree.map(lambda each: each[0], samples)`. Use `jax.vmap`
          for all draws.

        **Raises:** `ValueError` if the arrays of `sample` do not have the shapes of one draw.
        """
        return self.method.network(self.problem, sample)

    @property
    def diagnostics(self) -> Diagnostics:
        """Diagnostics of the run, with warnings about its problems."""
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
        """An error message if the run stopped before its first draw, otherwise an empty string."""
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
            raise ValueError(f"{type(self.method).__name__}: {text}")

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
                # Leave out outputs that do not depend on the unknowns.
                is_moving = np.ptp(each, axis=(0, 1)) > 0
                known[name] = convergence(each[..., is_moving] if is_moving.any() else each)
        if "log_density" in self.records:
            known["log_density"] = convergence(self.records["log_density"])
        return known

    @property
    def convergence(self) -> Convergence:
        """R-hat and effective sample sizes of each unknown.

        Each field of the result is a tree with the structure of the unknowns.

        **Raises:** `AttributeError` if the method has no Markov chains, or if there are fewer than
        4 draws per chain.
        """
        if "draw" not in self.records:
            raise Missing(
                f"{type(self.method).__name__} has no Markov chains, and therefore no "
                "convergence diagnostics."
            )
        draws = self.records["draw"]
        if draws.shape[1] < 4:
            raise Missing(
                f"{type(self.method).__name__}: convergence needs at least 4 draws per chain, "
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
        """The log evidence: the log density of the data under the model, in nats.

        **Raises:** `AttributeError` if the method does not estimate the log evidence.
        """
        found = self.method.log_evidence(self.problem, self.found)
        if found is None:
            raise Missing(
                f"{type(self.method).__name__} does not estimate the evidence; use `bayes.Laplace` "
                "or `bayes.Pathfinder`."
            )
        return found

    def to_arviz(self, num: int = 1000, *, key: PRNGKeyArray | None = None) -> Any:
        """Converts the draws to ArviZ, with the log likelihood of each example.

        Variables are named by path, such as `layers[0].weight` and `likelihood.scale`.

        **Arguments:**

        - `num`, `key`: number of draws and their key, for a method without Markov chains. For
          Markov chains, all kept draws are converted.

        **Returns:** a `DataTree` with the groups `posterior`, `log_likelihood`, `observed_data`
        and, for Markov chains, `sample_stats`.

        **Raises:** `ImportError` if ArviZ is not installed. `TypeError` if the method makes new
        draws and `key` is missing. `ValueError` if the run stopped before its first draw.
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
                for ours, theirs in _ARVIZ_NAMES.items()
                if ours in self.records
            }
        elif key is None:
            raise TypeError(f"to_arviz: {type(self.method).__name__} makes new draws: pass `key=`.")
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
        """Writes the posterior to a file for `bayes.load`: one line of JSON, then arrays."""
        write_chains(pathlib.Path(path), self.problem, self.method, self.chains, self.key)


def fitted_from(
    problem: Problem, method: Method, chains: Chains, key: PRNGKeyArray
) -> FittedPosterior:
    """The fitted posterior of a run that has ended."""
    found = _finish(method, problem, chains.states, chains.records, key)
    return FittedPosterior(problem, method, found, chains, key)


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
    """For each draw, the network's outputs for some inputs, and the unknowns of prior and
    likelihood.
    """
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


# --- Predictive scores of the draws and of one network ---


# Limits on the number of examples, the bytes of the draws, and the examples in a batch. Batches are
# small because each example passes through the networks of all draws: 4 examples and 100 draws are
# a batch of 400.
_MAX_COMPARED, _MAX_DRAW_BYTES, _EXAMPLES_AT_ONCE = 512, 2**28, 4


def with_predictive(posterior: FittedPosterior, held_out: Data | None = None) -> FittedPosterior:
    """Adds the scores of `diagnostics.predictive`.

    To get the draws that these scores use, call `bayes.predict` with `num_samples=100` and the key
    `jax.random.fold_in(key, 3)`, where `key` is the key of the run.

    **Arguments:**

    - `held_out`: examples `(x, y)` with the structure of the target's data.
    """
    problem, method, found = posterior.problem, posterior.method, posterior.found
    kept = method.num_found(found)
    # Return early if no scores are needed, to avoid copying the data to the host.
    has_point = type(method).point_estimate is not Method.point_estimate
    if kept == 0 or (held_out is None and (method.leaves_out or not has_point)):
        return posterior
    draw_bytes = problem.size * jnp.dtype(problem.dtype).itemsize
    num_draws = min(kept or _DEFAULT_DRAWS, _DEFAULT_DRAWS, max(2, _MAX_DRAW_BYTES // draw_bytes))
    parts = [_evenly_spaced(data) for data in (posterior.target.data, held_out) if data is not None]
    # If the dtypes differ, NumPy promotes them.
    data = jtu.tree_map(lambda *leaves: np.concatenate(leaves), *parts)
    pair = _nlls(problem, method, found, data, num_draws, posterior.key, held_out is not None)
    num_trained_on = num_examples(parts[0], "infer")
    # No scores for draws that are not finite, or for an unfinished run: other warnings report
    # these.
    if pair is None or np.isnan(pair[0][:num_trained_on]).any():
        return posterior
    nlls = np.stack([np.where(np.isnan(pair[0]), np.inf, pair[0]), pair[1]], axis=1)
    means = [np.mean(each, axis=0) for each in np.split(nlls, [num_trained_on]) if len(each)]
    if held_out is not None:
        num_held_out = len(nlls) - num_trained_on
        with np.errstate(invalid="ignore"):  # NLLs of training data may be infinite
            means.append(np.std(nlls[:num_trained_on, :1], axis=0) / math.sqrt(num_held_out))
    return FittedPosterior(
        problem, method, found, posterior.chains, posterior.key, np.concatenate(means)
    )


def _evenly_spaced(data: Data) -> Data:
    """At most `_MAX_COMPARED` examples, evenly spaced."""
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
    """The NLL of each example under the mixture of draws, and under one network.

    If the method has no point estimate, the second array is NaN. If there are also no held-out
    data, the result is `None`.
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

    return map_batches(of_batch, data, _EXAMPLES_AT_ONCE)


def map_batches(function: Callable[[Any], Any], examples: Any, batch_size: int) -> Any:
    """Maps a function of a batch over examples, one batch after another. Pads the last batch."""
    size = num_examples(examples, "infer")
    index = jnp.minimum(jnp.arange(-(-size // batch_size) * batch_size), size - 1)
    batches = jtu.tree_map(
        lambda leaf: leaf[index].reshape(-1, batch_size, *leaf.shape[1:]), examples
    )
    results = jax.lax.map(function, batches)
    return jtu.tree_map(lambda each: each.reshape(-1, *each.shape[2:])[:size], results)


# --- Conversion to ArviZ ---


# Names that ArviZ uses for the records.
_ARVIZ_NAMES = {
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
        (part + "".join(map(_entry_name, path))).removeprefix("."): leaf
        for part, tree in parts.items()
        for path, leaf in jtu.tree_leaves_with_path(tree)
    }


def _entry_name(entry: Any) -> str:
    """One entry of a path, with dict keys written like attributes."""
    is_name = isinstance(entry, jtu.DictKey) and isinstance(entry.key, str)
    return f".{entry.key}" if is_name else jtu.keystr((entry,))


@filter_jit
def _log_likelihoods(problem: Problem, method: Method, unknowns: Unknowns) -> Array:
    (x, y), likelihood = problem.target.data, problem.target.likelihood

    def of_one(unknowns: Unknowns) -> Array:
        network, own = method.network(problem, unknowns), unknowns.likelihood
        return jax.vmap(lambda x, y: likelihood.log_prob(network(x), own, y))(x, y)

    return jax.lax.map(of_one, jtu.tree_map(jnp.asarray, unknowns))


# --- Files: one line of JSON that identifies the run, then arrays. They hold no code ---


_FORMAT = "eqxlike.bayes run 1"

# Header fields that must be equal in the file and the run. The text of a field is the part of the
# error message after "differs". If the text is empty, the error message shows both values. Settings
# of the method are compared separately.
_DIFFERENCES = {
    "method": "",
    "unknowns": "",
    "target": " in its prior, its likelihood, or a part of the model that is not inferred",
    "data": " in a value or a shape",
    "key": " from the key that was passed",
    "start": ": the model has other initial parameters",
}


def write_chains(
    path: pathlib.Path, problem: Problem, method: Method, chains: Chains, key: PRNGKeyArray
) -> None:
    """Writes the state of a run to a file, replacing the file atomically."""
    header = _header(problem, method, key) | {
        "step": chains.step,
        "kept": {name: list(each.shape) for name, each in chains.records.items()},
    }
    with open_to_replace(path) as file:
        file.write(json.dumps(header).encode() + b"\n")
        tree_serialise_leaves(file, (chains.states, chains.records))


def read_chains(
    path: pathlib.Path, problem: Problem, method: Method, started: Chains, key: PRNGKeyArray | None
) -> tuple[Chains, PRNGKeyArray]:
    """Reads the state and the key of a run from a file.

    **Arguments:**

    - `started`: the run before its first step.
    - `key`: the key of the run; `None` to accept any key.

    **Raises:** `ValueError` if the file is damaged, is not a run, or belongs to another run.
    """
    with open(path, "rb") as file:
        header = _read_header(path, file)
        _check_header(path, header, _header(problem, method, key))
        records = {
            name: np.zeros(header["kept"][name], each.dtype)
            for name, each in started.records.items()
        }
        try:
            states, records = tree_deserialise_leaves(file, (started.states, records))
        except RuntimeError as error:
            raise ValueError(f"{path} is damaged: {error}") from error
    data, name = header["key"]
    saved_key = jr.wrap_key_data(jnp.asarray(data, jnp.uint32), impl=name)
    return Chains(header["step"], states, jtu.tree_map(np.asarray, records)), saved_key


def _header(problem: Problem, method: Method, key: PRNGKeyArray | None) -> dict[str, Any]:
    """The fields that identify a run.

    **Arguments:**

    - `key`: the key of the run. Without a key, neither the key nor the initial parameters are
      included.
    """
    target = problem.target
    leaves = jtu.tree_leaves_with_path(problem.unflatten(jnp.zeros(problem.size, problem.dtype)))
    arrays, rest = split(target.network, is_inexact_array)
    network = rest.merge([jax.ShapeDtypeStruct(each.shape, each.dtype) for each in arrays])
    header = {
        "format": _FORMAT,
        "method": type(method).__name__,
        "settings": _settings(method),
        "unknowns": {
            jtu.keystr(path): [list(leaf.shape), str(leaf.dtype)] for path, leaf in leaves
        },
        "target": fingerprint((network, target.prior, target.likelihood)),
        "data": fingerprint(target.data),
    }
    if key is not None:
        header["start"] = fingerprint((arrays, target.initial_scales))
        typed = key if is_key(key) else jr.wrap_key_data(key)
        header["key"] = [jr.key_data(typed).tolist(), str(jr.key_impl(typed))]
    return header


def _settings(value: Any) -> Any:
    """The fields of a method as JSON values."""
    if isinstance(value, Method):
        return {
            each.name: _settings(getattr(value, each.name)) for each in dataclasses.fields(value)
        }
    if value is None or isinstance(value, bool | str):
        return value
    number = integer(value)
    if number is not None:
        return number
    if isinstance(value, numbers.Real):
        return float(value)
    name = getattr(value, "__qualname__", type(value).__qualname__)
    return f"{name} {fingerprint(value)[:8]}"


def _read_header(path: pathlib.Path, file: BinaryIO) -> dict[str, Any]:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        header = json.loads(file.readline())
        if header["format"] == _FORMAT:
            return header
    raise ValueError(
        f"{path} is not a run of `bayes.infer`, or was written by an incompatible version."
    )


def _check_header(path: pathlib.Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name, hint in _DIFFERENCES.items():
        there = found.get(name)
        if name in wanted and there != wanted[name]:
            detail = hint or f": {there}, not {wanted[name]}"
            raise ValueError(
                f"{path} contains another run: its {name} differs{detail}. Pass the target, method "
                "and key that the run began with, or another file."
            )
    there, here = found["settings"], wanted["settings"]
    # num_samples may be larger than in the file, because the first steps of both runs are the same.
    others = [name for name in here if name != "num_samples" and there.get(name) != here[name]]
    if others:
        listed = ", ".join(f"{name} {there.get(name)!r}, not {here[name]!r}" for name in others)
        raise ValueError(
            f"{path} contains a run of {found['method']} with other settings: {listed}."
        )
    if "num_samples" in here and there["num_samples"] > here["num_samples"]:
        many, few = there["num_samples"], here["num_samples"]
        raise ValueError(
            f"{path} contains a run with num_samples = {many}, and num_samples = {few} was "
            f"requested. Pass at least {many} to continue the run. To use only {few} of its draws, "
            f"read it by `bayes.load` with num_samples = {many}, and call "
            f"`samples({few}, key=key)`."
        )
