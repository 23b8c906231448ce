"""Cases: one piece of work in all the ways that are compared, a row of a table each.

A case names its columns and builds each only on request, so that a peer that is not installed costs
only a note. `Work` is a plain function over the Modules of one library. Here it becomes functions
of no arguments, one for each way of compiling and calling it. All of them trace the same
operations, so the columns differ only in the overhead around the compiled program.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import jax
import numpy as np

from benchmarks.timing import Call, Prepare

FLAT = "jax.jit, flat list"
MODULE = "jax.jit, module"
OURS = "filter_jit"
WATCHED = "filter_jit, on_retrace"
EQUINOX_MODULE = "jax.jit, Equinox module"
EQUINOX = "Equinox filter_jit"
NNX = "nnx.jit"


@dataclasses.dataclass(frozen=True)
class Case:
    """A computation in all ways that are compared.

    - `name`: the name of the row.
    - `builders`: functions that make the call of each column, in the order of the table. A function
      raises ImportError if a library is not installed.
    - `baseline`: the column that is the denominator of ratios.
    """

    name: str
    builders: Mapping[str, Callable[[], Call]]
    baseline: str = MODULE

    @property
    def slug(self) -> str:
        """The name in a form for file names."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")


class Named(Protocol):
    """A row of a benchmark that can be selected by name."""

    @property
    def name(self) -> str:
        """The name."""
        ...


NamedT = TypeVar("NamedT", bound=Named)


def find(pattern: str, among: Sequence[NamedT]) -> tuple[NamedT, ...]:
    """The rows whose name matches the regular expression `pattern`, ignoring case.

    **Raises:** `ValueError` if no row matches, or `pattern` is not a regular expression.
    """
    try:
        found = tuple(row for row in among if re.search(pattern, row.name, re.IGNORECASE))
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
    if not found:
        names = "\n  ".join(row.name for row in among)
        raise ValueError(f"no case matches {pattern!r}; there are\n  {names}")
    return found


def build(case: Case) -> tuple[dict[str, Call], list[str]]:
    """Builds the columns of a case.

    **Returns:** the calls by column, and a note for each column that is left out.
    """
    calls, notes = {}, []
    for column, builder in case.builders.items():
        try:
            calls[column] = builder()
        except ImportError as error:
            notes.append(f"{column} is left out: {error}")
    return calls, notes


def check_agreement(calls: Mapping[str, Call], times: int = 3) -> None:
    """Checks that all columns return the same numbers, in several calls.

    **Raises:** `AssertionError` that names the column that differs from the first column, the call,
    and the numbers.
    """
    results = {column: [np.asarray(call()) for _ in range(times)] for column, call in calls.items()}
    (first, expected), *others = results.items()
    for column, actual in others:
        for number, (one, other) in enumerate(zip(actual, expected, strict=True), start=1):
            message = f"{column!r} differs from {first!r} at call {number}"
            # The tolerance for sums in a different order, relative to their largest number.
            atol = 1e-5 * max(1.0, float(np.max(np.abs(other), initial=0.0)))
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=atol, err_msg=message)


def check_first_calls(preparations: Mapping[str, Prepare]) -> None:
    """Raises `AssertionError` if the first calls of the columns return different numbers."""
    check_agreement({column: prepare() for column, prepare in preparations.items()}, times=1)


# --- the ways to call a piece of work ---


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
    function = work.library.filter_jit(
        work.function, on_retrace=lambda trace: None, max_traces=1_000_000
    )
    return bind(work, function, work.state)


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
