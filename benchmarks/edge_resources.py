"""The memory of cached partitions, and the time until a call returns."""

import statistics
import time
import tracemalloc

import jax
import jax.numpy as jnp

import eqxlike
from benchmarks import networks
from benchmarks.edge_models import Chain, Layer, layers


def partition_bytes(depth: int, copies: int = 100) -> float:
    """The memory of the cached partition of a model with `2 * depth` arrays, in bytes."""
    call = eqxlike.filter_jit(lambda model: model.layers[0].bias)
    model = Chain(tuple(layers(depth, 8)))
    call(model)
    models = [jax.tree_util.tree_map(lambda leaf: leaf, model) for _ in range(copies)]
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    outputs = [call(each) for each in models]
    del outputs
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return (after - before) / copies


def long_work(model: Layer, x: jax.Array, steps: jax.Array) -> jax.Array:
    """Applies a layer repeatedly on the device, without work for Python."""
    return jax.lax.fori_loop(0, steps, lambda _, x: model(x), x)


def asynchrony(target_s: float = 1.0) -> tuple[float, float]:
    """The seconds until a call of `filter_jit` returns, and until its result is ready.

    Both are medians of five calls that take about `target_s`.
    """
    (model,) = layers(1, 256)
    x = networks.normal(256, seed=1)
    call = eqxlike.filter_jit(long_work)
    first = 20_000
    steps = jnp.asarray(first)
    start_s = time.perf_counter()
    for _ in range(2):  # the second call is compiled
        start_s = time.perf_counter()
        jax.block_until_ready(call(model, x, steps))
    steps = jnp.asarray(int(first * target_s / (time.perf_counter() - start_s)))
    returned, ready = [], []
    for _ in range(5):
        start_s = time.perf_counter()
        result = call(model, x, steps)
        returned.append(time.perf_counter() - start_s)
        jax.block_until_ready(result)
        ready.append(time.perf_counter() - start_s)
    return statistics.median(returned), statistics.median(ready)
