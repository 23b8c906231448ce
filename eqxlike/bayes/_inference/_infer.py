"""The one way to find a posterior, whatever the method."""

import contextlib
import math
import os
import pathlib
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PRNGKeyArray

from ..._compat import Tracer
from ..._dtypes import is_key
from ..._interrupt import delayed_interrupt
from ..._numbers import positive_number
from ..._progress import OnStep, run_progress
from ..._transforms import filter_jit
from ...ad import Mode
from .._posterior import Posterior
from ._chains import ChainMethod, Chains, advance, joined, start
from ._files import read_chains, write_chains
from ._fitted import FittedPosterior, fitted_from, method_name
from ._method import Method, Problem, with_plain_numbers


class InferenceWarning(UserWarning):
    """What was found may not be the posterior."""


def infer(
    target: Posterior,
    method: Method,
    *,
    key: PRNGKeyArray,
    mode: Mode | None = None,
    progress: bool = True,
    chain_method: ChainMethod = "vectorized",
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every_s: float = 60.0,
) -> FittedPosterior:
    """Finds the posterior of the unknowns of a target.

    **Arguments:**

    - `target`: the model with its priors, its likelihood and its data.
    - `method`: how, for instance `bayes.NUTS()`.
    - `key`: for everything that is random. The same key gives the same result.
    - `mode`: how the log density is differentiated, a mode of `eqxlike.ad`; reverse by default.
    - `progress`: whether a bar, or lines where there is no terminal, say how far a run is.
    - `chain_method`: how the chains of a method run: `"vectorized"`, all in one batch;
      `"sequential"`, one after another; or `"parallel"`, spread over the devices.
    - `checkpoint`: a file that the run is saved in now and then, and at Ctrl-C or SIGTERM. The same
      call goes on from there, and ends with the same numbers as a run that was not interrupted. A
      run with more `num_samples` goes on from one with fewer.
    - `checkpoint_every_s`: seconds between two times that it is saved.

    **Returns:** a `bayes.FittedPosterior`.

    **Raises:** `TypeError` or `ValueError`, before anything runs, for a method that cannot serve
    the target, a log density that is not finite where the run would begin, or a checkpoint of
    another run; `FileNotFoundError` where the checkpoint has no directory. `KeyboardInterrupt` at
    Ctrl-C, and `SystemExit` with status 143 at SIGTERM, once the call under way has ended.

    **Warns:** `bayes.InferenceWarning` that says in words what is poor.

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
        # In the line that called `infer`, which called `inferred`, which called this.
        warnings.warn(f"{method_name(method)}: {text}", InferenceWarning, stacklevel=4)

    return inferred(
        target,
        method,
        warn,
        key=key,
        mode=mode,
        progress=progress,
        chain_method=chain_method,
        checkpoint=checkpoint,
        checkpoint_every_s=checkpoint_every_s,
    )


def inferred(
    target: Posterior,
    method: Method,
    on_doubt: Callable[[str], None],
    *,
    key: PRNGKeyArray,
    mode: Mode | None = None,
    progress: bool = False,
    chain_method: ChainMethod = "vectorized",
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every_s: float = 60.0,
) -> FittedPosterior:
    """What `infer` returns, where something else than a warning is made of what is poor.

    **Arguments:** those of `infer`, and

    - `on_doubt`: called with each thing that is poor, in words.
    """
    _check(target, method, chain_method, mode)
    _check_not_traced(target, key)
    _check_key(key)
    checkpoint_every_s = positive_number(checkpoint_every_s, "checkpoint_every_s")
    path = None if checkpoint is None else pathlib.Path(checkpoint)
    if path is not None and not path.parent.is_dir():
        raise FileNotFoundError(
            f"infer: checkpoint is {str(path)!r}, and there is no directory {str(path.parent)!r}."
        )
    problem, method = Problem(target, mode), with_plain_numbers(method)
    method.check(problem)
    for text in method.doubts(problem):
        on_doubt(text)
    _check_start(problem, key)
    chains = start(method, problem, key)
    if path is not None and path.exists():
        chains = read_chains(path, problem, method, chains, key)
    chains = _run(problem, method, chains, key, progress, chain_method, path, checkpoint_every_s)
    posterior = fitted_from(problem, method, chains, key)
    for text in posterior.diagnostics.warnings:
        on_doubt(text)
    return posterior


def _run(
    problem: Problem,
    method: Method,
    chains: Chains,
    key: PRNGKeyArray,
    shows_progress: bool,
    chain_method: ChainMethod,
    path: pathlib.Path | None,
    checkpoint_every_s: float,
) -> Chains:
    parts = [chains.records]

    def save() -> None:
        if path is not None:
            parts[:] = [joined(parts)]
            write_chains(path, problem, method, Chains(chains.step, chains.states, parts[0]), key)

    saved_at = time.monotonic()
    with delayed_interrupt() as interrupt, _shown(method, shows_progress) as on_step:
        for now, last in advance(method, problem, chains, key, chain_method):
            chains = now
            parts.append(now.records)
            on_step(chains.step, _described(last))
            if interrupt.is_requested:
                save()
                raise interrupt.exception(_stopped(path, chains.step, method.num_steps))
            if time.monotonic() - saved_at > checkpoint_every_s:
                save()
                saved_at = time.monotonic()
    save()
    return Chains(chains.step, chains.states, joined(parts))


@contextlib.contextmanager
def _shown(method: Method, shows_progress: bool) -> Iterator[OnStep]:
    if shows_progress and method.num_steps:
        with run_progress(method.num_steps, method_name(method)) as on_step:
            yield on_step
    else:
        yield lambda step, text: None


# What a record may hold that says how a run goes, and how it is written.
_TOLD = {"loss": "loss", "acceptance": "acceptance", "is_divergent": "divergent"}


def _described(last: dict[str, np.ndarray]) -> str:
    values = {told: np.asarray(last[name]).mean() for name, told in _TOLD.items() if name in last}
    return ", ".join(f"{told} {value:.4g}" for told, value in values.items()) or "running"


def _stopped(path: pathlib.Path | None, step: int, num_steps: int) -> str:
    if path is None:
        where = "Nothing was saved: `checkpoint=PATH` keeps a run."
    else:
        where = f"The run is saved in {path}; the same call goes on from there."
    return f"bayes.infer: stopped after step {step} of {num_steps}. {where}"


# --- checks ---


def _check(target: Any, method: Any, chain_method: Any, mode: Any) -> None:
    if not isinstance(target, Posterior):
        raise TypeError(f"infer: target must be a bayes.Posterior, got {target!r}.")
    if isinstance(method, type) and issubclass(method, Method):
        raise TypeError(
            f"infer: method must be an instance; call the class, `bayes.{method.__name__}()`."
        )
    if not isinstance(method, Method):
        raise TypeError(
            f"infer: method must be one of eqxlike.bayes, such as `bayes.NUTS()`; got {method!r}."
        )
    if chain_method not in ("vectorized", "sequential", "parallel"):
        raise ValueError(
            'infer: chain_method must be "vectorized", "sequential" or "parallel", got '
            f"{chain_method!r}."
        )
    if mode is not None and not isinstance(mode, Mode):
        raise TypeError(
            f"infer: mode must be one of eqxlike.ad, such as `ad.Forward()`; got {mode!r}."
        )
    if mode is not None and not mode.has_batching:
        raise ValueError(
            f"infer: chains run in a batch, for which {type(mode).__name__} has no rule; every "
            "other mode of eqxlike.ad has."
        )


def _check_not_traced(target: Posterior, key: Any) -> None:
    for name, tree in (("target", target), ("key", key)):
        for path, leaf in jtu.tree_leaves_with_path(tree):
            if isinstance(leaf, Tracer):
                raise TypeError(
                    f"infer: {name}{jtu.keystr(path)} is traced, and infer is no function to "
                    "transform: it compiles its steps itself, shows how far they are and takes "
                    "Ctrl-C. Call it outside of `jit`, `vmap` and `grad`."
                )


def _check_key(key: Any) -> None:
    shape, dtype = getattr(key, "shape", None), getattr(key, "dtype", None)
    if dtype is None:
        is_one = False
    elif is_key(key):
        is_one = shape == ()
    else:
        is_one = dtype == jnp.uint32 and len(shape or ()) == 1
    if not is_one:
        raise TypeError(f"infer: key must be one key, such as `jax.random.key(0)`; got {key!r}.")


def _check_start(problem: Problem, key: PRNGKeyArray) -> None:
    parts = {name: float(value) for name, value in _parts_at_start(problem, key).items()}
    poor = [f"{name} is {value}" for name, value in parts.items() if not math.isfinite(value)]
    if poor:
        raise ValueError(
            f"infer: {', '.join(poor)} at the parameters of the model. Scale the inputs and "
            "targets, or take other initial parameters or priors."
        )


@filter_jit
def _parts_at_start(problem: Problem, key: PRNGKeyArray) -> dict[str, jax.Array]:
    unknowns = problem.unknowns(problem.initial(jr.fold_in(key, 0)))
    target = problem.target
    return {
        "the log prior": target.log_prior(unknowns),
        "the log likelihood": jnp.sum(target.log_likelihood(unknowns)),
    }
