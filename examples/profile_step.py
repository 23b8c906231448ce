"""Finding and removing three costs of a training step that is slower than it should be.

A small network learns digits, in a straightforward loop. The loop is correct: the network learns.
`debug.explain_retraces` shows why each step is compiled. `eqxlike.transfers` shows which arrays
each call copies. `eqxlike.profile` compares the cost of a call with the cost of its computation.
Each finding leads to one change, and the table at the end compares all loops. All four loops make
the same steps, and end with the same network.
"""

import argparse
import dataclasses
import functools
import statistics
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn import datasets

import eqxlike as eqx
from benchmarks.timing import machine_info
from eqxlike import debug, nn

BATCH, WIDTH = 32, 16
Batch = tuple[Any, Any]


def schedule(count: Any) -> Any:
    """The learning rate of a step, which decreases."""
    return 1.0 / (1 + 0.02 * count)


def loss(model: Any, batch: Batch) -> jax.Array:
    images, labels = batch
    logits = jax.vmap(model)(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def updated(model: Any, batch: Batch, rate: Any) -> Any:
    gradient = eqx.filter_grad(loss)(model, batch)
    return eqx.apply_updates(model, jax.tree.map(lambda each: -rate * each, gradient))


# The first version: the rate is a Python number, a batch is two NumPy arrays.


@eqx.filter_jit
def step(model: Any, batch: Batch, rate: Any) -> Any:
    return updated(model, batch, rate)


def straightforward(model: Any, batches: Sequence[Batch]) -> Any:
    for count, batch in enumerate(batches):
        model = step(model, batch, schedule(count))
    return model


# First change: the step number is an array, and the rate is computed inside the step.


@eqx.filter_jit
def counted_step(model: Any, batch: Batch, count: jax.Array) -> tuple[Any, jax.Array]:
    return updated(model, batch, schedule(count)), count + 1


def with_a_count(model: Any, batches: Sequence[Batch]) -> Any:
    count = jax.device_put(np.float32(0))
    for batch in batches:
        model, count = counted_step(model, batch, count)
    return model


# Second change: the same loop gets batches that are on the device. Third change: each call makes
# many steps.


@eqx.filter_jit
def many_steps(model: Any, batches: Batch, count: jax.Array) -> tuple[Any, jax.Array]:
    def turn(carry: Any, batch: Batch) -> tuple[Any, None]:
        (arrays, count) = carry
        model = updated(eqx.combine(arrays, static), batch, schedule(count))
        return (eqx.filter(model, eqx.is_array), count + 1), None

    arrays, static = eqx.partition(model, eqx.is_array)
    (arrays, count), _ = jax.lax.scan(turn, (arrays, count), batches)
    return eqx.combine(arrays, static), count


def many_a_call(model: Any, chunks: Sequence[Batch]) -> Any:
    count = jax.device_put(np.float32(0))
    for chunk in chunks:
        model, count = many_steps(model, chunk, count)
    return model


@dataclasses.dataclass(frozen=True)
class Run:
    """A loop, its arguments, the times that `profile` reported, and the final network."""

    name: str
    loop: Callable[..., Any]
    batches: Any
    times: Any
    end: Any

    def row(self, step_us: float | None) -> str:
        shown = "-" if step_us is None else f"{step_us:.0f}"
        return (
            f"  {self.name:<22}{self.times.num_calls:>6}{self.times.num_traces:>8}"
            f"{self.times.compiling_s:>14.2f}{self.times.total_s:>8.2f}{shown:>17}"
        )


def times_of(loop: Callable[..., Any], model: Any, batches: Any) -> tuple[Any, Any]:
    """The times that `profile` reports for a loop's function, and the final network."""
    with eqx.profile() as found:
        end = loop(model, batches)
    (times,) = found.functions
    return times, end


def run(name: str, loop: Callable[..., Any], model: Any, batches: Any) -> Run:
    eqx.clear_caches()  # no loop reuses another loop's compiled program
    return Run(name, loop, batches, *times_of(loop, model, batches))


def step_us(loop: Callable[..., Any], model: Any, batches: Any, steps: int) -> float:
    """The time of a compiled step until its result is ready, in microseconds."""
    times, _ = times_of(loop, model, batches)
    return times.completion_us * times.num_calls / steps


def in_turns(measures: Sequence[Callable[[], float]], rounds: int = 7) -> list[float]:
    """The median time of each loop, measured in turns, so that other load affects all of them."""
    found = [[measure() for measure in measures] for _ in range(rounds)]
    return [statistics.median(column) for column in zip(*found, strict=True)]


def wrapped(text: str) -> str:
    return textwrap.fill(text, 80, initial_indent="  ", subsequent_indent="  ")


def explain(model: Any, batches: Sequence[Batch]) -> None:
    """Prints why the second step is compiled again."""

    def show(trace: Any) -> None:
        difference = trace.differences[0]
        print(f"  trace {trace.number}, for {difference.path}: ", end="")
        print(f"{difference.before} -> {difference.after}")
        print(wrapped(difference.advice))

    with debug.explain_retraces(show):
        straightforward(model, batches[:2])


def refused(model: Any, batches: Sequence[Batch]) -> list[str]:
    """The copied arguments that `eqxlike.transfers` refuses in a step, if any."""
    try:
        with eqx.transfers("explicit"):
            with_a_count(model, batches[:1])
    except RuntimeError as error:
        return [note for note in error.__notes__ if note.startswith("These arguments")]
    return []


def data(steps: int) -> tuple[list[Batch], Batch]:
    """A batch of NumPy arrays for each step, and the held-out data."""
    images, labels = datasets.load_digits(return_X_y=True)
    images, labels = np.asarray(images / 16, np.float32), np.asarray(labels, np.int32)
    random = np.random.default_rng(0)
    order = random.permutation(len(labels))
    rows = (random.choice(order[500:], BATCH, replace=False) for _ in range(steps))
    held_out = order[:500]
    return [(images[each], labels[each]) for each in rows], (images[held_out], labels[held_out])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=64, help="number of steps of each loop")
    parser.add_argument("--chunk", type=int, default=8, help="number of steps in a call")
    options = parser.parse_args(arguments)
    steps, chunk = options.steps, options.chunk
    if steps % chunk:
        parser.error(f"--steps must be a multiple of --chunk; they are {steps} and {chunk}.")
    batches, (images, labels) = data(steps)
    model = nn.MLP(64, 10, WIDTH, depth=2, key=jax.random.key(0))

    print("1. Why is it compiled again? debug.explain_retraces says:")
    explain(model, batches)
    first = run("first version", straightforward, model, batches)
    runs = [run("the rate inside", with_a_count, model, batches)]

    print("\n2. What is copied at each call? transfers('explicit') says:")
    print("\n".join(map(wrapped, refused(model, batches))))
    placed = [jax.device_put(batch) for batch in batches]
    print(f"  With batches on the device: {refused(model, placed) or 'nothing'}.")
    runs.append(run("batches on the device", with_a_count, model, placed))

    print("\n3. Does the computation or the call take the time? profile says:")
    doubled = jax.tree.map(lambda x: jnp.concatenate([x, x]), placed[0])
    once, twice = in_turns(
        [
            functools.partial(step_us, with_a_count, model, [batch] * steps, steps)
            for batch in (placed[0], doubled)
        ]
    )
    print(f"  A step takes {once:.0f} us, or {twice:.0f} us on twice the examples: ", end="")
    print("mostly the call." if twice < 1.5 * once else "mostly the computation.")
    chunks = [
        jax.device_put(jax.tree.map(lambda *each: np.stack(each), *batches[start : start + chunk]))
        for start in range(0, steps, chunk)
    ]
    runs.append(run(f"{chunk} steps a call", many_a_call, model, chunks))

    print(f"\n  {'':<22} calls  traces  compiling, s  all, s  warm step, us")
    print(first.row(None))  # no warm time, because each step is compiled again
    warm = in_turns(
        [functools.partial(step_us, each.loop, model, each.batches, steps) for each in runs]
    )
    print("\n".join(each.row(time_us) for each, time_us in zip(runs, warm, strict=True)))
    weights = [jax.tree.leaves(eqx.filter(each.end, eqx.is_array)) for each in (first, *runs)]
    off = max(
        float(np.max(np.abs(np.subtract(array, other))))
        for others in weights[1:]
        for array, other in zip(weights[0], others, strict=True)
    )
    right = float(jnp.mean(jnp.argmax(jax.vmap(runs[-1].end)(images), axis=1) == labels))
    print(f"\nWeights differ by {off:.0e} at most; {right:.1%} of held-out digits are right.")
    info = machine_info()
    print(
        f"Measured with jax {info['jax']} on one machine: {info['device']} ({info['cpu']}, "
        f"{info['cores']} cores)."
    )


if __name__ == "__main__":
    main()
