"""Checks in compiled programs: a check that fails raises an exception from the call.

How a check reaches the user:

1. `error_if` (`_error_if`) decides what happens on failure: an exception, NaN, a debugger,
   nothing. It inserts a `Check` into the program. A `Check` is a callback that is called only on
   failure.
2. The trace records whether it contains a check (`TracedProgram`). The compiled function returns a
   flag for this. A call waits for its result only if the flag is set.
3. On failure the callback stores its message and makes the run fail (`raise_in_callback`). When the
   caller waits for the result, JAX raises a different exception, with pages of text. This text
   contains a number that identifies the failure.
4. With this number, the call finds the message (`claim_failure`), even if several threads fail at
   the same time. The call, in `_jit/_filter_jit.py`, raises the message as `EqxlikeRuntimeError`,
   without JAX's long text.

During tracing, a check is one primitive. Tracing a primitive is faster than tracing its
implementation. Lowering replaces the primitive by a `cond` that calls the callback. Under
`jax.vmap`, the predicate is reduced over each mapped axis, so there is only one `cond`. The
callback receives the whole predicate, so it can report the batch indices at which the predicate is
true. The checked arrays do not pass through the `cond`. Instead, `needing` makes the checked arrays
depend on the output of the check.
"""

import collections
import dataclasses
import functools
import itertools
import logging
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Jaxpr, Primitive, get_opaque_trace_state, jaxprs_in_params
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from jaxtyping import Array

from .._compat import CALLBACK_LOGGERS, Tracer, forget_failed_run, set_batching_rule

# --- The exceptions, and how they reach the caller of a compiled program ---


ERRORS_OF_JAX = (jax.errors.JaxRuntimeError, ValueError)
"""The exceptions that JAX raises if a callback raises. A call that runs no Python code, on JAX's
fast path, raises `ValueError`.
"""

_MAX_RECENT = 1000
"""Maximum number of unclaimed failures. Failures under raw `jax.jit` are never claimed.
"""


class EqxlikeRuntimeError(RuntimeError):
    """A check of `error_if` or `branched_error_if` has failed."""

    __module__ = "eqxlike"


class EqxlikeTracetimeError(RuntimeError):
    """A check of `error_if` or `branched_error_if` fails regardless of the values of arrays.

    This happens if the predicate is a Python `bool`, `int` or `float`. Then `error_if` itself
    raises the error, before the program runs.
    """

    __module__ = "eqxlike"


# Code written for Equinox uses these names.
EquinoxRuntimeError = EqxlikeRuntimeError
EquinoxTracetimeError = EqxlikeTracetimeError

_serial = itertools.count(1)
_lock = threading.Lock()
_recent: collections.OrderedDict[int, str] = collections.OrderedDict()


def raise_in_callback(message: str) -> None:
    """Raises an error in a callback. `claim_failure` later finds the message of this error."""
    number = next(_serial)
    with _lock:
        _recent[number] = message
        if len(_recent) > _MAX_RECENT:
            _recent.popitem(last=False)
    raise EqxlikeRuntimeError(f"{message}\n[eqxlike failure {number}]")


def claim_failure(error: BaseException) -> EqxlikeRuntimeError | None:
    """Converts JAX's `error` to the `EqxlikeRuntimeError` of the failed check that caused it.

    Returns `None` if no check caused `error`. The caller must raise the returned error, because JAX
    will not report the failure again.
    """
    if not isinstance(error, ERRORS_OF_JAX):
        return None
    # The user's message may quote an earlier failure with its number. The number of this failure
    # comes last.
    found = re.findall(r"\[eqxlike failure (\d+)\]", str(error))
    message = _recent.get(int(found[-1])) if found else None
    if message is None:
        return None
    forget_failed_run()
    return EqxlikeRuntimeError(message)


def _is_news(record: logging.LogRecord) -> bool:
    """Returns `False` for a log record that only repeats the exception of a failed check."""
    return record.exc_info is None or not isinstance(record.exc_info[1], EqxlikeRuntimeError)


for _name in CALLBACK_LOGGERS:
    logging.getLogger(_name).addFilter(_is_news)


# --- The error message of a failed check ---


_MAX_INDICES = 8
"""At most this many indices of a batch are listed."""


@dataclasses.dataclass(frozen=True, eq=False)
class FailureReport:
    """Makes the error message when a check fails.

    **Arguments:**

    - `messages`: the messages of the user. A failed check selects a message by its index.
    - `place`: the file and line of the check in the user's code.
    """

    messages: Sequence[str]
    place: str

    def only(self, index: int) -> "FailureReport":
        """A report with only the message at `index`, for an index that is known at trace time."""
        return FailureReport([self._message(index)], self.place)

    def text(self, failed: np.ndarray, index: np.ndarray | None) -> str:
        """The user's message, the line of the check, and the batch indices at which it failed.

        **Arguments:**

        - `failed`: boolean array with the predicate of each member; it has one axis for each
          `jax.vmap`.
        - `index`: the index of the message for each member, an array with the shape of `failed`.
          `None` selects message 0.
        """
        chosen = 0
        if index is not None:
            chosen = int(index[failed].max())
            failed = failed & (index == chosen)
        return f"{self._message(chosen)}\n(check at {self.place}{_describe_batch(failed)})"

    def _message(self, chosen: int) -> str:
        if -len(self.messages) <= chosen < len(self.messages):
            return self.messages[chosen]
        return (
            f"A check failed with the message index {chosen}, but there are only "
            f"{len(self.messages)} messages."
        )


