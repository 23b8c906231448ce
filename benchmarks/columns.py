"""The columns of a table: ways to compile and call the same computation.

A `Work` is a plain function of the Modules of one library. The functions in this file turn it into
a function without arguments, for each way to compile and call it. All columns trace the same
operations, so they differ only in the overhead around the compiled program.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from benchmarks.timing import Call

FLAT = "jax.jit, flat list"
MODULE = "jax.jit, module"
OURS = "filter_jit"
WATCHED = "filter_jit, on_retrace"
EQUINOX_MODULE = "jax.jit, Equinox module"
EQUINOX = "Equinox filter_jit"
NNX = "nnx.jit"


@dataclasses.dataclass(frozen=True)
class Work:
    """A function and its arguments, made with the Modules of one library.

    - `library`: `eqxlike`, or a module with the same public names.
    - `function`: called as `function(*state, *data, **kwargs)`. Returns an array, or
      `(*state, array)` if `feeds_back`.
    - `state`: Modules and other pytrees, which may have static leaves.
    - `data`: arrays.
    - `feeds_back`: whether each call is made with the state that the last call returned.
    - `kwargs`: arrays by name.
    """

    library: Any
    function: Callable[..., Any]
    state: tuple[Any, ...]
    data: tuple[jax.Array, ...]
    feeds_back: bool = False
    kwargs: Mapping[str, jax.Array] = dataclasses.field(default_factory=dict)


def filtered(work: Work) -> Call:
    """The library's `filter_jit` on the unchanged Modules."""
    return bind(work, work.library.filter_jit(work.function), work.state)


def watched(work: Work) -> Call:
    """`filter_jit` with a callback for retraces. There are no retraces in the benchmark."""
    function = work.library.filter_jit(work.function, on_retrace=_hear, max_traces=1_000_000)
    return bind(work, function, work.state)


def _hear(trace: Any) -> None:
    """Ignores a trace."""


def on_module(work: Work) -> Call:
    """`jax.jit` on the arrays of the Modules, which are partitioned once outside of the call.

    Users write this to get the dispatch of plain JAX: a call does not see the static parts.
    """
    arrays, static = work.library.partition(work.state, work.library.is_array)

    @jax.jit
    def function(*arguments: Any, **kwargs: jax.Array) -> Any:
        state, data = _split(arguments, len(static))
        result = work.function(*work.library.combine(state, static), *data, **kwargs)
        if not work.feeds_back:
            return result
        state, output = _split(result, len(static))
        return (*work.library.filter(state, work.library.is_array), *output)

    return bind(work, function, arrays)


def on_flat_list(work: Work) -> Call:
    """`jax.jit` on a flat list of all arrays of the state: the least that a call can cost.

    Returns such a list too. All other arrays are passed one by one.
    """
    arrays, static = work.library.partition(work.state, work.library.is_array)
    leaves, treedef = jax.tree_util.tree_flatten(arrays)
    others, other_treedef = jax.tree_util.tree_flatten((work.data, dict(work.kwargs)))

    @jax.jit
    def function(leaves: list[jax.Array], *others: jax.Array) -> Any:
        state = work.library.combine(jax.tree_util.tree_unflatten(treedef, leaves), static)
        data, kwargs = jax.tree_util.tree_unflatten(other_treedef, others)
        result = work.function(*state, *data, **kwargs)
        if not work.feeds_back:
            return result
        state, output = _split(result, len(static))
        return jax.tree_util.tree_leaves(work.library.filter(state, work.library.is_array)), *output

    positional = dataclasses.replace(work, data=tuple(others), kwargs={})
    return bind(positional, function, (leaves,))


def bind(work: Work, function: Callable[..., Any], state: Sequence[Any]) -> Call:
    """Binds `function` to the arguments of `work`, or to a state that each call replaces.

    **Arguments:**

    - `work`: the work whose data and keyword arguments to pass.
    - `function`: the compiled function of the work.
    - `state`: the state in the form that `function` accepts.
    """
    if not work.feeds_back:
        return functools.partial(function, *state, *work.data, **work.kwargs)

    def step() -> Any:
        nonlocal state
        *state, output = function(*state, *work.data, **work.kwargs)
        return output

    return step


def _split(arguments: Sequence[Any], count: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Separates the first `count` arguments from the others."""
    return tuple(arguments[:count]), tuple(arguments[count:])
