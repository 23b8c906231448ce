"""A classifier of handwritten digits in eqxlike, in raw JAX and, optionally, in PyTorch.

The network has 784 pixels, 32 hidden units and 10 classes; Adam minimises the cross-entropy of
batches of 128. All versions start from the same weights and see the same batches. The first table
shows how many held-out digits each version gets right, and what a training step costs, measured
interleaved.

The second table compares gradients for which one layer is differentiated by another mode than the
other layers. The third table shows that a step reuses the buffers of its arguments for its results,
and that a gradient can overwrite the previous gradient.

The data are scikit-learn's bundled digits, 1797 images of 8 x 8 pixels, enlarged to 28 x 28, the
size of MNIST's images. MNIST has more images, and its images are harder. Nothing is downloaded.
"""

import argparse
import dataclasses
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import eqxlike as eqx
from benchmarks.timing import installed_version, machine_info, measure
from eqxlike import ad
from eqxlike._check_numbers import whole_number_in
from eqxlike._tables import align

BATCH_SIZE = 128
EPOCHS, ROUNDS = 100, 200
QUICK_EPOCHS, QUICK_ROUNDS = 2, 2
RAW_JAX = "raw JAX"

# The classifier as you write it in eqxlike starts here.


class Classifier(eqx.Module):
    hidden: eqx.nn.Linear
    readout: eqx.nn.Linear

    def __init__(self, key):
        hidden_key, readout_key = jax.random.split(key)
        self.hidden = eqx.nn.Linear(784, 32, key=hidden_key)
        self.readout = eqx.nn.Linear(32, 10, key=readout_key)

    def __call__(self, pixels):
        return self.readout(jax.nn.relu(self.hidden(pixels)))


optimiser = optax.adam(1e-3)


def start(model):
    return model, optimiser.init(eqx.filter(model, eqx.is_inexact_array))


