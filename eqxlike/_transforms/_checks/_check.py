"""A check in a compiled program: a callback, inside a `cond` that calls it only on failure.

During tracing, a check is one primitive. Lowering replaces the primitive by the `cond` and the
callback. Under `jax.vmap`, the predicate is reduced over each mapped axis, so there is only one
`cond`. The callback receives the whole predicate, so it can report the batch indices at which the
predicate is true. The checked arrays do not pass through the `cond`. Instead, `needing` makes the
checked arrays depend on the output of the check.
"""

import dataclasses
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.extend.core import Jaxpr, get_opaque_trace_state, jaxprs_in_params
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from jaxtyping import Array

from ..._compat import Tracer
from ._primitives import check_p
from ._runtime_errors import EqxlikeRuntimeError, FailureReport, raise_in_callback

# --- The checks that this thread has traced, and the programs that it is tracing ---


class _Traced(threading.local):
    num_checks: int = 0
    programs: "tuple[TracedProgram, ...]" = ()


_traced = _Traced()
_has_any_been_traced = False


def note_check() -> None:
    """Records that this thread's current trace contains a check."""
    global _has_any_been_traced
    _has_any_been_traced = True
    _traced.num_checks += 1


def has_any_check_been_traced() -> bool:
    """Whether any thread has ever traced a check."""
    return _has_any_been_traced


def is_for_several_devices() -> bool:
    """Whether the program that this thread traces is known to run on several devices."""
    return any(program.is_for_several_devices for program in _traced.programs)


@dataclasses.dataclass
class TracedProgram:
    """Context manager that records whether a function compiled by `filter_jit` contains a check.

    - `arrays`: the tracers of the arguments.
    - `shardings`: a tree with the `in_shardings` and `out_shardings` of the function.
    - `holds_check`: whether the program contains a check. This is set at the end of the trace.
    """

    arrays: Sequence[Any]
    shardings: Any
    holds_check: bool = False

    def __enter__(self) -> "TracedProgram":
        self._num_checks = _traced.num_checks
        _traced.programs = (*_traced.programs, self)
        return self

    def __exit__(self, *exception: Any) -> None:
        self.holds_check = _traced.num_checks != self._num_checks
        _traced.programs = _traced.programs[:-1]

    @functools.cached_property
    def is_for_several_devices(self) -> bool:
        """Whether the program is known to run on several devices. Only checks use this property."""
        return mesh_of(self.arrays) is not None or any(
            isinstance(leaf, jax.sharding.Sharding) and leaf.num_devices > 1
            for leaf in jtu.tree_leaves(self.shardings)
        )


class _Order(threading.local):
    """The output of the latest check in each trace of this thread.

    The references are weak, so that no output outlives its trace. During the trace, the checked
    arrays keep the outputs alive.
    """

    def __init__(self) -> None:
        self._last: list[tuple[Any, Callable[[], Any]]] = []

    def last(self) -> Any:
        state = get_opaque_trace_state()
        return next((output() for trace, output in self._last if trace == state), None)

    def append(self, output: Any) -> None:
        state = get_opaque_trace_state()
        others = (
            (trace, each) for trace, each in self._last if trace != state and each() is not None
        )
        self._last = [*others, (state, weakref.ref(output))]


_order = _Order()


