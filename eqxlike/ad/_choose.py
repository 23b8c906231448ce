"""The fastest mode for a function, found once for each form of its arguments."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.tree_util as jtu
from jaxtyping import PyTree

from .._check_numbers import positive_number, whole_number
from .._pytree import is_array
from .._transforms import filter_jit
from ._compare._compare import Entrant, Trial, all_agree, trial_of
from ._compare._reference import NoReference
from ._compare._subject import (
    CHUNK,
    Modes,
    checked_subject,
    named_modes,
    refuse_tracers,
    with_arrays_as_leaves,
)
from ._measuring import Call, Times, time_interleaved
from ._modes import Checkpointed, FiniteDifference, Forward, Mode, Reverse

_PRIMAL = ""
"""The name of the function itself among the modes; no mode has it."""


def choose(
    f: Callable[..., Any],
    *args: Any,
    modes: Modes = None,
    has_aux: bool = False,
    rounds: int = 15,
    budget_s: float = 0.5,
) -> Mode:
    """The fastest mode that differentiates `f` rightly at arguments like these.

    It is measured once, and remembered by what `filter_jit` compiles a function again for: the
    structure of `f` and the arguments, all that is static in them, the shapes and dtypes of their
    arrays, and whether JAX computes in double precision; and by the devices of the arrays, the
    modes and the other arguments. `eqxlike.clear_caches` forgets it. With a mode that holds arrays
    it is measured each time.

    A mode is right if its gradient is finite, and that of all others too. Where they do not agree,
    finite differences in float64 decide, as in `ad.compare`. That shows all figures.

    **Arguments:**

    - `f`, `*args`, `has_aux`: as in `ad.compare`.
    - `modes`: the modes to choose from, in a sequence or a mapping. Where `None`, those that serve
      in every place: `Reverse()`, `Checkpointed()` and `Forward()`, this too in chunks of 64.
    - `rounds`: how often each mode is timed.
    - `budget_s`: the most seconds for which one mode is timed. One that would take far longer for
      a single call is not considered.

    **Returns:** one of the modes, for `filter_grad` and the like.

    **Raises:** as `ad.compare`, if `f` has no gradient in any mode; and `ValueError` if none of the
    modes is right.

    !!! example

        >>> import eqxlike as eqx, jax.numpy as jnp
        >>> from eqxlike import ad
        >>> def energy(x):
        ...     return jnp.sum(jnp.sin(x) ** 2)
        >>> mode = ad.choose(energy, jnp.arange(3.0))
        >>> gradient = eqx.filter_grad(energy, mode=mode)(jnp.arange(3.0))
    """
    named = named_modes(_MODES if modes is None else modes, "ad.choose")
    rounds = whole_number(rounds, "ad.choose: rounds")
    budget_s = positive_number(budget_s, "ad.choose: budget_s")
    refuse_tracers(f, args, "ad.choose")
    f = with_arrays_as_leaves(f)
    key = (_form((f, args, tuple(named.items()))), has_aux, rounds, budget_s, _surroundings())
    if any(map(is_array, jtu.tree_leaves(tuple(named.values())))):
        # What a mode does may depend on the values of its arrays, of which none are remembered.
        key = None
    if name := _recall(key):
        return named[name]
    # Two measurements at a time would disturb each other.
    with _measuring:
        name = _recall(key)
        if name is None:
            # Each call uses the same keys again.
            with jax.debug_key_reuse(False):
                name = _fastest(f, args, named, has_aux, rounds, budget_s)
            _remember(key, name)
    return named[name]


_MODES = (Reverse(), Checkpointed(), Forward(CHUNK))

_measuring = threading.RLock()

_slot = threading.local()
"""Its `name` is the one that this thread is about to remember, if it is about to."""


class _NothingToRemember(Exception):
    pass


@filter_jit
def _remembered(key: Any) -> str:
    """The name that was in the slot when this was traced for `key`.

    So `filter_jit` remembers: it knows what a trace serves for, how long it is needed, which thread
    comes first, and when to forget. A trace that raises is not kept.
    """
    name = getattr(_slot, "name", None)
    if name is None:
        raise _NothingToRemember
    return name


def _recall(key: Any) -> str | None:
    try:
        return None if key is None else _remembered(key)
    except (_NothingToRemember, TypeError):  # Of a key that is not hashable nothing is remembered.
        return None


def _remember(key: Any, name: str) -> None:
    _slot.name = name
    try:
        _recall(key)
    finally:
        _slot.name = None


def _surroundings() -> tuple[Any, ...]:
    """What else a measurement depends on."""
    config: Any = jax.config
    return config.jax_enable_x64, str(config.jax_default_device), jax.default_backend()


def _form(tree: PyTree) -> PyTree:
    """`tree` with all that is not in the values of its arrays: with what they are, and where."""

    def form(leaf: Any) -> Any:
        if not is_array(leaf):
            return leaf
        return jax.typeof(leaf), getattr(leaf, "sharding", None)

    return jtu.tree_map(form, tree)


def _fastest(
    f: Callable[..., Any],
    args: tuple[Any, ...],
    named: Mapping[str, Mode],
    has_aux: bool,
    rounds: int,
    budget_s: float,
) -> str:
    """The name of the fastest of the modes that are right."""
    trial = trial_of(checked_subject(f, args, has_aux, "ad.choose"), budget_s)
    calls = _right(trial, [trial.enter(name, mode) for name, mode in named.items()])
    if len(calls) == 1:
        return next(iter(calls))
    times = {name: Times() for name in (_PRIMAL, *calls)}
    calls[_PRIMAL] = trial.primal
    time_interleaved(_PRIMAL, calls, times, rounds=rounds, budget_s=budget_s)
    primal = times.pop(_PRIMAL)
    # A mode that failed while it was timed lacks rounds, and is not recommended.
    done = {name: each.ratio_to(primal) for name, each in times.items() if each.failure is None}
    if not done:
        raise ValueError(
            "`ad.choose`: every mode failed while it was timed; `ad.compare` says how."
        )
    return min(done, key=lambda name: done[name])


def _right(trial: Trial, entrants: Sequence[Entrant]) -> dict[str, Call]:
    """What to time of the modes that are right, by name."""
    fit = {each.row.mode: each for each in entrants if each.row.verdict == "ok"}
    complaints = {each.row.mode: each.row.explanation for each in entrants}
    gradients = [each.gradient for each in fit.values()]
    # One alone has none to agree with.
    if len(entrants) == 1 or not all_agree(trial.subject, gradients):
        try:
            trial = trial.against(FiniteDifference(4))
        except NoReference as error:
            raise ValueError(
                f"`ad.choose`: the gradients by {', '.join(fit)} do not agree, and nothing says "
                f"which is right. {error} Way out: `modes` that agree."
            ) from error.__cause__
        for name, entrant in list(fit.items()):
            judgement = trial.judge(entrant.value, entrant.gradient)
            complaints[name] = judgement.explanation
            if judgement.verdict != "ok":
                del fit[name]
    if not fit:
        lines = "".join(f"\n{name}: {why}" for name, why in complaints.items())
        raise ValueError(f"`ad.choose`: no mode has a gradient that is right.{lines}")
    return {name: each.call for name, each in fit.items() if each.call is not None}
