"""Times the first call of a network. `python -m benchmarks.export_process COLUMN DEPTH FOLDER`
prints the seconds to read its files and compute the first result, and the sum of the result, as
JSON.
"""

import json
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.export
import numpy as np

import eqxlike as eqx

TRACED, EXPORTED, JAX_EXPORT = "traced anew", "eqxlike.export", "jax.export alone"
IMAGES, WEIGHTS, EXPORTED_FILE, JAX_FILE = "images.npy", "weights.eqx", "network", "network.jax"
WIDTH = 64


def make_network(depth: int) -> eqx.nn.MLP:
    """A network that classifies digits of 64 pixels."""
    return eqx.nn.MLP(64, 10, width_size=WIDTH, depth=depth, key=jax.random.key(0))


def predict(network: eqx.nn.MLP, images: Any) -> jax.Array:
    """The probabilities of the digits, for a batch."""
    return jax.nn.softmax(jax.vmap(network)(images))


def _traced(folder: pathlib.Path, depth: int) -> Callable[[Any], Any]:
    like = eqx.filter_eval_shape(make_network, depth)
    network = eqx.tree_deserialise_leaves(folder / WEIGHTS, like)
    function = eqx.filter_jit(predict)
    return lambda images: function(network, images)


def _exported(folder: pathlib.Path, depth: int) -> Callable[[Any], Any]:
    return eqx.load_exported(folder / EXPORTED_FILE).call


def _by_jax(folder: pathlib.Path, depth: int) -> Callable[[Any], Any]:
    content = bytearray((folder / JAX_FILE).read_bytes())
    return jax.jit(jax.export.deserialize(content).call)


COLUMNS: dict[str, Callable[[pathlib.Path, int], Callable[[Any], Any]]] = {
    TRACED: _traced,
    EXPORTED: _exported,
    JAX_EXPORT: _by_jax,
}


def timed(column: str, depth: int, folder: pathlib.Path) -> dict[str, float]:
    """The seconds to read the files and make the first call, and the sum of the output."""
    images = jax.device_put(np.load(folder / IMAGES))
    jax.block_until_ready(images)
    start_s = time.perf_counter()
    found = jax.block_until_ready(COLUMNS[column](folder, depth)(images))
    first_s = time.perf_counter() - start_s
    return {"first_s": first_s, "sum": float(np.sum(np.asarray(found) ** 2))}


if __name__ == "__main__":
    print(json.dumps(timed(sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3]))))
