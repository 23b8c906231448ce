"""The calls of the Modules in a model as they are traced."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.tree_util as jtu
from jaxtyping import PyTree

from ..._module import Module
from ..._pytree import is_array
from ._costs import Cost, scope_of


@dataclasses.dataclass
class Call:
    """One call of a Module, as it was traced.

    - `number`: that of its scope in the program.
    - `around`: the call inside of which it was made.
    - `output`: what it returned, with shapes in the place of arrays.
    - `does_nothing`: whether that is made of what it was given.
    """

    number: int
    around: "Call | None"
    output: PyTree = None
    does_nothing: bool = False

    def times_in(self, cost: Cost) -> int:
        """The number of times that the program runs it; 0 where JAX made no use of the trace."""
        if self.number not in cost.times_of and self.does_nothing:
            return 1 if self.around is None else self.around.times_in(cost)
        return cost.times_of.get(self.number, 0)


@dataclasses.dataclass
class Record:
    """One Module of a model, and its calls."""

    path: tuple[Any, ...]
    module: Module
    calls: list[Call] = dataclasses.field(default_factory=list)

    def flops_in(self, cost: Cost) -> float | None:
        """The FLOPs of all calls; `None` if there are none. A call inside another is part of it."""
        own = {call.number for call in self.calls}
        outermost = [call for call in self.calls if not any(map(own.__contains__, _outside(call)))]
        flops = [cost.flops_of.get(call.number, 0.0) for call in outermost if call.times_in(cost)]
        return sum(flops) if flops else None


def _outside(call: Call) -> Iterator[int]:
    """The numbers of the calls around one."""
    while call.around is not None:
        call = call.around
        yield call.number


class Recorder:
    """The records of all Modules of a model."""

    def __init__(self):
        self._records: list[Record] = []
        self._running: list[Call] = []
        self._num_calls = 0

    def add(self, path: tuple[Any, ...], module: Module) -> Callable[..., Any]:
        """The function that is told of the calls of `module`, as `observe_calls` asks."""
        record = Record(path, module)
        self._records.append(record)
        calls = record.calls

        @contextlib.contextmanager
        def report(*arguments: Any) -> Iterator[Callable[[Any], None]]:
            call = Call(self._num_calls, self._running[-1] if self._running else None)
            self._num_calls += 1
            given = jtu.tree_leaves(arguments)

            def returned(output: PyTree) -> None:
                arrays = filter(_has_shape, jtu.tree_leaves(output))
                call.does_nothing = set(map(id, arrays)) <= set(map(id, given))
                call.output = jtu.tree_map(_shown, output)
                calls.append(call)

            self._running.append(call)
            try:
                with scope_of(call.number):
                    yield returned
            finally:
                self._running.pop()

        return report

    def take(self) -> list[Record]:
        """All records, once. JAX may keep the Modules that report here in a cache: they are not to
        keep the arrays of the model alive.
        """
        records, self._records = self._records, []
        return records


def _has_shape(leaf: Any) -> bool:
    return is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


def _shown(leaf: Any) -> Any:
    if not _has_shape(leaf):
        return leaf
    is_weak = getattr(leaf, "weak_type", False)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=is_weak)
