"""Exports a trained model to a process that does not have the model's class.

The script trains a classifier of digits and exports it, with its scaling of pixels and its softmax,
as one file for batches of any size. Another process loads the file without this script and without
the model's class. It must return the same probabilities. Then the script exports the weights alone
(safetensors) for other tools, and shows the errors for a wrong input and for a truncated file.
"""

import argparse
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn import datasets

import eqxlike as eqx
from eqxlike import nn, train

RECEIVER = """
import sys
import numpy as np
import eqxlike as eqx

program, images, probabilities = sys.argv[1:]
loaded = eqx.load_exported(program)
np.save(probabilities, loaded.call(np.load(images)))
print(loaded)
"""
"""The program of the other process."""


class Classifier(eqx.Module):
    """Takes a scanner's pixels, integers from 0 to 16."""

    layers: nn.MLP

    def __init__(self, key: jax.Array):
        self.layers = nn.MLP(64, 10, width_size=64, depth=1, key=key)

    def __call__(self, pixels: jax.Array) -> jax.Array:
        return self.layers(pixels.astype(jnp.float32) / 16)


def loss(model: Any, batch: Any, key: jax.Array) -> jax.Array:
    pixels, labels = batch
    logits = jax.vmap(model)(pixels)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def load_digits() -> tuple[Any, Any]:
    """Training pixels and held-out pixels, with labels."""
    pixels, labels = datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    pixels, labels = pixels[order].astype(np.uint8), labels[order].astype(np.int32)
    return (pixels[500:], labels[500:]), (pixels[:500], labels[:500])


def trained(steps: int) -> tuple[Classifier, float]:
    """The model, and its accuracy on held-out digits."""
    learned, (pixels, labels) = load_digits()
    optimiser = optax.adam(1e-3)
    start = train.TrainState.create(Classifier(jax.random.key(0)), optimiser, key=jax.random.key(1))
    step = train.make_step(loss, optimiser)
    batches = train.minibatches(learned, 100, seed=0)
    model = train.fit(start, step, batches, num_steps=steps).state.model
    right = jnp.mean(jnp.argmax(jax.vmap(model)(pixels), axis=1) == labels)
    return model, float(right)


def in_another_process(folder: pathlib.Path, pixels: np.ndarray) -> np.ndarray:
    """The output of the exported program in another process, which does not import this script."""
    np.save(folder / "pixels.npy", pixels)
    files = ["digits.eqxport", "pixels.npy", "probabilities.npy"]
    command = [sys.executable, "-c", RECEIVER, *files]
    process = subprocess.run(
        command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True, timeout=300
    )
    print("The other process says:", process.stdout.strip().splitlines()[0])
    return np.load(folder / "probabilities.npy")


def refusal(action: Any) -> str:
    """The first line of the error that `action` raises."""
    try:
        action()
    except ValueError as error:
        return str(error).splitlines()[0]
    raise AssertionError("This should have been refused.")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=1000, metavar="N", help="training steps (1000)"
    )
    options = parser.parse_args(arguments)
    model, right = trained(options.steps)
    _, (pixels, labels) = load_digits()
    print(f"Trained: {right:.1%} of held-out digits are right")

    def predict(pixels: jax.Array) -> jax.Array:
        """Probabilities of digits, shape (batch, 10)."""
        return jax.nn.softmax(jax.vmap(model)(pixels))

    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        exported = eqx.export(predict, jax.ShapeDtypeStruct(("batch", 64), jnp.uint8))
        exported.save(folder / "digits.eqxport")
        size = (folder / "digits.eqxport").stat().st_size
        weights = sum(leaf.nbytes for leaf in jax.tree.leaves(eqx.filter(model, eqx.is_array)))
        print(f"{repr(exported).splitlines()[0]}")
        print(f"A file of {size:,} bytes; weights take {weights:,}")

        probabilities = in_another_process(folder, pixels)
        off = np.max(np.abs(probabilities - predict(pixels)))
        right = np.mean(np.argmax(probabilities, axis=1) == labels)
        print(
            f"The other process: {right:.1%} are right; probabilities differ by {off:.0e} at most"
        )

        train.export_safetensors(model, folder / "digits.safetensors")
        fresh = Classifier(jax.random.key(1))
        again = train.import_safetensors(fresh, folder / "digits.safetensors")
        print(f"Weights that were saved alone and loaded are equal: {eqx.tree_equal(again, model)}")

        loaded = eqx.load_exported(folder / "digits.eqxport")
        print("A wrong input:", refusal(lambda: loaded.call(pixels[:, :63])))
        short = folder / "short.eqxport"
        short.write_bytes((folder / "digits.eqxport").read_bytes()[:1000])
        print("A file cut off:", refusal(lambda: eqx.load_exported(short)).replace(name, "..."))


if __name__ == "__main__":
    main()
