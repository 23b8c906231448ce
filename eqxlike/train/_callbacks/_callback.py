"""What a callback is, and what it keeps over a resume."""

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any

from jaxtyping import PyTree

from .._run import Run


class Callback:
    """Something that observes a training, and acts at its events; `fit` takes several.

    Derive from it and write the hooks you want. They are called in the order of the callbacks, and
    see a `train.Run`. What a hook raises ends `fit`.

    - `every`: the number of steps between two calls of `on_step`; `None` for no calls.

    >>> import jax, jax.numpy as jnp, optax
    >>> from eqxlike import nn, train
    >>> class StopBelow(train.Callback):
    ...     def __init__(self, loss):
    ...         self.loss = loss
    ...     def on_log(self, run):
    ...         if run.loss < self.loss:
    ...             run.stop(f"The loss was below {self.loss} after step {run.steps}.")
    >>> optimiser = optax.sgd(0.1)
    >>> state = train.TrainState.create(
    ...     nn.Linear(2, 1, key=jax.random.key(0)), optimiser, key=jax.random.key(1)
    ... )
    >>> step = train.make_step(lambda model, x, key: jnp.mean(jax.vmap(model)(x) ** 2), optimiser)
    >>> result = train.fit(
    ...     state, step, [jnp.ones((4, 2))] * 99, num_steps=99, log_every=5,
    ...     callbacks=[StopBelow(0.1)],
    ... )
    >>> result.stopped
    'stopped'

    What it keeps from step to step goes into checkpoints, and comes back from them in a resumed
    run, by `save_state` and `load_state`; arrays by `save_arrays` and `load_arrays`:

    >>> class CountLogs(train.Callback):
    ...     def on_start(self, run):
    ...         self.count = 0
    ...     def on_log(self, run):
    ...         self.count += 1
    ...     def save_state(self):
    ...         return {"count": self.count}
    ...     def load_state(self, run, state):
    ...         self.count = state["count"]
    """

    every: int | None = None

    def on_start(self, run: Run) -> None:
        """Before the first step."""

    def on_log(self, run: Run) -> None:
        """After each `log_every` steps and the last one: `run.loss` is the mean since then."""

    def on_evaluate(self, run: Run) -> None:
        """After an evaluation: `run.metrics` is what it gave."""

    def on_step(self, run: Run) -> None:
        """After each `every` steps. Logs and evaluations that are due then have been made."""

    def on_checkpoint(self, run: Run) -> None:
        """After a checkpoint: `run.checkpoint` is its folder.

        One that a thread writes is reported when the next is due, or at the end.
        """

    def on_end(self, run: Run) -> None:
        """After the last step, whatever ended the run but an exception."""

    @property
    def state_name(self) -> str:
        """By which a resumed run finds what was kept. Their order tells those of one name apart."""
        return type(self).__qualname__

    def save_state(self) -> Any:
        """What a checkpoint is to keep of it, in bools, numbers, strings, lists and dicts, as JSON
        has them; `None` for nothing.
        """
        return None

    def load_state(self, run: Run, state: Any) -> None:
        """In a resumed run, after `on_start`: gets back what `save_state` gave."""

    def save_arrays(self) -> PyTree:
        """Arrays that a checkpoint is to keep of it, in any pytree; `None` for none."""
        return None

    def load_arrays(self, run: Run, read: Callable[[PyTree], PyTree]) -> None:
        """After `load_state`, where there were arrays: `read(like)` gives them back, for a pytree
        like theirs; see `train.restore`.
        """

    def close(self) -> None:
        """At the very end, also after an exception: closes files and the like."""


def metric_of(run: Run, metric: str, taker: str) -> float:
    """A metric of the last evaluation. **Raises:** `KeyError` if it gives none of that name."""
    if metric not in run.metrics:
        raise KeyError(
            f"{taker} looks for the metric {metric!r}, and `evaluate` gives "
            f"{', '.join(map(repr, run.metrics)) or 'none'}."
        )
    return run.metrics[metric]


# --- What checkpoints keep of callbacks ---


def kept_by(callbacks: Sequence[Callback]) -> tuple[dict[str, Any], dict[str, PyTree]]:
    """What `load_kept` needs: JSON, and the arrays of those callbacks that have some, by name."""
    data, arrays = {}, {}
    for name, callback in _named(callbacks).items():
        state, own = callback.save_state(), callback.save_arrays()
        if own is not None:
            arrays[name] = own
        if state is not None or own is not None:
            data[name] = {"state": state, "has_arrays": own is not None}
    return data, arrays


def load_kept(
    callbacks: Sequence[Callback],
    run: Run,
    data: dict[str, Any],
    read: Callable[[str, PyTree], PyTree],
) -> None:
    """Gives back to callbacks what was kept of those of their names.

    **Arguments:**

    - `data`: as `kept_by` gave it.
    - `read`: `read(name, like)` gives the arrays of a name.
    """
    for name, callback in _named(callbacks).items():
        kept = data.get(name)
        if kept is None:
            continue
        if kept["state"] is not None:
            callback.load_state(run, kept["state"])
        if kept["has_arrays"]:
            callback.load_arrays(run, functools.partial(read, name))


def _named(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """The callbacks by their names, of which those that come again have their number."""
    named: dict[str, Callback] = {}
    counts: collections.Counter[str] = collections.Counter()
    for callback in callbacks:
        name = callback.state_name
        counts[name] += 1
        named[name if counts[name] == 1 else f"{name} #{counts[name]}"] = callback
    return named
