"""Running chains: many steps a call, whatever the method."""

import math
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array, PRNGKeyArray

from ..._module import Module
from ..._transforms import filter_eval_shape, filter_jit
from .._library_rules import as_libraries_compute
from ._method import Method, Problem, Record, State

ChainMethod = Literal["vectorized", "sequential", "parallel"]
"""How chains run beside each other; NumPyro's words."""

# A call takes about so long: it is how long Ctrl-C waits, and how often a bar moves.
_CALL_S = 0.5
# What one call may return.
_MOST_BYTES = 64 * 2**20
_MOST_STEPS = 256


class Chains(Module):
    """Where a run stands.

    - `step`: how many steps were made.
    - `states`: of the chains, with a leading axis.
    - `records`: what was kept, each with leading axes of chains and of records.
    """

    step: int
    states: State
    records: dict[str, np.ndarray]


@as_libraries_compute()
def start(method: Method, problem: Problem, key: PRNGKeyArray) -> Chains:
    """Chains before their first step."""
    states, records = _start(method, problem, key)
    return Chains(0, states, jtu.tree_map(np.asarray, records))


@as_libraries_compute()
def blank(method: Method, problem: Problem) -> Chains:
    """Chains of the form of those that have started, computed without their methods: zeros."""
    structs = filter_eval_shape(_start, method, problem, jr.key(0))
    states, records = jtu.tree_map(lambda each: np.zeros(each.shape, each.dtype), structs)
    return Chains(0, jtu.tree_map(jnp.asarray, states), records)


def advance(
    method: Method,
    problem: Problem,
    chains: Chains,
    key: PRNGKeyArray,
    chain_method: ChainMethod,
) -> Iterator[tuple[Chains, dict[str, np.ndarray]]]:
    """Runs chains to their end, and yields where they stand after each call.

    Each step has a key by its number, so that it does not matter where a call ends.

    **Returns:** pairs of the chains, whose records are those of this call alone, and of the records
    of its last step.
    """
    empty = {name: each[:, :0] for name, each in chains.records.items()}
    step_bytes = sum(_bytes_of_record(each) for each in empty.values())
    size = max(1, min(_MOST_STEPS, method.num_steps, _MOST_BYTES // max(1, step_bytes)))
    count, step, states = 1, chains.step, chains.states
    while step < method.num_steps:
        count = min(count, size, method.num_steps - step)
        before = time.perf_counter()
        states, buffers = _advance(
            method,
            problem,
            states,
            empty,
            key,
            np.asarray(step, np.int32),
            np.asarray(count, np.int32),
            size,
            chain_method,
        )
        records = {name: np.asarray(buffer)[:, :count] for name, buffer in buffers.items()}
        seconds = time.perf_counter() - before
        kept = _kept(method, np.arange(step, step + count))
        step += count
        last = {name: each[:, -1] for name, each in records.items()}
        yield Chains(step, states, {name: each[:, kept] for name, each in records.items()}), last
        # The first call also compiles.
        count = 2 * count if seconds < _CALL_S / 2 else max(1, int(count * _CALL_S / seconds))


def joined(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Records of several calls as those of one."""
    return {name: np.concatenate([part[name] for part in parts], axis=1) for name in parts[0]}


def _kept(method: Method, steps: np.ndarray) -> np.ndarray:
    after = steps - method.num_dropped
    return (after >= 0) & ((after + 1) % method.thinning == 0)


def _bytes_of_record(empty: np.ndarray) -> int:
    """What one record of all chains takes."""
    return math.prod((empty.shape[0], *empty.shape[2:])) * empty.dtype.itemsize


@filter_jit
def _start(method: Method, problem: Problem, key: PRNGKeyArray) -> tuple[State, dict[str, Array]]:
    """States, and records of no step."""
    keys = jr.split(jr.fold_in(key, 0), method.num_chains)
    states = jax.vmap(lambda key: _strong(method.init(problem, key)))(keys)

    one = filter_eval_shape(lambda: jtu.tree_map(lambda each: each[0], states))
    # Its shapes alone are asked for, and its operations left out.
    _, record = filter_eval_shape(_step, method, problem, one, jnp.zeros((), jnp.int32), key)
    return states, jtu.tree_map(
        lambda each: jnp.zeros((method.num_chains, 0, *each.shape), each.dtype), record
    )


@filter_jit
def _step(
    method: Method, problem: Problem, state: State, number: Array, key: PRNGKeyArray
) -> tuple[State, Record]:
    """A step of one chain. Traced once: for its shapes, and in the loop."""
    state, record = method.step(problem, state, number, key)
    return _strong((state, dict(record)))


@as_libraries_compute()
@filter_jit
def _advance(
    method: Method,
    problem: Problem,
    states: State,
    empty: dict[str, np.ndarray],
    key: PRNGKeyArray,
    first: np.ndarray,
    count: np.ndarray,
    size: int,
    chain_method: ChainMethod,
) -> tuple[State, dict[str, Array]]:
    """Makes `count` steps of all chains, and returns records of `size`, of which so many count."""

    def run(pair: tuple[State, PRNGKeyArray]) -> tuple[State, dict[str, Array]]:
        state, key = pair
        buffers = {
            name: jnp.zeros((size, *each.shape[2:]), each.dtype) for name, each in empty.items()
        }

        def one(index: Array, carry: Any) -> Any:
            state, buffers = carry
            number = index + first
            state, record = _step(method, problem, state, number, jr.fold_in(key, number))
            return state, {name: buffers[name].at[index].set(record[name]) for name in buffers}

        return jax.lax.fori_loop(0, count, one, (state, buffers))

    keys = jr.split(jr.fold_in(key, 1), method.num_chains)
    return _side_by_side(chain_method)(run)((states, keys))


def _side_by_side(chain_method: ChainMethod) -> Callable[[Any], Any]:
    if chain_method == "vectorized":
        return jax.vmap
    if chain_method == "sequential":
        return lambda run: lambda pairs: jax.lax.map(run, pairs)
    return _over_devices


def _over_devices(run: Any) -> Any:
    def of_all(pairs: Any) -> Any:
        num_chains = jtu.tree_leaves(pairs)[0].shape[0]
        devices = jax.devices()
        used = max(n for n in range(1, len(devices) + 1) if num_chains % n == 0)
        mesh = jax.make_mesh(
            (used,), ("chains",), devices=devices[:used], axis_types=(AxisType.Auto,)
        )
        spec = PartitionSpec("chains")
        return jax.shard_map(
            jax.vmap(run), mesh=mesh, in_specs=(spec,), out_specs=spec, check_vma=False
        )(pairs)

    return of_all


def _strong(tree: Any) -> Any:
    """Arrays whose types a loop can carry: without the weakness of numbers of Python."""
    return jtu.tree_map(
        lambda leaf: jax.lax.convert_element_type(leaf, jnp.result_type(leaf)), tree
    )