def cross_entropy(model, images, labels):
    logits = jax.vmap(model)(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@eqx.filter_jit(donate=("state",))
def step(state, images, labels):
    model, optimiser_state = state
    loss, gradient = eqx.filter_value_and_grad(cross_entropy)(model, images, labels)
    updates, optimiser_state = optimiser.update(gradient, optimiser_state)
    return (eqx.apply_updates(model, updates), optimiser_state), loss


def train(step, state, batches):
    loss = jnp.nan
    for images, labels in batches:
        state, loss = step(state, images, labels)
    return state, loss


# The classifier in eqxlike ends here. The other versions use the same loop, `train`.


@dataclasses.dataclass(frozen=True)
class Framework:
    """The classifier in one framework.

    - `state`: the model and the optimiser's state, before the first step.
    - `step`: function from state, images and labels to the new state and the loss.
    - `predict`: function from state and images to the predicted labels.
    - `array`: function from a NumPy array to an array of the framework.
    """

    state: Any
    step: Callable[[Any, Any, Any], tuple[Any, Any]]
    predict: Callable[[Any, Any], Any]
    array: Callable[[np.ndarray], Any] = jnp.asarray


def in_eqxlike(model: Classifier) -> Framework:
    """The classifier that is defined above. The first step donates the arrays of `model`."""

    def predict(state: Any, images: jax.Array) -> jax.Array:
        return jnp.argmax(jax.vmap(state[0])(images), axis=1)

    return Framework(start(model), step, predict)


def in_raw_jax(model: Classifier) -> Framework:
    """The same classifier with dictionaries of arrays, `jax.jit` and `jax.value_and_grad`."""
    optimiser = optax.adam(1e-3)
    parameters = {
        name: {"weight": layer.weight, "bias": layer.bias}
        for name, layer in (("hidden", model.hidden), ("readout", model.readout))
    }

    def logits_of(parameters: Any, images: jax.Array) -> jax.Array:
        hidden, readout = parameters["hidden"], parameters["readout"]
        units = jax.nn.relu(images @ hidden["weight"].T + hidden["bias"])
        return units @ readout["weight"].T + readout["bias"]

    def cross_entropy(parameters: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        logits = logits_of(parameters, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def step(state: Any, images: jax.Array, labels: jax.Array) -> Any:
        parameters, optimiser_state = state
        loss, gradient = jax.value_and_grad(cross_entropy)(parameters, images, labels)
        updates, optimiser_state = optimiser.update(gradient, optimiser_state)
        return (optax.apply_updates(parameters, updates), optimiser_state), loss

    def predict(state: Any, images: jax.Array) -> jax.Array:
        return jnp.argmax(logits_of(state[0], images), axis=1)

    state = parameters, optimiser.init(parameters)
    return Framework(state, jax.jit(step, donate_argnums=0), predict)


def in_pytorch(model: Classifier) -> Framework:
    """The same classifier with PyTorch's layers and optimiser, run eagerly."""
    torch: Any = importlib.import_module("torch")
    layers = torch.nn.Linear(784, 32), torch.nn.Linear(32, 10)
    with torch.no_grad():
        for layer, ours in zip(layers, (model.hidden, model.readout), strict=True):
            layer.weight.copy_(torch.from_numpy(np.array(ours.weight)))
            layer.bias.copy_(torch.from_numpy(np.array(ours.bias)))
    network = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1])
    optimiser = torch.optim.Adam(network.parameters(), lr=1e-3)

    def step(state: Any, images: Any, labels: Any) -> Any:
        network, optimiser = state
        optimiser.zero_grad()
        loss = torch.nn.functional.cross_entropy(network(images), labels)
        loss.backward()
        optimiser.step()
        return state, loss.detach()

    def predict(state: Any, images: Any) -> Any:
        with torch.no_grad():
            return state[0](images).argmax(dim=1)

    def array(values: np.ndarray) -> Any:
        tensor = torch.from_numpy(values)
        return tensor if tensor.is_floating_point() else tensor.long()

    return Framework((network, optimiser), step, predict, array)


class Digits(NamedTuple):
    """Images of shape (N, 784), between 0 and 1, and labels of shape (N,)."""

    images: np.ndarray
    labels: np.ndarray

    def batches(self, epochs: int) -> Iterator["Digits"]:
        """Shuffled batches, in another order each epoch. An incomplete last batch is dropped."""
        generator = np.random.default_rng(0)
        for _ in range(epochs):
            order = generator.permutation(len(self.labels))
            for first in range(0, len(order) - BATCH_SIZE + 1, BATCH_SIZE):
                batch = order[first : first + BATCH_SIZE]
                yield Digits(self.images[batch], self.labels[batch])


def load_digits() -> tuple[Digits, Digits]:
    """The digits for training and the held-out digits, enlarged to 28 x 28."""
    datasets: Any = importlib.import_module("sklearn.datasets")
    images, labels = datasets.load_digits(return_X_y=True)
    large = jax.image.resize(images.reshape(-1, 8, 8) / 16, (len(images), 28, 28), "linear")
    order = np.random.default_rng(0).permutation(len(labels))
    digits = Digits(np.asarray(large, np.float32).reshape(-1, 784), labels.astype(np.int32))
    held_out, training = order[:500], order[500:]
    return (
        Digits(digits.images[training], digits.labels[training]),
        Digits(digits.images[held_out], digits.labels[held_out]),
    )


def accuracy(framework: Framework, state: Any, digits: Digits) -> float:
    """The fraction of the digits that the model gets right."""
    found = framework.predict(state, framework.array(digits.images))
    return float(np.mean(np.asarray(found) == digits.labels))


def stepping(framework: Framework, state: Any, batch: Digits) -> Callable[[], Any]:
    """A function that makes one more step, for timing."""
    arrays = framework.array(batch.images), framework.array(batch.labels)

    def call() -> Any:
        nonlocal state
        state, loss = framework.step(state, *arrays)
        return loss

    return call


def compare(frameworks: Mapping[str, Framework], epochs: int, rounds: int) -> str:
    """Trains all classifiers, times their steps interleaved, and returns a table."""
    training, held_out = load_digits()
    found, calls = {}, {}
    for name, framework in frameworks.items():
        batches = (map(framework.array, batch) for batch in training.batches(epochs))
        state, loss = train(framework.step, framework.state, batches)
        found[name] = [f"{accuracy(framework, state, held_out):.1%}", f"{float(loss):.4f}"]
        calls[name] = stepping(framework, state, next(training.batches(1)))
    columns = measure(calls, baseline=RAW_JAX, rounds=rounds).columns
    rows = [
        [
            name,
            *found[name],
            f"{column.completion_us:.0f}",
            f"{column.completion_ratio.median:.2f}",
            f"{column.dispatch_us:.0f}",
            f"{column.dispatch_ratio.median:.2f}",
        ]
        for name, column in columns.items()
    ]
    title = (
        f"784-32-10, {epochs} epochs of {len(training.labels) // BATCH_SIZE} batches of "
        f"{BATCH_SIZE}; the time of a step, in microseconds and as a ratio to raw JAX"
    )
    headings = ["", "held out", "last loss", "until done", "ratio", "until it returns", "ratio"]
    return table(title, headings, rows)


def compare_modes(rounds: int) -> str:
    """A table of modes that differentiate the readout. The hidden layer uses reverse mode."""
    model = Classifier(jax.random.key(0))
    training, _ = load_digits()
    batch = [*map(jnp.asarray, next(training.batches(1)))]
    value_and_grad = eqx.filter_jit(eqx.filter_value_and_grad(cross_entropy))
    _, expected = value_and_grad(model, *batch)
    calls, errors = {}, {}
    for mode in (None, ad.Checkpointed(), ad.Forward(), ad.FiniteDifference(order=4)):
        by_mode = model
        if mode is not None:
            # The new layer has the arrays of the old layer, at the same place in the tree.
            by_mode = eqx.tree_at(
                lambda model: model.readout, model, ad.differentiate_with(model.readout, mode)
            )
        name = "JAX's own reverse mode" if mode is None else str(mode)
        _, gradient = value_and_grad(by_mode, *batch)
        errors[name] = furthest(gradient, expected)
        calls[name] = functools.partial(value_and_grad, by_mode, *batch)
    columns = measure(calls, baseline=next(iter(calls)), rounds=rounds).columns
    rows = [
        [
            name,
            f"{errors[name]:.0e}",
            f"{column.completion_us:.0f}",
            f"{column.completion_ratio.median:.2f}",
        ]
        for name, column in columns.items()
    ]
    title = "the gradient with one layer, the readout, differentiated by another mode"
    return table(title, ["", "furthest off", "until done (us)", "ratio"], rows)


def furthest(gradient: Any, expected: Any) -> float:
    """The largest error in a gradient, divided by the largest expected number."""
    pairs = list(zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True))
    off = max(float(np.max(np.abs(np.subtract(*pair)))) for pair in pairs)
    return off / max(float(np.max(np.abs(other))) for _, other in pairs)


