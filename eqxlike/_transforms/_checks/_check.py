"""A check in a compiled program: a callback, and a `cond` that enters it only on failure.

The predicate is reduced over each axis that it is mapped over, so that there is still one `cond`
under `jax.vmap`. The callback receives the whole predicate, and can say where in the batch it is
true. The checked arrays pass through neither of them: the output of the `cond` selects them.
"""

import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, get_opaque_trace_state, jaxprs_in_params
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from ..._compat import Tracer
from ._failure_report import FailureReport
from ._runtime_errors import EqxlikeRuntimeError, raise_in_callback
from ._traced_checks import has_any_check_been_traced, is_for_several_devices, note_check


class _Order(threading.local):
    """The output of the last check in each trace that this thread is in.

    Outputs are held weakly: the checked arrays hold them, and no output may outlive its trace.
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

    - `report`: the text of a failure.
    - `does_raise`: whether a failure raises; if not, it is printed and the program goes on.
    - `mesh`: the devices, each of which calls back, if they are known.
    """

    report: FailureReport
    does_raise: bool
    mesh: AbstractMesh | None

    def passes(self, failed: Any, index: Any, earlier: Any = None) -> Any:
        """Whether the check passes, for all members of all batches together.

        **Arguments:**

        - `failed`: the predicate, one value for each member of a batch.
        - `index`: the index of the message, one for each member too; or `None`.
        - `earlier`: the output of the check before this one; by default the last of this trace.
          Thus the first check in the program that fails raises, in whatever order the compiler
          puts them.
        """
        if not isinstance(failed, Tracer) and not np.asarray(failed).any():
            return True
        if not any(isinstance(operand, Tracer) for operand in (failed, index)):
            text = self._text(failed, index)
            if self.does_raise:
                raise EqxlikeRuntimeError(text)
            print(text, flush=True)
            return False
        note_check()
        if earlier is None and self.does_raise:
            earlier = _order.last()
        staged = jax.custom_batching.custom_vmap(self._staged)
        # The rule is this object itself, so that `holds_check` finds it in a jaxpr.
        staged.def_vmap(self)
        output = staged(failed, index, earlier)
        if isinstance(output, Tracer) and self.does_raise:
            _order.append(output)
        return output

    def __call__(
        self, axis_size: int, is_batched: list[Any], failed: Any, index: Any, earlier: Any
    ) -> tuple[Any, bool]:
        """The rule for `jax.vmap`: the same check with one axis more."""

        def spread(operand: Any, is_spread: bool) -> Any:
            shape = (axis_size, *jnp.shape(operand))
            return operand if is_spread else jnp.broadcast_to(operand, shape)

        failed = spread(failed, is_batched[0])
        index = None if index is None else spread(index, is_batched[1])
        # `earlier` is the output of another check, which is never mapped.
        return self.passes(failed, index, earlier), False

    def _staged(self, failed: Any, index: Any, earlier: Any) -> Any:
        is_failure = jnp.any(failed)
        if earlier is not None:
            is_failure = is_failure & earlier
        return jax.lax.cond(
            is_failure, self._call_back, lambda failed, index: jnp.array(True), failed, index
        )

    def _call_back(self, failed: Any, index: Any) -> Any:
        """Calls back from each device, if there are several.

        By itself JAX calls back from the first device alone. If that raises, the others wait for
        its output without end, until XLA ends the process.
        """
        mesh = self.mesh
        if mesh is None and self.does_raise and is_for_several_devices():
            return self._call_back_from_parts(failed, index)
        if mesh is None or not (axes := _axes_not_manual(mesh)):
            return self._call_back_once(failed, index)
        whole = PartitionSpec()
        # Where an axis of the mesh is mapped over, JAX has taken it out of the mesh in force.
        with jax.sharding.use_abstract_mesh(mesh):
            operands = (failed, index)
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

    def _call_back_once(self, failed: Any, index: Any) -> Any:
        output = jax.ShapeDtypeStruct((), jnp.bool_)
        return jax.pure_callback(self._on_failure, output, failed, index)

    def _call_back_from_parts(self, failed: Any, index: Any) -> Any:
        """Calls back from devices that are not known, each with its part of the operands.

        So the operands have shape `()`, which has no parts, and do not tell the place in a batch.
        """
        if index is not None:
            index = jnp.max(jnp.where(failed, index, jnp.iinfo(index.dtype).min))
        jax.debug.callback(self._raise, jnp.any(failed), index, partitioned=True)
        return jnp.array(False)

    def _on_failure(self, failed: Any, index: Any) -> np.ndarray:
        if self.does_raise:
            self._raise(failed, index)
        print(self._text(failed, index), flush=True)
        return np.array(False)

    def _raise(self, failed: Any, index: Any) -> None:
        raise_in_callback(self._text(failed, index))

    def _text(self, failed: Any, index: Any) -> str:
        return self.report.text(np.asarray(failed), None if index is None else np.asarray(index))


def _axes_not_manual(mesh: AbstractMesh) -> set[str]:
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name for name, axis_type in types if axis_type != AxisType.Manual}


def mesh_of(arrays: Iterable[Any]) -> AbstractMesh | None:
    """The mesh of several devices on which one of the arrays lies, or else the mesh in force."""
    meshes = (jax.typeof(array).sharding.mesh for array in arrays)
    for mesh in (*meshes, jax.sharding.get_abstract_mesh()):
        if not mesh.empty and mesh.size > 1:
            return mesh
    return None


def holds_check(jaxpr: Jaxpr) -> bool:
    """Whether there is a check in `jaxpr`, or in functions that were inlined from a cache."""
    return has_any_check_been_traced() and _holds_check(jaxpr, set())


def run_and_look_for_checks(function: Callable[..., list[Any]], arrays: Iterable[Any]) -> list[Any]:
    """The output of `function` for tracers; notes checks in functions inlined from a cache too.

    JAX does not call functions that it has traced before: their checks are in the jaxpr alone.
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
        any(map(_is_check, equation.params.values()))
        or any(_holds_check(inner, seen) for inner in jaxprs_in_params(equation.params))
        for equation in jaxpr.eqns
    )


def _is_check(parameter: Any) -> bool:
    # JAX wraps a rule in an object of its own, as `functools.update_wrapper` does.
    return isinstance(getattr(parameter, "__wrapped__", parameter), Check)
