"""Training steps of whole networks: by hand, of Modules, of NNX, and of PyTorch.

A step computes the cross-entropy of a batch and its gradient, updates the weights with Adam, and
updates the running statistics. The updated arrays are donated. Importing this file imports JAX and
Optax, but no compared library, because `time_first_step` runs in fresh processes and imports only
the library of its column.
"""

import dataclasses
import functools
import importlib
import json
import math
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import layer_models, networks
from benchmarks.layer_models import (
    CNNSizes,
    LanguageSizes,
    LSTMSizes,
    MLPSizes,
    ResNetSizes,
    TransformerSizes,
)

BY_HAND = "by hand"
OURS = "eqxlike"
SCAN_STACK = "eqxlike, ScanStack"
EQUINOX = "Equinox"
NNX = "NNX"
TORCH_EAGER = "PyTorch, eager"
TORCH_COMPILED = "PyTorch, torch.compile"

Batch = tuple[jax.Array, jax.Array]
Apply = Callable[[Any, Any, jax.Array], tuple[jax.Array, Any]]
"""Maps a model, its state and a batch to outputs and the new state. The state may be `None`."""


@dataclasses.dataclass(frozen=True)
class Network:
    """A network and the batch that it is trained on.

    - `name`: the name of the row.
    - `maker`: the name of the function in `layer_models` and `nnx_layer_models` that makes it.
    - `sizes`: the argument `sizes` of this function.
    - `inputs`: the shape of a batch of inputs, with channels last.
    - `backend`: the only backend that runs the network, if any. Networks for GPUs compute in
      bfloat16 and have float32 parameters.
    - `flops`: the FLOPs of the matrix products of a step, if they are counted.
    """

    name: str
    maker: str
    sizes: Any
    inputs: tuple[int, ...]
    backend: str | None = None
    flops: float | None = None

    @property
    def dtype(self) -> str:
        """The dtype of the computation."""
        return "bfloat16" if self.backend == "gpu" else "float32"

    @property
    def amount(self) -> int:
        """The number of tokens or examples in a batch."""
        return math.prod(self.inputs) if self.maker == "language_model" else self.inputs[0]

    def batch(self) -> Batch:
        """The inputs and labels."""
        draw = np.random.default_rng(2).integers
        if isinstance(self.sizes, LanguageSizes):
            tokens = draw(self.sizes.tokens, size=(2, *self.inputs), dtype=np.int32)
            return jnp.asarray(tokens[0]), jnp.asarray(tokens[1])
        classes = self.sizes[-1]
        labels = draw(classes, size=self.inputs[:1], dtype=np.int32)
        return networks.normal(*self.inputs, seed=1), jnp.asarray(labels)


class Step(NamedTuple):
    """A training step that stores its state.

    - `call`: makes the next step and returns its loss.
    - `compiled`: returns the compiled program.
    """

    call: Callable[[], jax.Array]
    compiled: Callable[[], Any]

    def peak_bytes(self) -> int:
        """The peak memory of the program in bytes, as estimated by XLA."""
        found = self.compiled().memory_analysis()
        sizes = found.temp_size_in_bytes + found.output_size_in_bytes
        return sizes + found.argument_size_in_bytes - found.alias_size_in_bytes


