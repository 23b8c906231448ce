"""Low-rank adaptation: a trained network learns another task with few trained numbers.

A network that reads digits sees the same digits rotated by a quarter turn, which it cannot read.
`nn.replace_layers` adds two thin trained factors to each frozen weight (`nn.LoRALinear`). The
script compares a new readout on frozen features, all weights, and factors of several ranks: how
many numbers are trained, how many rotated digits the network then reads correctly, and how many
upright digits it still reads correctly. Then the script merges the factors into the weights, so
that the network has its old layers. Taking the factors out again restores every bit of the first
network.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn import datasets

import eqxlike as eqx
from eqxlike import nn, train

FEW = 200
"""The number of rotated digits to adapt to. The network was trained on 1297 upright digits."""

WIDTH, RANKS = 256, (1, 4, 16)


def loss(model: Any, batch: Any, key: jax.Array) -> jax.Array:
    images, labels = batch
    logits = jax.vmap(model)(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def trained(model: Any, data: Any, steps: int, learning_rate: float) -> Any:
    """The model after `steps` steps. Frozen arrays have no gradient, and no moments in Adam."""
    optimiser = optax.adam(learning_rate)
    start = train.TrainState.create(model, optimiser, key=jax.random.key(1))
    batches = train.minibatches(data, min(100, len(data[1])), seed=0)
    step = train.make_step(loss, optimiser)
    return train.fit(start, step, batches, num_steps=steps).state.model


@eqx.filter_jit
def accuracy(model: Any, data: Any) -> jax.Array:
    images, labels = data
    return jnp.mean(jnp.argmax(jax.vmap(model)(images), axis=1) == labels)


def size(tree: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def num_trained(model: Any) -> int:
    """The number of trained parameters, which are the parameters that have a gradient."""
    images, labels = jnp.zeros((1, 64)), jnp.zeros(1, jnp.int32)
    gradient = eqx.filter_grad(loss)
    return size(eqx.filter_eval_shape(gradient, model, (images, labels), jax.random.key(0)))


def with_new_readout(model: nn.MLP) -> nn.MLP:
    """Freezes the model and replaces its last layer."""
    readout = nn.Linear(WIDTH, 10, key=jax.random.key(2))
    model = eqx.tree_at(lambda model: model.layers[-1], model, readout)
    return nn.freeze(model, lambda model: model.layers[:-1])


def with_factors(rank: int) -> Callable[[nn.MLP], nn.MLP]:
    """Makes a function that adds factors to each weight. Their product is zero before training."""

    def adapt(layer: nn.Linear, key: jax.Array) -> nn.LoRALinear:
        return nn.LoRALinear(layer, rank, key=key)

    return lambda model: nn.replace_layers(model, nn.Linear, adapt, key=jax.random.key(3))


def load_digits() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Upright images and rotated images, both of shape (1797, 64), and labels."""
    images, labels = datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    upright = np.asarray(images, np.float32)[order] / 16
    turned = np.rot90(upright.reshape(-1, 8, 8), axes=(1, 2)).reshape(-1, 64)
    return upright, turned, np.asarray(labels, np.int32)[order]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=500, metavar="N", help="training steps (500)")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, metavar="N", help=f"{RANKS}")
    options = parser.parse_args(arguments)
    upright, turned, labels = load_digits()
    few = turned[500 : 500 + FEW], labels[500 : 500 + FEW]
    held_out = {"turned": (turned[:500], labels[:500]), "upright": (upright[:500], labels[:500])}

    base = nn.MLP(64, 10, WIDTH, depth=2, key=jax.random.key(0))
    base = trained(base, (upright[500:], labels[500:]), options.steps, 1e-3)
    ways: dict[str, tuple[Callable[[nn.MLP], Any], float]] = {
        "new readout": (with_new_readout, 3e-3),
        "all weights": (lambda model: model, 1e-3),
        **{f"factors of rank {rank}": (with_factors(rank), 3e-3) for rank in options.ranks},
    }
    adapted = {
        name: trained(make(base), few, options.steps, rate) for name, (make, rate) in ways.items()
    }
    print(f"{'':20}{'trained':>10}{'turned':>10}{'upright':>10}")
    for name, model in {"not adapted": nn.freeze(base), **adapted}.items():
        parts = [f"{accuracy(model, data):.1%}" for data in held_out.values()]
        print(f"{name:20}{num_trained(model):>10,}" + "".join(f"{part:>10}" for part in parts))

    model = adapted[f"factors of rank {options.ranks[-1]}"]
    merged = nn.replace_layers(model, nn.LoRALinear, lambda layer: layer.merge(keep_parts=True))
    images, _ = held_out["turned"]
    off = jnp.max(jnp.abs(jax.vmap(merged)(images) - jax.vmap(model)(images)))
    print(f"\nMerged: {type(merged.layers[0]).__name__}, outputs differ by {off:.0e} at most")
    again = nn.replace_layers(merged, nn.MergedLinear, lambda layer: layer.unmerge().linear)
    print(
        f"Factors removed, equal to the first network: {eqx.tree_equal(nn.unfreeze(again), base)}"
    )


if __name__ == "__main__":
    main()
