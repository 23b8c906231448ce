"""`infer`, which fits a posterior by any method, and the loop that runs the steps.

A compiled call makes many steps of all chains. Ctrl-C is delayed until the call has ended
(`delayed_interrupt` in `_runs.py`). Then `infer` saves the run, if it has a `checkpoint`, and
raises.

To add a method, see `Method` in `_method.py`.
"""

import contextlib
import math
import os
import pathlib
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array, Int, PRNGKeyArray

from .. import filter_eval_shape, filter_jit, tree_at
from .._check_numbers import positive_number, whole_number
from .._compat import Tracer
from .._dtypes import is_key
from .._runs import delayed_interrupt, run_progress
from .._traceback import stacklevel_of_user
from ..ad import Mode
from ._fitted import FittedPosterior, fitted_from, read_chains, with_predictive, write_chains
from ._libraries import ONCE_AND_BRIEFLY, as_libraries_compute, check_kind
from ._method import (
    Chains,
    Method,
    Problem,
    State,
    one_step,
    with_plain_numbers,
    without_weak_types,
)
from ._posterior import Data, Posterior, struct_of_example

ChainMethod = Literal["vectorized", "sequential", "parallel"]
"""How chains run, in NumPyro's terms."""


class InferenceWarning(UserWarning):
    """Warns that the result may be far from the posterior."""


def infer(
    target: Posterior,
    method: Method,
    *,
    key: PRNGKeyArray,
    mode: Mode | None = None,
    progress: bool = True,
    chain_method: ChainMethod | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every_s: float = 60.0,
    held_out: Data | None = None,
) -> FittedPosterior:
    """Infers the posterior of the unknowns of a target.

    **Arguments:**

    - `target`: the model with its priors, likelihood and data.
    - `method`: the method of inference, such as `bayes.NUTS()`.
    - `key`: random key for the whole run. The same key gives the same result.
    - `mode`: differentiation mode of the log density, from `eqxlike.ad`; reverse mode by default.
    - `progress`: whether to show progress: a bar in a terminal, lines of text otherwise.
    - `chain_method`: how chains run: `"vectorized"`, all in one batch; `"sequential"`, one after
      another; or `"parallel"`, distributed over the devices. The default is one batch, except for
      some ensembles on a CPU: see `bayes.DeepEnsemble`. The draws are the same up to rounding.
    - `checkpoint`: path of a file. The run is saved there at intervals, and on Ctrl-C or SIGTERM.
      Repeat the call to resume the run. The result is the same as for an uninterrupted run. A run
      with more `num_samples` can resume a run with fewer.
    - `checkpoint_every_s`: seconds between checkpoints.
    - `held_out`: examples `(x, y)` that are not in the target's data. `diagnostics.predictive` then
      also scores the draws on them.

    **Returns:** a `bayes.FittedPosterior`.

    **Raises:** before the run starts,

    - `TypeError` or `ValueError` if the method does not support the target, or if the held-out data
      do not suit the target.
    - `ValueError` if the checkpoint belongs to another run, and `FileNotFoundError` if its
      directory does not exist.
    - `ValueError` if the log density is not finite at the start. At the start, parameters have the
      values that they have in the model, and all other unknowns are 0 in linked space.

    During the run, Ctrl-C raises `KeyboardInterrupt`, and SIGTERM raises `SystemExit` with status
    143. The current compiled call finishes first.

    **Warns:** `bayes.InferenceWarning` for each problem of the result.

    >>> import jax, jax.numpy as jnp
    >>> from eqxlike import bayes, nn
    >>> x = jnp.linspace(-1.0, 1.0, 20)[:, None]
    >>> model = nn.Linear(1, "scalar", key=jax.random.key(0))
    >>> target = bayes.Posterior(model, bayes.normal(), bayes.Gaussian(0.1), (x, 2 * x[:, 0]))
    >>> posterior = bayes.infer(target, bayes.MAP(), key=jax.random.key(1), progress=False)
    >>> samples = posterior.samples(3, key=jax.random.key(2))
    >>> first = jax.tree.map(lambda each: each[0], samples)
    >>> bool(abs(posterior.model(first)(x[-1]) - 2.0) < 0.1)
    True
    """

    def warn(text: str) -> None:
        level = stacklevel_of_user()
        warnings.warn(f"{type(method).__name__}: {text}", InferenceWarning, stacklevel=level)

    if isinstance(target, Posterior):
        held_out = _checked(held_out, target)
    posterior = _inferred(
        target, method, warn, key, mode, progress, chain_method, checkpoint, checkpoint_every_s
    )
    posterior = with_predictive(posterior, held_out)
    for text in posterior.diagnostics.warnings:
        warn(text)
    return posterior