@dataclasses.dataclass(frozen=True, eq=False)
class Check:
    """One check of a program.

    **Arguments:**

    - `report`: makes the error message.
    - `does_raise`: whether a failed check raises an error. If not, the message is printed and the
      program continues.
    - `mesh`: the mesh of devices that run the program, if it is known. The callback runs on each
      device.
    - `is_for_several_devices`: whether the program is known to run on several devices.
    """

    report: FailureReport
    does_raise: bool
    mesh: AbstractMesh | None = None
    is_for_several_devices: bool = dataclasses.field(default_factory=is_for_several_devices)

    def passes(self, failed: Any, index: Any) -> Any:
        """Inserts the check. Returns whether the check passes for all members of the batch.

        If several checks fail, the first check in the program raises, in whatever order the
        compiler runs the checks.

        **Arguments:**

        - `failed`: the predicate, a boolean array with one axis for each `jax.vmap`.
        - `index`: the index of the message for each member, an array with the shape of `failed`; or
          `None`.
        """
        if not isinstance(failed, Tracer) and not np.asarray(failed).any():
            return True
        operands = [failed] if index is None else [failed, index]
        if not any(isinstance(operand, Tracer) for operand in operands):
            return self.evaluate(*operands)
        note_check()
        if not self.does_raise:
            return check_p.bind(*operands, check=self)
        if (earlier := _order.last()) is not None:
            earlier = jax.lax.broadcast(earlier, failed.shape)
            operands[0] = jax.lax.bitwise_and(failed, earlier)
        output = check_p.bind(*operands, check=self)
        if isinstance(output, Tracer):
            _order.append(output)
        return output

    def evaluate(self, failed: Any, *index: Any) -> bool:
        """Runs the check on concrete values. Returns `True` if it passes."""
        if not np.asarray(failed).any():
            return True
        text = self._text(failed, *index)
        if self.does_raise:
            raise EqxlikeRuntimeError(text)
        print(text, flush=True)
        return False

    def staged(self, failed: Any, *index: Any) -> Array:
        """Inserts the `cond` and the callback, which replace the primitive."""
        if failed.shape == ():
            # A scalar `failed` is true whenever the callback runs, so it is not passed. XLA would
            # compute it a second time to pass it.
            return jax.lax.cond(failed, self._call_back, _pass, None, *index)
        return jax.lax.cond(jnp.any(failed), self._call_back, _pass, failed, *index)

    def _call_back(self, *operands: Any) -> Array:
        """Runs the callback. On several devices, each device runs it.

        By default JAX runs a callback on the first device only. If the callback raises there, all
        other devices wait for the output of the callback until XLA ends the process.
        """
        mesh = self.mesh
        if mesh is None and self.does_raise and self.is_for_several_devices:
            return self._call_back_from_parts(*operands)
        if mesh is None or not (axes := set(mesh.axis_names) - set(mesh.manual_axes)):
            return self._call_back_once(*operands)
        whole = PartitionSpec()
        # If `jax.vmap` maps over a mesh axis, JAX removes this axis from the current mesh. So set
        # the whole mesh.
        with jax.sharding.use_abstract_mesh(mesh):
            if AxisType.Explicit in mesh.axis_types:
                operands = jax.sharding.reshard(operands, whole)
            return jax.shard_map(
                self._call_back_once,
                mesh=mesh,
                axis_names=axes if AxisType.Manual in mesh.axis_types else set(),
                in_specs=whole,
                out_specs=whole,
                check_vma=False,
            )(*operands)

    def _call_back_once(self, *operands: Any) -> Array:
        output = jax.ShapeDtypeStruct((), jnp.bool_)
        return jax.pure_callback(self._on_failure, output, *operands)

    def _call_back_from_parts(self, failed: Any, *index: Any) -> Array:
        """Runs the callback on each of several devices, if the mesh is not known yet.

        On each device, the callback would get only one shard of an operand. So only scalars are
        passed, and the report has no batch indices.
        """
        if failed is not None and index:
            lowest = jnp.iinfo(index[0].dtype).min
            index = (jnp.max(jnp.where(failed, index[0], lowest)),)
        jax.debug.callback(self._raise, None, *index, partitioned=True)
        return jnp.array(False)

    def _on_failure(self, *operands: Any) -> np.ndarray:
        if self.does_raise:
            self._raise(*operands)
        print(self._text(*operands), flush=True)
        return np.array(False)

    def _raise(self, *operands: Any) -> None:
        text = self._text(*operands)
        if self.mesh is not None and AxisType.Manual in self.mesh.axis_types:
            # Print the message, because the error does not reach the caller if other devices wait
            # for this device.
            print(text, file=sys.stderr, flush=True)
        raise_in_callback(text)

    def _text(self, failed: Any, index: Any = None) -> str:
        """The error message. `failed` is `None` for a check outside `jax.vmap`."""
        failed = np.asarray(True if failed is None else failed)
        return self.report.text(failed, None if index is None else np.asarray(index))


def _pass(*operands: Any) -> Array:
    return jnp.array(True)


def mesh_of(arrays: Iterable[Any]) -> AbstractMesh | None:
    """The first mesh with several devices: the mesh of an array, or else the current mesh."""
    meshes = (jax.typeof(array).sharding.mesh for array in arrays)
    for mesh in (*meshes, jax.sharding.get_abstract_mesh()):
        if not mesh.empty and mesh.size > 1:
            return mesh
    return None


def holds_check(jaxpr: Jaxpr) -> bool:
    """Whether `jaxpr`, or a jaxpr that it calls, contains a check."""
    return has_any_check_been_traced() and _holds_check(jaxpr, set())


def run_and_look_for_checks(function: Callable[..., list[Any]], arrays: Iterable[Any]) -> list[Any]:
    """Calls `function` on tracers, and records all checks in it.

    JAX does not retrace a jitted function that it has already traced. If `function` calls such a
    jitted function, a search of the jaxpr finds the checks in the jitted function.
    """
    inlined = jax.jit(function, inline=True)
    if holds_check(inlined.trace(*arrays).jaxpr.jaxpr):
        note_check()
    return inlined(*arrays)


def _holds_check(jaxpr: Jaxpr, seen: set[Jaxpr]) -> bool:
    if jaxpr in seen:
        return False
    seen.add(jaxpr)
    return any(
        equation.primitive is check_p
        or any(_holds_check(inner, seen) for inner in jaxprs_in_params(equation.params))
        for equation in jaxpr.eqns
    )
