"""A training with checkpoints and dropout. `python killed_run.py FOLDER` kills itself during it."""

import os
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

from eqxlike import nn, train


class Kill(train.Callback):
    """Kills the process while the third checkpoint is being written."""

    every = 5

    def on_step(self, run):
        if run.steps == 15:
            os.kill(os.getpid(), signal.SIGKILL)


def loss(model, batch, key):
    x, y = batch
    outputs = jax.vmap(lambda x, key: model(x, key=key))(x, jax.random.split(key, len(x)))
    return jnp.mean((outputs - y) ** 2)


OPTIMISER = optax.sgd(0.01, momentum=0.9)
STEP = train.make_step(loss, OPTIMISER)


def main(folder, *callbacks):
    """Runs or resumes the training, and returns its result. Without a folder nothing is saved."""
    key = jax.random.key(0)
    model = nn.Sequential([nn.Dropout(0.5), nn.Linear(3, "scalar", key=key)])
    state = train.TrainState.create(model, OPTIMISER, key=key)
    x = np.random.default_rng(0).normal(size=(22, 3)).astype(np.float32)
    return train.fit(
        state,
        STEP,
        train.minibatches((x, x.sum(axis=1)), 4, seed=0),
        num_steps=30,
        # The five steps between two checkpoints take a call of four steps and a call of one step.
        steps_per_call=4,
        callbacks=[] if folder is None else [train.Checkpoint(folder, every=5), *callbacks],
        resume_from=folder,
    )


if __name__ == "__main__":
    main(sys.argv[1], Kill())
