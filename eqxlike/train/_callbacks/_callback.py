"""`Callback`, the base class of callbacks, and the state that checkpoints save for them."""

import collections
from collections.abc import Callable, Sequence
from typing import Any

from jaxtyping import PyTree

from .._run import Run


class Callback:
    """Base class of callbacks. `fit` calls the hooks of a callback at events of a training run.

    Derive a class and override hooks. Each hook gets a `train.Run`. `fit` calls the hooks of its
    `callbacks` in order. An exception in a hook ends `fit`.

    - `every`: number of steps between two calls of `on_step`; `None` for no calls.

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

    To restore a callback's own state in a resumed run, override `save_state` and `load_state`, or
    `save_arrays` and `load_arrays` for arrays:

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
        """Called before the first step."""

    def on_log(self, run: Run) -> None:
        """Called every `log_every` steps, and after the last step. `run.loss` is the mean loss
        since the previous log.
        """

    def on_evaluate(self, run: Run) -> None:
        """Called after an evaluation, with its metrics in `run.metrics`."""

    def on_step(self, run: Run) -> None:
        """Called every `every` steps, after the logs and evaluations of that step."""

    def on_checkpoint(self, run: Run) -> None:
        """Called after a checkpoint was written. `run.checkpoint` is its folder.

        If a checkpoint is written in the background, this hook is called when the next checkpoint
        is due, or at the end of the run.
        """

    def on_end(self, run: Run) -> None:
        """Called after the last step, unless an exception ended the run."""

    @property
    def state_name(self) -> str:
        """The name of this callback's state in a checkpoint. If several callbacks have the same
        name, a resumed run matches them by their order.
        """
        return type(self).__qualname__

    def save_state(self) -> Any:
        """Returns the state to save in a checkpoint, or `None` if there is no state. The state must
        be made of JSON values: bools, numbers, strings, lists and dicts.
        """
        return None

    def load_state(self, run: Run, state: Any) -> None:
        """Called in a resumed run after `on_start`, with the value that `save_state` returned."""

    def save_arrays(self) -> PyTree:
        """Returns a pytree of arrays to save in a checkpoint; `None` for no arrays."""
        return None

    def load_arrays(self, run: Run, read: Callable[[PyTree], PyTree]) -> None:
        """Called after `load_state` if arrays were saved. `read(like)` returns the saved arrays.
        `like` is a pytree with the structure that was saved; see `train.restore`.
        """

    def close(self) -> None:
        """Called at the very end, even after an exception. Close files here."""


def metric_of(run: Run, metric: str, taker: str) -> float:
    """A metric of the last evaluation. **Raises:** `KeyError` if the metric is missing."""
    if metric not in run.metrics:
        raise KeyError(
            f"{taker} needs the metric {metric!r}, but `evaluate` returned "
            f"{', '.join(map(repr, run.metrics)) or 'none'}."
        )
    return run.metrics[metric]


def mode_of(mode: str | None, metric: str, taker: str) -> Any:
    """Returns `mode`, or `"min"` for a loss without a mode. **Raises:** `ValueError` if unclear."""
    if mode is None and "loss" in metric:
        return "min"
    if mode not in ("min", "max"):
        raise ValueError(
            f'{taker}: pass mode="max" if a larger {metric!r} is better, or mode="min" if a '
            f"smaller one is; got mode={mode!r}."
        )
    return mode


# --- The state of callbacks in checkpoints ---


def save_callbacks(callbacks: Sequence[Callback]) -> tuple[dict[str, Any], dict[str, PyTree]]:
    """Two dicts with names of callbacks as keys: the states as JSON values, and the arrays."""
    data, arrays = {}, {}
    for name, callback in callbacks_by_name(callbacks).items():
        state, own = callback.save_state(), callback.save_arrays()
        if own is not None:
            arrays[name] = own
        if state is not None or own is not None:
            data[name] = {"state": state, "has_arrays": own is not None}
    return data, arrays


def callbacks_by_name(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """The callbacks by name. The second callback with the same name gets the suffix ` #2`, and so
    on.
    """
    named: dict[str, Callback] = {}
    counts: collections.Counter[str] = collections.Counter()
    for callback in callbacks:
        name = callback.state_name
        counts[name] += 1
        named[name if counts[name] == 1 else f"{name} #{counts[name]}"] = callback
    return named
