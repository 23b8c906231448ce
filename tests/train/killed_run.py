"""A training with dropout that saves itself; the tests kill it and start it again.

`python killed_run.py FOLDER RESULT STEPS_PER_CALL` prints steps that it reached, and writes the
last state to RESULT.
"""

import os
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

from eqxlike import nn, train

NUM_STEPS = int(os.environ.get("EQXLIKE_STEPS", "60"))
EVERY = {1: 4, 16: 20}
"""Steps between checkpoints, by the steps in a call: one of 16 and one of 4."""


class Said(train.Callback):
    """Says after which step it is."""

    def __init__(self, every):
        self.every = every

    def on_step(self, run):
        print(run.steps, flush=True)


def loss(model, batch, key):
    x, y = batch
    outputs = jax.vmap(lambda x, key: model(x, key=key))(x, jax.random.split(key, len(x)))
    return jnp.mean((outputs - y) ** 2)


def main(folder, steps_per_call):
    """The result of the run, from wherever it was."""
    keys = jax.random.split(jax.random.key(0))
    model = nn.Sequential(
        [nn.Linear(3, 4, key=keys[0]), nn.Dropout(0.5), nn.Linear(4, "scalar", key=keys[1])]
    )
    optimiser = optax.adam(0.01)
    state = train.TrainState.create(model, optimiser, key=jax.random.key(1))
    x = np.random.default_rng(0).normal(size=(22, 3)).astype(np.float32)
    return train.fit(
        state,
        train.make_step(loss, optimiser),
        train.minibatches((x, x.sum(axis=1)), 4, seed=0),
        num_steps=NUM_STEPS,
        steps_per_call=steps_per_call,
        callbacks=[
            train.Checkpoint(folder, every=EVERY[steps_per_call]),
            Said(EVERY[steps_per_call] if steps_per_call > 1 else 1),
        ],
        resume_from=folder,
    )


if __name__ == "__main__":
    result = main(sys.argv[1], int(sys.argv[3]))
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(result.state.model)]
    np.savez(pathlib.Path(sys.argv[2]), *leaves)
    print(result.message)