def _describe_batch(failed: np.ndarray) -> str:
    """Text with the batch indices at which a check failed, or the first few if there are many."""
    if failed.ndim == 0:
        return ""
    places = np.flatnonzero(failed)
    first = places[:_MAX_INDICES]
    indices = zip(*(axis.tolist() for axis in np.unravel_index(first, failed.shape)), strict=True)
    names = [str(index[0] if len(index) == 1 else index) for index in indices]
    if len(places) > len(first):
        names.append(f"{len(places) - len(first)} more")
    listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    return f", failed for batch {'index' if len(names) == 1 else 'indices'} {listed}"


# --- The checks that this thread has traced, and the programs that it is tracing ---


class _Traced(threading.local):
    """The checks and programs that this thread has traced.

    - `num_checks`: the number of checks.
    - `programs`: the programs that are being traced, with the outermost program first.
    - `outputs`: each trace, with the output of its latest check. The references are weak, so that
      no output outlives its trace. During the trace, the checked arrays keep the outputs alive.
    """

    num_checks: int = 0
    programs: "tuple[TracedProgram, ...]" = ()
    outputs: tuple[tuple[Any, Callable[[], Any]], ...] = ()


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
        state = get_opaque_trace_state()
        earlier = next((output() for trace, output in _traced.outputs if trace == state), None)
        if earlier is not None:
            earlier = jax.lax.broadcast(earlier, failed.shape)
            operands[0] = jax.lax.bitwise_and(failed, earlier)
        output = check_p.bind(*operands, check=self)
        if isinstance(output, Tracer):
            # Under `jax.vmap`, `bind` has already inserted the same check into an outer trace.
            others = [
                each for each in _traced.outputs if each[0] != state and each[1]() is not None
            ]
            _traced.outputs = (*others, (state, weakref.ref(output)))
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
        # A scalar `failed` is true whenever the callback runs, so it is not passed. XLA would
        # compute it a second time to pass it.
        passed = None if failed.shape == () else failed
        is_any = failed if passed is None else jnp.any(failed)
        return jax.lax.cond(is_any, self._call_back, lambda *_: jnp.array(True), passed, *index)

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


# --- The primitives: `check_p`, and `needing_p` for the arrays that depend on the check ---

# Operands: the predicate and, if there are several messages, the index of the message. Output:
# whether the check passes. The parameter `check` is a `Check`.
check_p = Primitive("check")
check_p.def_impl(lambda *operands, check: jnp.asarray(check.evaluate(*operands)))
check_p.def_abstract_eval(lambda *operands, check: ShapedArray((), np.dtype(bool)))


def stage(*operands: Any, check: Any) -> Array:
    """The lowering rule: replaces the primitive by operations of JAX."""
    return check.staged(*operands)


def _differentiate_check(primals: Any, tangents: Any, *, check: Any) -> tuple[Any, ad.Zero]:
    output = check_p.bind(*primals, check=check)
    return output, ad.Zero(jax.typeof(output).to_tangent_aval())


def _batch_check(axis: Any, operands: Any, axes: Any, *, check: Any) -> tuple[Any, None]:
    """The batching rule: inserts the same check with one more batch axis."""
    spread = (
        batching.bdim_at_front(operand, at, axis.size)
        for operand, at in zip(operands, axes, strict=True)
    )
    failed, *index = spread
    return check.passes(failed, *index or [None]), None


mlir.register_lowering(check_p, mlir.lower_fun(stage, multiple_results=False))
ad.primitive_jvps[check_p] = _differentiate_check
set_batching_rule(check_p, _batch_check)


def needing(passes: Any, arrays: list[Array]) -> list[Array]:
    """Adds a data dependency on the check to the arrays and their derivatives."""
    return needing_p.bind(passes, *arrays) if arrays else []


# Operands: the output of a check, and any number of arrays. Output: the arrays.
needing_p = Primitive("needing_check")
needing_p.multiple_results = True


@needing_p.def_impl
def _select(passes: Any, *arrays: Any) -> list[Array]:
    # The zeros are never used: if the check fails, the program raises. The compiler fuses `select`
    # with the operation that computes or uses the array.
    return [jax.lax.select(passes, array, jnp.zeros_like(array)) for array in arrays]


needing_p.def_abstract_eval(lambda passes, *arrays: list(arrays))


def _differentiate(primals: Any, tangents: Any) -> tuple[list[Any], list[Any]]:
    return needing_p.bind(*primals), _select_nonzero(primals[0], tangents[1:])


def _transpose(cotangents: Any, passes: Any, *arrays: Any) -> list[Any]:
    return [None, *_select_nonzero(passes, cotangents)]


def _select_nonzero(passes: Any, tangents: Any) -> list[Any]:
    nonzero = [each for each in tangents if type(each) is not ad.Zero]
    selected = iter(needing(passes, nonzero))
    return [each if type(each) is ad.Zero else next(selected) for each in tangents]


def _batch(axis: Any, operands: Any, axes: Any) -> tuple[list[Any], list[Any]]:
    if axes[0] is None:
        return needing_p.bind(*operands), list(axes[1:])
    # The output of a check has no batch axis. But if a check is in a branch of a `cond`, the output
    # of the branch may have a batch axis.
    return jax.vmap(_select, axes)(*operands), [0] * len(axes[1:])


mlir.register_lowering(needing_p, mlir.lower_fun(_select, multiple_results=True))
ad.primitive_jvps[needing_p] = _differentiate
ad.primitive_transposes[needing_p] = _transpose
set_batching_rule(needing_p, _batch)