def cross_entropy(outputs: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean cross-entropy, in float32."""
    outputs = outputs.astype(jnp.float32)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(outputs, labels))


def cast(tree: Any, dtype: str) -> Any:
    """Casts the floating-point arrays of a tree to `dtype`."""

    def converted(leaf: Any) -> Any:
        is_float = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.floating)
        return leaf.astype(dtype) if is_float else leaf

    return jax.tree_util.tree_map(converted, tree)


def language_model(
    width: int,
    depth: int,
    length: int,
    batch: int,
    tokens: int = 256,
    head: int = 32,
    kind: str = "language model",
    **options: Any,
) -> Network:
    """A language model with heads of `head` features. FLOPs count attention as not causal."""
    sizes = LanguageSizes(tokens, length, TransformerSizes(width, width // head, depth))
    name = f"{kind}, {depth} layers of {width}, {length} tokens, batch {batch}"
    products = 12 * depth * width**2 + tokens * width + 2 * depth * length * width
    flops = 6.0 * products * batch * length
    return Network(name, "language_model", sizes, (batch, length), flops=flops, **options)


def resnet(name: str, sizes: ResNetSizes, batch: int, **options: Any) -> Network:
    """A ResNet for images with three channels."""
    side, products = sizes.side // 4, 3 * 49 * sizes.width * (sizes.side // 2) ** 2
    for block in sizes.blocks:
        for place, (before, after, kernel, stride) in enumerate(block):
            side = side // stride if place < 3 else side
            products += before * after * (kernel * side) ** 2
    products += sizes.blocks[-1][2][1] * sizes.classes
    name = f"{name}, {sizes.side} x {sizes.side}, batch {batch}"
    inputs = batch, sizes.side, sizes.side, 3
    return Network(name, "resnet", sizes, inputs, flops=6.0 * products * batch, **options)


NETWORKS = (
    language_model(256, 6, length=128, batch=8),
    language_model(64, 4, length=64, batch=16),
    Network(
        "CNN with BatchNorm, 3-32-64-64 on 32 x 32, batch 32",
        "normalised_cnn",
        CNNSizes(side=32, channels=(3, 32, 64, 64), classes=10),
        (32, 32, 32, 3),
    ),
    Network("MLP 784-512-512-10, batch 64", "mlp", MLPSizes(784, 512, 2, 10), (64, 784)),
    Network("LSTM 32-64, 128 steps, batch 16", "lstm", LSTMSizes(32, 64), (16, 128, 32)),
    language_model(128, 4, length=128, batch=8, backend="cpu"),
    language_model(256, 4, length=1024, batch=1, backend="cpu"),
    resnet(
        "ResNet of 4 blocks, 16 to 512 channels",
        ResNetSizes(32, 16, (1, 1, 1, 1), 10),
        16,
        backend="cpu",
    ),
    *(
        language_model(
            *(768, 12, length, 2**14 // length),
            tokens=50304,
            head=64,
            kind="GPT-2 without positions",
            backend="gpu",
        )
        for length in (1024, 8192)
    ),
    resnet("ResNet-50", ResNetSizes(224, 64, (3, 4, 6, 3), 1000), 128, backend="gpu"),
)

FIRST = language_model(64, 12, length=64, batch=4)
"""The network whose first step is timed."""


def time_first_step(column: str, network: Network, start_s: float) -> None:
    """Prints the seconds from `start_s` (of `time.perf_counter`) to the end of the first step.

    Also prints the seconds to build the model, the optimiser's state and the batch.
    """
    importlib.import_module(LIBRARIES[column])
    before_s = time.perf_counter()
    step = COLUMNS[column](network, None)
    built_s = time.perf_counter()
    loss = float(step.call())
    first_s = time.perf_counter() - start_s
    print(json.dumps({"first_s": first_s, "build_s": built_s - before_s, "loss": loss}))


def print_process_bytes(column: str, network: Network) -> None:
    """Prints the growth of the resident memory of this process during training steps, in bytes.

    This is the peak of three steps after the first step, minus the memory after importing libraries
    and drawing eqxlike's weights. It includes a copy of the weights, the optimiser's state, memory
    kept by compilation, and the steps. Needs Linux.
    """
    importlib.import_module(LIBRARIES[column])
    arrays = jax.block_until_ready(weights(network))
    before = _resident_bytes("VmRSS")
    step = COLUMNS[column](network, [jnp.copy(array) for array in arrays])
    jax.block_until_ready(step.call())
    # Resets the peak, which was reached during compilation.
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    for _ in range(3):
        jax.block_until_ready(step.call())
    print(json.dumps({"bytes": _resident_bytes("VmHWM") - before}))


def _resident_bytes(name: str) -> int:
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))


# --- Modules of eqxlike and Equinox, which are called with one example ---


def of_modules(
    name: str, network: Network, arrays: Sequence[jax.Array] | None, is_stacked: bool = False
) -> Step:
    """The step of a network of Modules, with the `filter_jit` of a library.

    The initial parameters are `arrays` if given, in eqxlike's order and for a list of blocks.
    """
    library = importlib.import_module(name)
    is_loaded = arrays is not None
    model, state = made(library, network, is_stacked and not is_loaded)
    if is_loaded:
        model = networks.with_arrays(library, model, arrays)
        if is_stacked:
            stack = library.nn.ScanStack.stack(model.blocks)
            model = library.tree_at(lambda model: model.blocks, model, stack)
    inputs, labels = network.batch()
    if state is not None:
        inputs = jnp.moveaxis(inputs, -1, 1)
    dtype = network.dtype
    if dtype != "float32" and name == LIBRARIES[OURS]:
        policy = f"params=float32,compute={dtype},output=float32"
        model, dtype = library.nn.MixedPrecision(model, policy), "float32"
    return _stepping(library, model, state, (inputs, labels), dtype)


def made(library: Any, network: Network, is_stacked: bool = False) -> tuple[Any, Any]:
    """A new network, and its state or `None`."""
    make, key = getattr(layer_models, network.maker), jax.random.key(0)
    if network.maker in ("normalised_cnn", "resnet"):
        return make(library, network.sizes, key)
    return make(library, network.sizes, key, **({"is_stacked": True} if is_stacked else {})), None


def weights(network: Network) -> list[jax.Array]:
    """The parameters that eqxlike draws, in tree order."""
    library = importlib.import_module(LIBRARIES[OURS])
    model, _ = made(library, network)
    return jax.tree_util.tree_leaves(library.filter(model, library.is_array))


def _stepping(library: Any, model: Any, state: Any, batch: Batch, dtype: str) -> Step:
    adam = networks.optimiser()

    def loss(model: Any, state: Any, inputs: jax.Array, labels: jax.Array) -> Any:
        model, inputs = cast((model, inputs), dtype)
        if state is None:
            return cross_entropy(jax.vmap(model)(inputs), labels), None
        batched = jax.vmap(model, in_axes=(0, None), out_axes=(0, None), axis_name="batch")
        outputs, state = batched(inputs, state)
        return cross_entropy(outputs, labels), state

    def step(batch: Batch, model: Any, state: Any, opt_state: Any) -> Any:
        differentiated = library.filter_value_and_grad(loss, has_aux=True)
        (value, state), gradients = differentiated(model, state, *batch)
        updates, opt_state = adam.update(gradients, opt_state)
        return value, library.apply_updates(model, updates), state, opt_state

    jitted = library.filter_jit(step, donate="all-except-first")
    kept = [model, state, adam.init(library.filter(model, library.is_inexact_array))]

    def call() -> jax.Array:
        value, *kept[:] = jitted(batch, *kept)
        return value

    def compiled() -> Any:
        found = jitted.lower(batch, *kept).compile()
        return getattr(found, "compiled", found)

    return Step(call, compiled)


# --- NNX, which is called with a batch ---


def of_nnx(network: Network, arrays: Sequence[jax.Array] | None) -> Step:
    """The step of a network of NNX, with `nnx.jit`. Raises ImportError if Flax is not installed.

    The initial parameters are `arrays` if given, in eqxlike's order.
    """
    nnx = importlib.import_module("flax.nnx")
    make = getattr(importlib.import_module("benchmarks.nnx_layer_models"), network.maker)
    model = make(network.sizes, jax.random.key(0))
    if arrays is not None:
        model.load(iter(arrays))
    if network.dtype != "float32":
        for _, module in nnx.iter_modules(model):
            if hasattr(module, "dtype"):
                module.dtype = jnp.dtype(network.dtype)
    optimiser = nnx.Optimizer(model, networks.optimiser(), wrt=nnx.Param)
    batch = network.batch()

    def step(model: Any, optimiser: Any, inputs: jax.Array, labels: jax.Array) -> jax.Array:
        def loss(model: Any) -> jax.Array:
            return cross_entropy(model(inputs), labels)

        value, gradients = nnx.value_and_grad(loss)(model)
        optimiser.update(model, gradients)
        return value

    jitted = nnx.jit(step, donate_argnums=(0, 1))

    def compiled() -> Any:
        found = jitted.lower(model, optimiser, *batch).compile()
        return getattr(found, "compiled", found)

    return Step(lambda: jitted(model, optimiser, *batch), compiled)


# --- PyTorch ---


def of_torch(network: Network, arrays: Any, is_compiled: bool = False) -> Any:
    """The step of a PyTorch network, on a GPU if compiled. Raises ImportError without PyTorch."""
    return importlib.import_module("benchmarks.torch_networks").step(network, arrays, is_compiled)


# --- by hand: `jax.jit` of a list of arrays in the layout that XLA computes with ---


def by_hand(network: Network, arrays: Sequence[jax.Array] | None) -> Step:
    """The step of hand-written functions of a list of arrays and a batch, from eqxlike's arrays."""
    take = iter(weights(network) if arrays is None else arrays)
    parameters, state, apply = BY_MAKER[network.maker](network.sizes, take)
    adam = networks.optimiser()
    batch = network.batch()

    def loss(parameters: Any, state: Any, inputs: jax.Array, labels: jax.Array) -> Any:
        parameters, inputs = cast((parameters, inputs), network.dtype)
        outputs, state = apply(parameters, state, inputs)
        return cross_entropy(outputs, labels), state

    def step(parameters: Any, state: Any, opt_state: Any, *batch: jax.Array) -> Any:
        differentiated = jax.value_and_grad(loss, has_aux=True)
        (value, state), gradients = differentiated(parameters, state, *batch)
        updates, opt_state = adam.update(gradients, opt_state)
        return value, optax.apply_updates(parameters, updates), state, opt_state

    jitted = jax.jit(step, donate_argnums=(0, 1, 2))
    kept = [parameters, state, adam.init(parameters)]

    def call() -> jax.Array:
        value, *kept[:] = jitted(*kept, *batch)
        return value

    return Step(call, lambda: jitted.lower(*kept, *batch).compile())


def _linear(take: Iterator[jax.Array]) -> list[jax.Array]:
    return [next(take).T, next(take)]


def _affine(x: jax.Array, parameters: Sequence[jax.Array]) -> jax.Array:
    kernel, bias = parameters
    return x @ kernel + bias


def _mlp(sizes: MLPSizes, take: Iterator[jax.Array]) -> tuple[Any, Any, Apply]:
    def apply(layers: Any, state: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        for layer in layers[:-1]:
            x = jax.nn.relu(_affine(x, layer))
        return _affine(x, layers[-1]), state

    return [_linear(take) for _ in range(sizes.depth + 1)], None, apply


def _lstm(sizes: LSTMSizes, take: Iterator[jax.Array]) -> tuple[Any, Any, Apply]:
    def apply(parameters: Any, state: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        of_input, of_hidden, bias = parameters

        def step(carry: Any, gates: jax.Array) -> tuple[Any, None]:
            h, c = carry
            i, f, g, o = jnp.split(gates + h @ of_hidden, 4, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

        zeros = jnp.zeros((len(x), sizes.hidden), x.dtype)
        # One product with all inputs, before the loop.
        gates = jnp.swapaxes(x, 0, 1) @ of_input + bias
        return jax.lax.scan(step, (zeros, zeros), gates)[0][0], state

    return [next(take).T, next(take).T, next(take)], None, apply


def _language_model(sizes: LanguageSizes, take: Iterator[jax.Array]) -> tuple[Any, Any, Apply]:
    heads, depth = sizes.blocks.heads, sizes.blocks.depth

    def norm(x: jax.Array, parameters: Sequence[jax.Array]) -> jax.Array:
        scale, shift = parameters
        wide = x.astype(jnp.float32)
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        variance = jnp.mean(centred**2, axis=-1, keepdims=True)
        return (centred * jax.lax.rsqrt(variance + 1e-5) * scale + shift).astype(x.dtype)

    def block(x: jax.Array, parameters: Any) -> jax.Array:
        before, (projection, out), between, inner, outer = parameters
        projected = jnp.split(norm(x, before) @ projection, 3, axis=-1)
        split = [each.reshape(*x.shape[:2], heads, -1) for each in projected]
        way = "cudnn" if x.dtype == jnp.bfloat16 else None
        attended = jax.nn.dot_product_attention(*split, is_causal=True, implementation=way)
        x = x + attended.reshape(x.shape) @ out
        return x + _affine(jax.nn.gelu(_affine(norm(x, between), inner)), outer)

    def apply(parameters: Any, state: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
        embedding, blocks, readout = parameters
        x = embedding[tokens]
        for each in blocks:
            x = block(x, each)
        return _affine(x, readout), state

    embedding, blocks = next(take), []
    for _ in range(depth):
        before = [next(take), next(take)]
        projection = jnp.concatenate([next(take).T for _ in range(3)], axis=1)
        projections = [projection, next(take).T]
        between = [next(take), next(take)]
        blocks.append([before, projections, between, _linear(take), _linear(take)])
    return [embedding, blocks, _linear(take)], None, apply


def _normalised_cnn(sizes: CNNSizes, take: Iterator[jax.Array]) -> tuple[Any, Any, Apply]:
    window = 1, layer_models.WINDOW, layer_models.WINDOW, 1

    def apply(parameters: Any, state: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        convs, norms, head = parameters
        running = []
        for (kernel, bias), (scale, shift), averages in zip(convs, norms, state, strict=True):
            padding = [(layer_models.PADDING, layer_models.PADDING)] * 2
            form = ("NHWC", "HWIO", "NHWC")
            x = jax.lax.conv_general_dilated(x, kernel, (1, 1), padding, dimension_numbers=form)
            x, averages = _batch_norm(x + bias, scale, shift, averages)
            running.append(averages)
            x = jax.nn.relu(x)
            x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, window, "VALID")
        return _affine(x.reshape(len(x), -1), head), running

    channels = sizes.channels[1:]
    convs = [[jnp.transpose(next(take), (2, 3, 1, 0)), next(take).ravel()] for _ in channels]
    norms = [[next(take), next(take)] for _ in channels]
    flat = layer_models.flat_shape(sizes)
    kernel, bias = next(take), next(take)
    # Here the channels come last in the flattened features. In eqxlike they come first.
    kernel = jnp.moveaxis(kernel.reshape(-1, *flat), 1, -1).reshape(kernel.shape).T
    state = [[jnp.zeros(size), jnp.ones(size)] for size in channels]
    return [convs, norms, [kernel, bias]], state, apply


def _batch_norm(x: jax.Array, scale: jax.Array, shift: jax.Array, averages: Any) -> Any:
    """The normalised batch, with channels last, and the new running averages."""
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide, (0, 1, 2))
    variance = jnp.mean(wide**2, (0, 1, 2)) - mean**2
    measured = zip(averages, (mean, variance), strict=True)
    wide = (wide - mean) * (jax.lax.rsqrt(variance + 1e-5) * scale) + shift
    return wide.astype(x.dtype), [0.99 * old + 0.01 * new for old, new in measured]


def _resnet(sizes: ResNetSizes, take: Iterator[jax.Array]) -> tuple[Any, Any, Apply]:
    def apply(parameters: Any, state: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        layers, head = parameters
        rest, running = zip(layers, state, strict=True), []

        def layer(x: jax.Array, stride: int) -> jax.Array:
            (kernel, scale, shift), averages = next(rest)
            padding = [(len(kernel) // 2, len(kernel) // 2)] * 2
            form, strides = ("NHWC", "HWIO", "NHWC"), (stride, stride)
            x = jax.lax.conv_general_dilated(x, kernel, strides, padding, dimension_numbers=form)
            x, averages = _batch_norm(x, scale, shift, averages)
            running.append(averages)
            return x

        x, padding = jax.nn.relu(layer(x, 2)), ((0, 0), (1, 1), (1, 1), (0, 0))
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), padding)
        for block in sizes.blocks:
            first, second, third, *shortcut = [stride for *_, stride in block]
            y = layer(jax.nn.relu(layer(jax.nn.relu(layer(x, first)), second)), third)
            x = jax.nn.relu(y + (layer(x, shortcut[0]) if shortcut else x))
        return _affine(jnp.mean(x, axis=(1, 2)), head), running

    layers = [
        [jnp.transpose(next(take), (2, 3, 1, 0)), next(take), next(take)]
        for _ in range(1 + sum(map(len, sizes.blocks)))
    ]
    state = [[jnp.zeros_like(scale), jnp.ones_like(scale)] for _, scale, _ in layers]
    return [layers, _linear(take)], state, apply


BY_MAKER: dict[str, Callable[[Any, Iterator[jax.Array]], tuple[Any, Any, Apply]]] = {
    "mlp": _mlp,
    "lstm": _lstm,
    "language_model": _language_model,
    "normalised_cnn": _normalised_cnn,
    "resnet": _resnet,
}
"""Maps each maker of `layer_models` to a function of the sizes and of eqxlike's arrays. It returns
parameters, state, and the function of both.
"""

LIBRARIES = {
    BY_HAND: "optax",
    OURS: "eqxlike",
    SCAN_STACK: "eqxlike",
    EQUINOX: "equinox",
    NNX: "flax.nnx",
    TORCH_EAGER: "torch",
    TORCH_COMPILED: "torch",
}

COLUMNS: dict[str, Callable[[Network, Sequence[jax.Array] | None], Step]] = {
    BY_HAND: by_hand,
    OURS: functools.partial(of_modules, LIBRARIES[OURS]),
    SCAN_STACK: functools.partial(of_modules, LIBRARIES[SCAN_STACK], is_stacked=True),
    EQUINOX: functools.partial(of_modules, LIBRARIES[EQUINOX]),
    NNX: of_nnx,
    TORCH_EAGER: of_torch,
    TORCH_COMPILED: functools.partial(of_torch, is_compiled=True),
}
"""Maps a column to a function of a network and eqxlike's parameters (or `None`) that returns a
step. The function raises ImportError if the library is not installed.
"""
