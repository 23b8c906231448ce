"""A small language model: a transformer that reads characters and writes new text.

The model learns Python's reference manual, which every Python includes (`pydoc_data`). The
transformer's layers are a `ScanStack`, compiled once at any depth. Weights are stored in float32
and multiplied in bfloat16 (`MixedPrecision`). Optax accumulates the gradients of several batches
for one update (`MultiSteps`), warms the learning rate up, decays it, and clips gradients.

The last tenth of the text is held out. On this part, the script compares the model with tables of
pairs, triples and quadruples of characters, in nats a character. At the end the model writes some
text.
"""

import argparse
import textwrap
from collections.abc import Sequence
from pydoc_data import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import eqxlike as eqx
from eqxlike import nn, train

CONTEXT, BATCH_SIZE, ACCUMULATE = 64, 32, 2


class Block(eqx.Module):
    """Causal attention and an MLP, each with a residual connection."""

    attention_norm: nn.RMSNorm
    attention: nn.MultiheadAttention
    mlp_norm: nn.RMSNorm
    mlp: nn.MLP
    rotary: nn.RotaryPositionalEmbedding

    def __init__(self, width: int, key: jax.Array):
        key1, key2 = jax.random.split(key)
        self.attention_norm = nn.RMSNorm(width)
        self.attention = nn.MultiheadAttention(num_heads=4, query_size=width, key=key1)
        self.mlp_norm = nn.RMSNorm(width)
        self.mlp = nn.MLP(width, width, 4 * width, depth=1, activation=jax.nn.gelu, key=key2)
        self.rotary = nn.RotaryPositionalEmbedding(width // 4)

    def __call__(self, x: jax.Array, mask: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
        y = jax.vmap(self.attention_norm)(x)
        x = x + self.attention(y, y, y, mask, process_heads=self.rotate_heads)
        return x + jax.vmap(self.mlp)(jax.vmap(self.mlp_norm)(x))

    def rotate_heads(self, query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
        """Rotates queries and keys by their positions; only differences of positions matter."""
        rotate = jax.vmap(self.rotary, in_axes=1, out_axes=1)
        return rotate(query), rotate(key), value


class LanguageModel(eqx.Module):
    embedding: nn.Embedding
    blocks: nn.ScanStack
    norm: nn.RMSNorm
    readout: nn.Linear

    def __init__(self, num_characters: int, width: int, depth: int, key: jax.Array):
        key1, key2, key3 = jax.random.split(key, 3)
        self.embedding = nn.Embedding(num_characters, width, key=key1)
        self.blocks = nn.ScanStack(lambda key: Block(width, key), depth, key=key2)
        self.norm = nn.RMSNorm(width)
        self.readout = nn.Linear(width, num_characters, key=key3)

    def __call__(self, characters: jax.Array) -> jax.Array:
        """The logits of the next character at each position, shape (length, num_characters)."""
        mask = jnp.tril(jnp.ones((len(characters), len(characters)), bool))
        x = self.blocks(jax.vmap(self.embedding)(characters), mask)
        return jax.vmap(self.readout)(jax.vmap(self.norm)(x))


def losses(model: Any, windows: Any) -> jax.Array:
    """The loss in nats of each character after the first; windows have shape (B, CONTEXT + 1)."""
    logits = jax.vmap(model)(windows[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:])


@eqx.filter_jit
def write(model: Any, window: jax.Array, count: int, temperature: float, key: jax.Array) -> Any:
    """Draws `count` characters one after another, each from the model's logits for the window."""

    def one(window: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        drawn = jax.random.categorical(key, model(window)[-1] / temperature)
        drawn = drawn.astype(window.dtype)
        return jnp.append(window[1:], drawn), drawn

    return jax.lax.scan(one, window, jax.random.split(key, count))[1]


def load_text() -> tuple[np.ndarray, np.ndarray, str]:
    """The training text and the held-out text as indices of characters, and the characters."""
    text = "".join(topics.topics[name] for name in sorted(topics.topics))
    known = {ord(character): number for number, character in enumerate(sorted(set(text)))}
    numbers = np.array([known[ord(character)] for character in text], np.int32)
    split = len(numbers) * 9 // 10
    return numbers[:split], numbers[split:], "".join(sorted(set(text)))


def windows_of(numbers: np.ndarray) -> np.ndarray:
    """The text cut into windows that overlap by one character."""
    starts = np.arange(0, len(numbers) - CONTEXT, CONTEXT)
    return numbers[starts[:, None] + np.arange(CONTEXT + 1)]


def counted(length: int, learned: np.ndarray, text: np.ndarray, size: int) -> np.ndarray:
    """For each position of `text`, how often its last `length` characters occur in `learned`.

    Texts are cyclic: the last character of a text precedes its first character.
    """

    def codes(numbers: np.ndarray) -> np.ndarray:
        before = (np.roll(numbers.astype(np.int64), lag) for lag in range(length))
        return sum((each * size**lag for lag, each in enumerate(before)), np.zeros(len(numbers)))

    kinds, counts = np.unique(codes(learned), return_counts=True)
    places = np.searchsorted(kinds, codes(text)).clip(max=len(kinds) - 1)
    return np.where(kinds[places] == codes(text), counts[places], 0)


def chances(length: int, learned: np.ndarray, text: np.ndarray, size: int) -> np.ndarray:
    """The probability that a table of `length` characters gives to each character of `text`.

    The table of `length - 1` characters smooths the table of `length` characters. The table of 0
    characters is the uniform distribution.
    """
    if length == 0:
        return np.full(len(text), 1 / size)
    shorter = chances(length - 1, learned, text, size)
    together = counted(length, learned, text, size)
    alone = counted(length - 1, learned, np.roll(text, 1), size)
    return (together + 3 * shorter) / (alone + 3)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=2000, metavar="N", help="batches (2000)")
    parser.add_argument("--width", type=int, default=64, metavar="N", help="layer width (64)")
    parser.add_argument("--depth", type=int, default=3, metavar="N", help="blocks (3)")
    parser.add_argument("--characters", type=int, metavar="N", help="characters of the text (all)")
    parser.add_argument(
        "--write", type=int, default=400, metavar="N", help="characters to write (400)"
    )
    options = parser.parse_args(arguments)

    learned, held_out, alphabet = load_text()
    learned = learned[: options.characters]
    held_out = held_out[: options.characters or 50_000]
    model_key, key, write_key = jax.random.split(jax.random.key(0), 3)
    model = LanguageModel(len(alphabet), options.width, options.depth, model_key)
    model = nn.MixedPrecision(model, "params=float32,compute=bfloat16,output=float32")
    updates = options.steps // ACCUMULATE
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, updates // 10, updates)
    optimiser = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, mask=nn.decay_mask)
    )
    optimiser = optax.MultiSteps(optimiser, ACCUMULATE).gradient_transformation()
    evaluate = train.make_evaluate(
        lambda model, windows: {"nats": train.metrics.mean(losses(model, windows))},
        np.array_split(windows_of(held_out), max(1, len(held_out) // (50 * CONTEXT))),
    )
    start = train.TrainState.create(model, optimiser, key=key)
    print(f"{len(learned):,} characters to learn, of {len(alphabet)} kinds")
    result = train.fit(
        start,
        train.make_step(lambda model, windows, key: losses(model, windows).mean(), optimiser),
        train.minibatches(windows_of(learned), BATCH_SIZE, seed=0),
        num_steps=options.steps,
        on_log=lambda step, loss: print(f"step {step:4}: {loss:.3f} nats", flush=True),
        log_every=max(1, options.steps // 5),
    )
    print("Held out, nats a character:")
    for length, name in enumerate(["pairs", "triples", "quadruples"], start=2):
        nats = -np.log(chances(length, learned, held_out, len(alphabet))).mean()
        print(f"  tables of {name:10} {nats:.3f}")
    print(f"  the transformer      {evaluate(result.state)['nats']:.3f}")

    window = jnp.asarray(held_out[:CONTEXT])
    drawn = write(result.state.model, window, options.write, 0.7, write_key)
    print("It writes:\n")
    print(textwrap.indent("".join(alphabet[number] for number in drawn.tolist()), "    "))


if __name__ == "__main__":
    main()
