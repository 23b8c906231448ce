"""A training with dropout that saves itself; a test ends it, kills it, and starts it again.

`python killed_run.py FOLDER` prints steps that it reached.
"""

import os
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax

from eqxlike import nn, train

NUM_STEPS = int(os.environ.get("EQXLIKE_STEPS", "30"))


class Said(train.Callback):
    """Says after which step it is, and may wait to be killed after so many times."""

    every = 5

    def __init__(self, most=None):
        self.left = most

    def on_step(self, run):
        print(run.steps, flush=True)
        if self.left is not None:
            self.left -= 1
            if self.left == 0:
                threading.Event().wait()


def loss(model, batch, key):
    x, y = batch
    outputs = jax.vmap(lambda x, key: model(x, key=key))(x, jax.random.split(key, len(x)))
    return jnp.mean((outputs - y) ** 2)


def main(folder, most=None):
    """The result of the run, from wherever it was; without a folder nothing is saved."""
    said = Said(most)
    keys = jax.random.split(jax.random.key(0))
    model = nn.Sequential(
        [nn.Linear(3, 4, key=keys[0]), nn.Dropout(0.5), nn.Linear(4, "scalar", key=keys[1])]
    )
    optimiser = optax.sgd(0.01, momentum=0.9)
    state = train.TrainState.create(model, optimiser, key=jax.random.key(1))
    x = np.random.default_rng(0).normal(size=(22, 3)).astype(np.float32)
    return train.fit(
        state,
        train.make_step(loss, optimiser),
        train.minibatches((x, x.sum(axis=1)), 4, seed=0),
        num_steps=NUM_STEPS,
        # Of five steps between two checkpoints four are in one call, and one in another.
        steps_per_call=4,
        callbacks=[said] if folder is None else [train.Checkpoint(folder, every=5), said],
        resume_from=folder,
    )


if __name__ == "__main__":
    # It is killed after it said two or three.
    main(sys.argv[1], most=4)