def _inferred(
    target: Posterior,
    method: Method,
    on_warning: Callable[[str], None],
    key: PRNGKeyArray,
    mode: Mode | None = None,
    progress: bool = False,
    chain_method: ChainMethod | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every_s: float = 60.0,
) -> FittedPosterior:
    """Runs inference without the predictive scores.

    **Arguments:** as for `infer`, and also

    - `on_warning`: called with each warning that the method gives before it runs.
    """
    _check(target, method, chain_method, mode, key)
    checkpoint_every_s = positive_number(checkpoint_every_s, "checkpoint_every_s")
    kinds = str | os.PathLike | None
    check_kind(checkpoint, kinds, "infer: checkpoint", "the path of a file")
    path = None if checkpoint is None else pathlib.Path(checkpoint)
    if path is not None and not path.parent.is_dir():
        raise FileNotFoundError(
            f"infer: checkpoint is {str(path)!r}, but the directory {str(path.parent)!r} does not "
            "exist."
        )
    problem, method = Problem(target, mode), with_plain_numbers(method)
    method.check(problem)
    for text in method.doubts(problem):
        on_warning(text)
    _check_start(problem)
    chains = start(method, problem, key)
    if path is not None and path.exists():
        chains, _ = read_chains(path, problem, method, chains, key)
    parts, saved_at = [chains.records], time.monotonic()

    def save() -> None:
        names = parts[0]
        parts[:] = [{name: np.concatenate([part[name] for part in parts], 1) for name in names}]
        if path is not None:
            write_chains(path, problem, method, Chains(chains.step, chains.states, parts[0]), key)

    bar: Any = contextlib.nullcontext(lambda step, text: None)
    if progress and method.num_steps:
        bar = run_progress(method.num_steps, type(method).__name__)
    with delayed_interrupt() as interrupt, bar as on_step:
        for now, last in advance(method, problem, chains, key, chain_method):
            chains = now
            parts.append(chains.records)
            on_step(chains.step, _progress_text(last))
            if interrupt.is_requested:
                save()
                where = "Nothing was saved: pass `checkpoint=PATH` to save runs."
                if path is not None:
                    where = f"The run is saved in {path}; repeat the call to continue it."
                raise interrupt.exception(
                    f"bayes.infer: stopped after step {chains.step} of {method.num_steps}. {where}"
                )
            if time.monotonic() - saved_at > checkpoint_every_s:
                save()
                saved_at = time.monotonic()
    save()
    # `fitted_from` calls `method.finish`, the last part of the run.
    return fitted_from(problem, method, Chains(chains.step, chains.states, parts[0]), key)


def _progress_text(last: dict[str, np.ndarray]) -> str:
    shown = (
        f"{name.removeprefix('is_')} {last[name].mean():.4g}"
        for name in ("loss", "acceptance", "is_divergent")
        if name in last
    )
    return ", ".join(shown) or "running"


# --- The loop: each compiled call makes many steps ---


# Target duration of a compiled call, in seconds. With many chains of NUTS, a call takes up to 8
# times as long. Ctrl-C waits for the end of a call, and the progress bar moves after each call.
_CALL_S = 0.5
# Limits on the bytes of the records and on the number of steps in one call.
_MAX_BYTES = 64 * 2**20
_MAX_STEPS = 256


@as_libraries_compute()
def start(method: Method, problem: Problem, key: PRNGKeyArray) -> Chains:
    """Chains before their first step."""
    run = _start_briefly if method.is_descent else _start
    states, records = run(method, problem, key)
    return Chains(0, states, jtu.tree_map(np.asarray, records))


