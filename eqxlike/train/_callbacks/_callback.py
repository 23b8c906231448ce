"""What a callback is."""

from .._run import Run


class Callback:
    """Something that looks on, and acts, at moments of a training; `fit` takes several.

    Derive from it and write the moments you want. They are called in the order of the callbacks,
    and see a `train.Run`. What a moment raises ends `fit`.

    - `every`: after each multiple of so many steps `on_step` is called; never where it is `None`.

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
        """After a checkpoint: `run.checkpoint` is its folder."""

    def on_end(self, run: Run) -> None:
        """After the last step, whatever ended the run but an exception."""

    def close(self) -> None:
        """At the very end, also after an exception: lets go of files and the like."""