def show_buffers() -> str:
    """A table of the buffers that XLA reports as reused, and that keep their addresses."""
    training, _ = load_digits()
    batch = [*map(jnp.asarray, next(training.batches(1)))]
    state = start(Classifier(jax.random.key(0)))
    state, _ = step(state, *batch)
    old, old_places = state, places(state)
    state, _ = step(state, *batch)
    model = state[0]
    into = ad.value_and_grad_into(cross_entropy)
    gradient = ad.gradient_buffers(model)
    old_gradient, old_gradient_places = gradient, places(gradient)
    _, gradient = into(gradient, model, *batch)
    rows = [
        buffers_row("step", step.lower(state, *batch), old, state, old_places),
        buffers_row(
            "ad.value_and_grad_into",
            into.lower(gradient, model, *batch),
            old_gradient,
            gradient,
            old_gradient_places,
        ),
    ]
    headings = ["", "bytes", "of them aliased by XLA", "old arrays deleted", "new in place of old"]
    return table("buffers that are reused", headings, rows)


def buffers_row(name: str, lowered: Any, old: Any, new: Any, old_places: list[int]) -> list[str]:
    """A row of the table of buffers, for a function from `old` to `new`."""
    arrays = jax.tree.leaves(new)
    is_deleted = [each.is_deleted() for each in jax.tree.leaves(old)]
    is_in_place = [one == other for one, other in zip(places(new), old_places, strict=True)]
    return [
        name,
        f"{sum(each.nbytes for each in arrays):,}",
        f"{lowered.compile().memory_analysis().alias_size_in_bytes:,}",
        f"{sum(is_deleted)} of {len(arrays)}",
        f"{sum(is_in_place)} of {len(arrays)}",
    ]


def table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as text, below its title."""
    return "\n  ".join([title, *align(headings, rows).splitlines()])


def places(tree: Any) -> list[int]:
    """The addresses of the arrays in memory."""
    return [each.unsafe_buffer_pointer() for each in jax.tree.leaves(tree)]


def problem_with(options: argparse.Namespace) -> str | None:
    """The reason why the script cannot run, or `None` if it can."""
    needed = {"sklearn": "demo"} | ({"torch": "pytorch"} if options.pytorch else {})
    for package, extra in needed.items():
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed: pip install 'eqxlike[{extra}]'"
    if options.pytorch and jax.default_backend() != "cpu":
        return "PyTorch is compared on the CPU: set JAX_PLATFORMS=cpu"
    return None


def machine() -> str:
    """The versions and the machine."""
    info = machine_info()
    versions = [(name, installed_version(name)) for name in ("eqxlike", "jax", "torch")]
    shown = ", ".join(f"{name} {version}" for name, version in versions if version)
    return f"{shown}; {info['device']} ({info['cpu']}, {info['cores']} cores)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=whole_number_in, metavar="N", help=f"default {EPOCHS}")
    parser.add_argument(
        "--rounds", type=whole_number_in, metavar="N", help=f"timing rounds; default {ROUNDS}"
    )
    parser.add_argument("--pytorch", action="store_true", help="train in PyTorch too")
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"{QUICK_EPOCHS} epochs and {QUICK_ROUNDS} rounds: a first look, not for quoting",
    )
    options = parser.parse_args(arguments)
    if problem := problem_with(options):
        print(f"{parser.prog}: {problem}", file=sys.stderr)
        return 2
    epochs = options.epochs or (QUICK_EPOCHS if options.quick else EPOCHS)
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    makers = {"eqxlike": in_eqxlike, RAW_JAX: in_raw_jax}
    if options.pytorch:
        makers["PyTorch, eager"] = in_pytorch
    frameworks = {name: make(Classifier(jax.random.key(0))) for name, make in makers.items()}
    print(compare(frameworks, epochs, rounds))
    print("\n" + compare_modes(rounds))
    print("\n" + show_buffers())
    print(f"\n{machine()}; medians of {rounds} interleaved rounds")
    return 0


if __name__ == "__main__":
    sys.exit(main())
