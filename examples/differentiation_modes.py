"""Which mode of differentiation to use: four functions that need different modes.

A classifier has many weights, and its loss is one number: reverse mode is the right choice. A rod
that cools in a thousand steps has two unknowns: forward mode is faster, and stores no intermediate
values. A long recurrence has many unknowns, and reverse mode stores every step: checkpointing
recomputes the steps, and needs a fraction of the memory. A loop that runs until convergence has no
reverse mode in JAX at all.

For each function, `ad.compare` reports which modes are correct, what they cost, and the fastest
correct mode. Then reverse mode trains a network that contains the loop until convergence as a
layer. The layer is differentiated by its own mode.
"""

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn import datasets

import eqxlike as eqx
from eqxlike import ad, nn, train

MODES = (ad.Reverse(), ad.Checkpointed(), ad.Forward())


class Question(NamedTuple):
    """A function, its first argument, its other arguments, and a mode that is correct."""

    function: Any
    unknowns: Any
    rest: tuple[Any, ...] = ()
    reference: ad.Mode = ad.Reverse()


def load_digits() -> tuple[np.ndarray, np.ndarray]:
    images, labels = datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    return np.asarray(images, np.float32)[order] / 16, np.asarray(labels, np.int32)[order]


def cross_entropy(model: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    logits = jax.vmap(model)(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def classifier() -> Question:
    images, labels = load_digits()
    model = nn.MLP(64, 10, width_size=32, depth=1, key=jax.random.key(0))
    return Question(cross_entropy, model, (images[:100], labels[:100]))


def rod(steps: int) -> Question:
    """The error of a cooling rod's simulated temperatures, given two properties of its material."""

    def cooled(material: dict[str, jax.Array]) -> jax.Array:
        def move(heat: jax.Array, _: None) -> tuple[jax.Array, None]:
            flow = jnp.roll(heat, 1) - 2 * heat + jnp.roll(heat, -1)
            return heat + material["conducts"] * flow - material["radiates"] * heat**4, None

        hot = jnp.where(jnp.arange(200) < 100, 1.0, 0.0)
        return jax.lax.scan(move, hot, length=steps)[0]

    def misfit(material: dict[str, jax.Array], seen: jax.Array) -> jax.Array:
        return jnp.mean((cooled(material) - seen) ** 2)

    truth = {"conducts": jnp.array(0.2), "radiates": jnp.array(0.001)}
    guess = {"conducts": jnp.array(0.1), "radiates": jnp.array(0.002)}
    return Question(misfit, guess, (cooled(truth),))


def recurrence(steps: int) -> Question:
    """A recurrent cell over many steps."""

    def last(cell: nn.GRUCell, x: jax.Array) -> jax.Array:
        def move(hidden: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
            return cell(x, hidden), None

        return jnp.sum(jax.lax.scan(move, jnp.zeros(16), x)[0] ** 2)

    x = jax.random.normal(jax.random.key(1), (steps, 4))
    return Question(last, nn.GRUCell(4, 16, key=jax.random.key(0)), (x,))


def settle(strength: jax.Array, x: jax.Array) -> jax.Array:
    """The fixed point of `y = tanh(strength * y + x)`, by iteration until convergence."""

    def is_moving(state: tuple[jax.Array, jax.Array]) -> jax.Array:
        y, before = state
        return jnp.any(jnp.abs(y - before) > 1e-5)

    def move(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        y, _ = state
        return jnp.tanh(strength * y + x), y

    return jax.lax.while_loop(is_moving, move, (jnp.tanh(x), jnp.zeros_like(x)))[0]


def settled() -> Question:
    x = jnp.linspace(-1.0, 1.0, 32)
    return Question(
        lambda strength, x: jnp.sum(settle(strength, x) ** 2),
        jnp.array(0.5),
        (x,),
        reference=ad.Forward(),
    )


def answer(question: Question, rounds: int) -> str:
    """A table of the modes, and the name of the fastest correct mode."""
    function, unknowns, rest, reference = question
    # The reference is computed in double precision.
    comparison = ad.compare(
        function, unknowns, *rest, modes=MODES, reference=reference, rounds=rounds
    )
    lines = [f"  {'':16}{'us':>10}{'ratio':>8}{'temporary bytes':>17}"]
    for row in comparison.rows:
        if row.gradient_us is None:
            lines.append(f"  {row.mode:16}{'-':>10}{'-':>8}{'-':>17}  {row.verdict}")
        else:
            figures = f"{row.gradient_us:>10,.0f}{row.ratio:>8.1f}{row.peak_bytes or 0:>17,}"
            lines.append(f"  {row.mode:16}{figures}  {row.verdict}")
    best = "none" if comparison.best is None else comparison.best.mode
    return "\n".join([*lines, f"  chosen: {best}"])


class Settling(eqx.Module):
    """A network with the loop between two layers. The loop is differentiated in forward mode."""

    first: nn.Linear
    strength: jax.Array
    last: nn.Linear

    def __init__(self, key: jax.Array):
        key1, key2 = jax.random.split(key)
        self.first = nn.Linear(64, 16, key=key1)
        self.strength = jnp.array(0.5)
        self.last = nn.Linear(16, 10, key=key2)

    def __call__(self, x: Any) -> jax.Array:
        loop = ad.differentiate_with(settle, ad.Forward())
        return self.last(loop(self.strength, self.first(x)))


def train_settling(steps: int) -> None:
    images, labels = load_digits()
    optimiser = optax.adam(3e-3)
    start = train.TrainState.create(Settling(jax.random.key(0)), optimiser, key=jax.random.key(1))
    step = train.make_step(lambda model, batch, key: cross_entropy(model, *batch), optimiser)
    batches = train.minibatches((images[500:], labels[500:]), 100, seed=0)
    model = train.fit(start, step, batches, num_steps=steps).state.model
    right = jnp.mean(jnp.argmax(jax.vmap(model)(images[:500]), axis=1) == labels[:500])
    print(f"  {right:.1%} of held-out digits are right; strength {model.strength:.2f}, was 0.50")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300, metavar="N", help="training steps (300)")
    parser.add_argument(
        "--length", type=int, default=1000, metavar="N", help="length of scans (1000)"
    )
    parser.add_argument("--rounds", type=int, default=30, metavar="N", help="timing rounds (30)")
    options = parser.parse_args(arguments)
    for title, question in {
        "The weights of a classifier": classifier(),
        "Two unknowns of a rod that cools": rod(options.length),
        "A long recurrence": recurrence(options.length),
        "A loop until convergence": settled(),
    }.items():
        print(f"{title}\n{answer(question, options.rounds)}\n", flush=True)
    print("A network with that loop inside")
    train_settling(options.steps)


if __name__ == "__main__":
    main()