def _initial_chains(
    method: Method, problem: Problem, key: PRNGKeyArray
) -> tuple[State, dict[str, Array]]:
    """Initial states, and empty records."""
    keys = jr.split(jr.fold_in(key, 0), method.num_chains)

    def init(key: PRNGKeyArray) -> State:
        return without_weak_types(method.init(problem, key))

    # `lax.map` compiles faster than `vmap`.
    states = jax.lax.map(init, keys) if method.is_descent else jax.vmap(init)(keys)

    one = filter_eval_shape(lambda: jtu.tree_map(lambda each: each[0], states))
    # Only the shapes are needed; the step is not computed.
    _, record = filter_eval_shape(one_step, method, problem, one, jnp.zeros((), jnp.int32), key)
    return states, jtu.tree_map(
        lambda each: jnp.zeros((method.num_chains, 0, *each.shape), each.dtype), record
    )


_start = filter_jit(_initial_chains)
_start_briefly = filter_jit(_initial_chains, compiler_options=ONCE_AND_BRIEFLY)


def advance(
    method: Method,
    problem: Problem,
    chains: Chains,
    key: PRNGKeyArray,
    chain_method: ChainMethod | None = None,
) -> Iterator[tuple[Chains, dict[str, np.ndarray]]]:
    """Runs chains to their end, and yields their state after each compiled call.

    The key of a step depends only on its number, so results do not depend on how steps are divided
    into calls.

    **Returns:** an iterator over pairs. The first entry is the chains, with the records of this
    call only. The second entry has the records of the last step.
    """
    chain_method = chain_method or ("sequential" if method.runs_apart(problem) else "vectorized")
    empty = {name: each[:, :0] for name, each in chains.records.items()}
    step_bytes = sum(
        each.itemsize * math.prod((each.shape[0], *each.shape[2:])) for each in empty.values()
    )
    size = max(1, min(_MAX_STEPS, method.num_steps, _MAX_BYTES // max(1, step_bytes)))
    # At the end of a call, all chains wait for the slowest chain. With many chains, a draw takes
    # twice as long in calls of 0.5 s as in calls of 4 s.
    is_waiting = chain_method == "vectorized" and not method.makes_draws_in_turn
    call_s = _CALL_S * (min(8, max(1, method.num_chains / 16)) if is_waiting else 1)
    count, step, states = 1, chains.step, chains.states
    while step < method.num_steps:
        count = min(count, size, method.num_steps - step)
        before = time.perf_counter()
        steps = np.asarray(step, np.int32), np.asarray(count, np.int32)
        states, buffers = _advance(method, problem, states, empty, key, *steps, size, chain_method)
        records = {name: np.asarray(buffer)[:, :count] for name, buffer in buffers.items()}
        seconds = time.perf_counter() - before
        after = np.arange(step, step + count) - method.num_dropped
        is_kept = (after >= 0) & ((after + 1) % method.thinning == 0)
        step += count
        last = {name: each[:, -1] for name, each in records.items()}
        yield Chains(step, states, {name: each[:, is_kept] for name, each in records.items()}), last
        # The first call includes compilation, so it says little about the time of a step.
        count = 2 * count if seconds < call_s / 2 else max(1, int(count * call_s / seconds))


@as_libraries_compute()
@filter_jit
def _advance(
    method: Method,
    problem: Problem,
    states: State,
    empty: dict[str, np.ndarray],
    key: PRNGKeyArray,
    first: np.ndarray,
    count: np.ndarray,
    size: int,
    chain_method: ChainMethod,
) -> tuple[State, dict[str, Array]]:
    """Makes `count` steps of all chains. Only the first `count` of the `size` records are valid."""

    def run(pairs: tuple[State, PRNGKeyArray]) -> tuple[State, dict[str, Array]]:
        states, keys = pairs
        buffers = {
            name: jnp.zeros((len(keys), size, *each.shape[2:]), each.dtype)
            for name, each in empty.items()
        }
        return method.advance(problem, states, keys, first, count, buffers)

    def run_one(pair: tuple[State, PRNGKeyArray]) -> tuple[State, dict[str, Array]]:
        one = jtu.tree_map(lambda each: each[None], pair)
        return jtu.tree_map(lambda each: each[0], run(one))

    pairs = states, jr.split(jr.fold_in(key, 1), method.num_chains)
    if chain_method == "sequential":
        return jax.lax.map(run_one, pairs)
    if chain_method == "vectorized":
        return run(pairs)
    devices = jax.devices()
    used = max(n for n in range(1, len(devices) + 1) if method.num_chains % n == 0)
    mesh = jax.make_mesh((used,), ("chains",), devices=devices[:used], axis_types=(AxisType.Auto,))
    spec = PartitionSpec("chains")
    run_all = jax.shard_map(run, mesh=mesh, in_specs=(spec,), out_specs=spec, check_vma=False)
    return run_all(pairs)


# --- Saved runs ---


def load(path: str | os.PathLike[str], target: Posterior, method: Method) -> FittedPosterior:
    """Reads a posterior that `FittedPosterior.save` wrote, or a checkpoint of `bayes.infer`.

    An unfinished run has the draws that were made before it stopped. `diagnostics.predictive` has
    only the scores on the training data.

    **Arguments:**

    - `target`, `method`: the target and method of the run.

    **Raises:** `ValueError` if the file contains no run, or a run of another target or method.
    """
    _check(target, method, None, None, jr.key(0))
    path, method = pathlib.Path(path), with_plain_numbers(method)
    problem = Problem(target)
    with as_libraries_compute():
        structs = filter_eval_shape(_start, method, problem, jr.key(0))
    states, records = jtu.tree_map(lambda each: np.zeros(each.shape, each.dtype), structs)
    blank = Chains(0, jtu.tree_map(jnp.asarray, states), records)
    chains, key = read_chains(path, problem, method, blank, None)
    return with_predictive(fitted_from(problem, method, chains, key))


# --- Simulation-based calibration ---


def simulation_ranks(
    target: Posterior,
    method: Method,
    *,
    key: PRNGKeyArray,
    num_simulations: int = 100,
    num_draws: int = 99,
) -> Int[np.ndarray, "R d"]:
    """Simulation-based calibration: ranks of true unknowns among draws from their posterior.

    Each of `R` simulations draws `d` unknowns from the prior, simulates data from them, and infers
    the posterior. If the method is exact, each rank is uniform on 0 to `num_draws`. Ranks pile up
    at both ends if posteriors are too narrow, in the middle if they are too wide, and at one end if
    they are biased (Talts, Betancourt, Simpson, Vehtari and Gelman, 2018, "Validating Bayesian
    Inference Algorithms with Simulation-Based Calibration"). `bayes.plot.sbc_ranks` plots the
    ranks.

    **Arguments:**

    - `target`: the model, its priors, its likelihood and its data `(x, y)`. Each simulation uses
      the inputs `x`, and replaces `y` by simulated values.
    - `method`: the method to test.
    - `key`: random key for true values, data and draws.
    - `num_simulations`: number of simulations, R.
    - `num_draws`: number of draws from each posterior. The draws should be nearly independent. Let
      a Markov chain keep many more draws than `num_draws`.

    **Returns:** the rank of each unknown, in linked space, in each simulation, shape `(R, d)`.

    **Raises:** the errors of `bayes.infer`, and `ValueError` if `num_simulations` or `num_draws` is
    not a positive integer.

    **Warns:** one `bayes.InferenceWarning` for all runs that have problems.

    >>> import jax, jax.numpy as jnp
    >>> from eqxlike import bayes, nn
    >>> x = jnp.linspace(-1.0, 1.0, 5)[:, None]
    >>> model = nn.Linear(1, "scalar", key=jax.random.key(0))
    >>> target = bayes.Posterior(model, bayes.normal(), bayes.Gaussian(0.5), (x, x[:, 0]))
    >>> method = bayes.Laplace(steps=300, learning_rate=0.05)
    >>> ranks = bayes.simulation_ranks(
    ...     target, method, key=jax.random.key(1), num_simulations=2, num_draws=9
    ... )
    >>> ranks.shape
    (2, 2)
    """
    num_simulations = whole_number(num_simulations, "num_simulations")
    num_draws = whole_number(num_draws, "num_draws")
    _check(target, method, None, None, key)
    ranks, poor = [], {}
    for index, each in enumerate(jr.split(key, num_simulations)):
        simulation_key, infer_key, draw_key = jr.split(each, 3)
        truth, y = _simulated(target, simulation_key)
        simulated = tree_at(lambda target: target.data[1], target, y)
        messages: list[str] = []
        posterior = _inferred(simulated, method, messages.append, infer_key)
        messages += posterior.diagnostics.warnings
        draws = _linked(posterior.problem, posterior.samples(num_draws, key=draw_key))
        ranks.append(np.sum(np.asarray(draws) < np.asarray(truth)[None], axis=0))
        if messages:
            poor[index] = " ".join(messages)
    if poor:
        first = min(poor)
        warnings.warn(
            f"simulation_ranks: {len(poor)} of {num_simulations} runs of {type(method).__name__} "
            f"have problems. The first, run {first}: {poor[first]}",
            InferenceWarning,
            stacklevel=2,
        )
    return np.stack(ranks)


@filter_jit
def _simulated(target: Posterior, key: PRNGKeyArray) -> tuple[Any, Any]:
    unknowns_key, key = jr.split(key)
    unknowns = target.sample_prior(key=unknowns_key)
    return Problem(target).flatten(target.unconstrain(unknowns)), target.simulate(unknowns, key=key)


@filter_jit
def _linked(problem: Problem, samples: Any) -> Array:
    return jax.vmap(lambda each: problem.flatten(problem.target.unconstrain(each)))(samples)


# --- Checks ---


def _check(target: Any, method: Any, chain_method: Any, mode: Any, key: Any) -> None:
    if not isinstance(target, Posterior):
        raise TypeError(
            "infer: target must be a bayes.Posterior, such as `bayes.Posterior(model, prior=..., "
            f"likelihood=..., data=(x, y))`; got one of type {type(target).__name__}."
        )
    check_kind(method, Method, "infer: method", "a bayes.Method, such as `bayes.NUTS()`")
    if chain_method not in (None, *get_args(ChainMethod)):
        raise ValueError(
            'infer: chain_method must be "vectorized", "sequential" or "parallel", got '
            f"{chain_method!r}."
        )
    wanted = "a mode of eqxlike.ad, such as `ad.Forward()`"
    check_kind(mode, Mode | None, "infer: mode", wanted)
    if mode is not None and not mode.has_batching:
        raise ValueError(
            f"infer: chains run in a batch, and {type(mode).__name__} does not support batching. "
            "Every other mode of eqxlike.ad does."
        )
    for name, tree in (("target", target), ("key", key)):
        for path, leaf in jtu.tree_leaves_with_path(tree):
            if isinstance(leaf, Tracer):
                raise TypeError(
                    f"infer: {name}{jtu.keystr(path)} is traced. Call infer outside of `jit`, "
                    "`vmap` and `grad`: it compiles its steps itself."
                )
    shape, dtype = getattr(key, "shape", ()), getattr(key, "dtype", None)
    if not (shape == () if is_key(key) else dtype == jnp.uint32 and len(shape) == 1):
        got = f"keys of shape {shape}: pass one, such as `keys[0]`" if is_key(key) else repr(key)
        raise TypeError(f"infer: key must be one key, such as `jax.random.key(0)`; got {got}.")


def _checked(held_out: Any, target: Posterior) -> Data | None:
    """Checks held-out data like the target's data, and returns them as JAX arrays."""
    if held_out is None:
        return None
    try:
        network, prior, likelihood = target.network, target.prior, target.likelihood
        data = Posterior(network, prior, likelihood, held_out).data
    except (TypeError, ValueError) as error:
        raise type(error)(f"infer: held_out: {error}") from error
    got, expected = (
        jtu.tree_map(lambda each: each.shape, struct_of_example(each))
        for each in (data, target.data)
    )
    if got != expected:
        raise ValueError(
            "infer: held_out must have the structure of the target's data, in which an example "
            f"(x, y) has shapes {expected}; an example of held_out has {got}."
        )
    return data


def _check_start(problem: Problem) -> None:
    parts = {name: float(value) for name, value in _parts_at_start(problem).items()}
    poor = [f"{name} is {value}" for name, value in parts.items() if not math.isfinite(value)]
    if poor:
        raise ValueError(
            f"infer: {', '.join(poor)} at the initial parameters of the model. Scale the inputs "
            "and targets, or use other initial parameters or priors."
        )


@filter_jit(compiler_options=ONCE_AND_BRIEFLY)
def _parts_at_start(problem: Problem) -> dict[str, jax.Array]:
    target = problem.target
    unknowns = target.initial_keeping(problem.kept, None)
    return {
        "the log prior": target.log_prior(unknowns),
        "the log likelihood": jnp.sum(target.log_likelihood(unknowns)),
    }
