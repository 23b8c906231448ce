"""A classifier of digits with a full training setup: evaluation, early stopping, checkpoints, and a
run that resumes where it was interrupted.

A convolutional network with dropout learns scikit-learn's digits, 1797 images of 8 x 8 pixels. 300
images decide when to stop, and 500 are held out until the end. The baseline is a logistic
regression.

The network is trained twice: once without interruption, and once by a run that ends early and is
resumed. Both trainings end with bitwise equal networks. With `--folder` the checkpoints remain, and
you can interrupt the run yourself: press Ctrl-C, or kill the process, and start the script again.
"""

import argparse
import tempfile
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax
from sklearn import datasets, linear_model

import eqxlike as eqx
from eqxlike import nn, train

BATCH_SIZE, EVALUATE_EVERY, PATIENCE = 50, 50, 10


def network(key: jax.Array) -> nn.Sequential:
    keys = jax.random.split(key, 3)
    return nn.Sequential(
        [
            nn.Conv2d(1, 16, kernel_size=3, padding=1, key=keys[0]),
            nn.Lambda(jax.nn.relu),
            nn.MaxPool2d(2, stride=2),
            nn.Conv2d(16, 32, kernel_size=3, padding=1, key=keys[1]),
            nn.Lambda(jax.nn.relu),
            nn.MaxPool2d(2, stride=2),
            nn.Lambda(jax.numpy.ravel),
            nn.Dropout(0.3),
            nn.Linear(128, 10, key=keys[2]),
        ]
    )


def loss(model: Any, batch: Any, key: jax.Array) -> jax.Array:
    """The mean cross-entropy, with separate dropout for each image."""
    images, labels = batch
    keys = jax.random.split(key, len(images))
    logits = jax.vmap(lambda image, key: model(image, key=key))(images, keys)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def measure(model: Any, batch: Any) -> dict[str, train.metrics.Mean]:
    images, labels = batch
    logits = jax.vmap(nn.inference_mode(model))(images)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return {
        "loss": train.metrics.mean(losses),
        "accuracy": train.metrics.accuracy(logits, labels),
    }


def load_digits() -> tuple[Any, Any, Any]:
    """Images and labels for training, for early stopping, and for the final test."""
    images, labels = datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    images = (images[order] / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    labels = labels[order].astype(np.int32)
    parts = slice(800, None), slice(500, 800), slice(0, 500)
    train_on, choose_by, held_out = ((images[part], labels[part]) for part in parts)
    return train_on, choose_by, held_out


class Said(train.Callback):
    """Prints every fourth evaluation, and the step at which a run resumes."""

    def on_start(self, run: train.Run) -> None:
        if run.steps:
            print(f"  resumed after step {run.steps}")

    def on_evaluate(self, run: train.Run) -> None:
        if run.steps % (4 * EVALUATE_EVERY) == 0:
            loss, accuracy = run.metrics["loss"], run.metrics["accuracy"]
            print(f"  step {run.steps:4}: loss {loss:.4f}, accuracy {accuracy:.1%}")


class Training:
    """A training run that can be interrupted and resumed."""

    def __init__(self) -> None:
        self.train_on, choose_by, held_out = load_digits()
        optimiser = optax.adam(2e-3)
        model_key, key = jax.random.split(jax.random.key(0))
        self.start = train.TrainState.create(network(model_key), optimiser, key=key)
        self.step = train.make_step(loss, optimiser)
        self.evaluate = train.make_evaluate(measure, [choose_by])
        self.test = train.make_evaluate(measure, [held_out])

    def run(self, folder: str, num_steps: int) -> train.FitResult[Any]:
        """Resumes from the newest checkpoint in the folder, or starts if there is none."""
        return train.fit(
            self.start,
            self.step,
            train.minibatches(self.train_on, BATCH_SIZE, seed=0),
            num_steps=num_steps,
            evaluate=self.evaluate,
            evaluate_every=EVALUATE_EVERY,
            callbacks=[
                Said(),
                train.EarlyStopping("loss", patience=PATIENCE),
                train.Checkpoint(folder, every=EVALUATE_EVERY),
            ],
            resume_from=folder,
        )


def logistic_regression() -> float:
    """The accuracy of a linear classifier on held-out images."""
    train_on, _, (images, labels) = load_digits()
    linear = linear_model.LogisticRegression(max_iter=1000)
    linear.fit(train_on[0].reshape(-1, 64), train_on[1])
    return float(linear.score(images.reshape(-1, 64), labels))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=4000, metavar="N", help="most steps (4000)")
    parser.add_argument(
        "--folder", metavar="FOLDER", help="keep checkpoints here, and resume from them"
    )
    options = parser.parse_args(arguments)
    training = Training()
    if options.folder:
        result = training.run(options.folder, options.steps)
        print(result.message)
    else:
        with tempfile.TemporaryDirectory() as once, tempfile.TemporaryDirectory() as twice:
            print("Uninterrupted run:")
            result = training.run(once, options.steps)
            print(result.message.replace(once, "FOLDER"))
            print("Interrupted run:")
            early = len(result.history) // (2 * EVALUATE_EVERY) * EVALUATE_EVERY
            training.run(twice, early)
            resumed = training.run(twice, options.steps)
            print(resumed.message.replace(twice, "FOLDER"))
        print(f"Bitwise equal: {eqx.tree_equal(result.state.model, resumed.state.model)}")
    accuracy = training.test(result.state)["accuracy"]
    print(f"Held-out accuracy: {accuracy:.1%} (logistic regression {logistic_regression():.1%})")


if __name__ == "__main__":
    main()
