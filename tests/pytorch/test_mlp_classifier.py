"""The example that trains a classifier in several frameworks."""

import pathlib
import runpy

import jax
import numpy as np

PATH = pathlib.Path(__file__).parents[2] / "examples" / "mlp_classifier.py"


def losses(framework, images, labels):
    state, found = framework.state, []
    for _ in range(3):
        state, loss = framework.step(state, framework.array(images), framework.array(labels))
        found.append(float(loss))
    return found


def test_example_takes_the_same_steps_in_pytorch():
    script = runpy.run_path(str(PATH))
    generator = np.random.default_rng(0)
    images = generator.random((16, 784), np.float32)
    labels = generator.integers(10, size=16, dtype=np.int32)
    with jax.numpy_dtype_promotion("standard"):
        ours, theirs = (
            losses(script[name](script["Classifier"](jax.random.key(0))), images, labels)
            for name in ("in_eqxlike", "in_pytorch")
        )
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
