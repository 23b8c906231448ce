"""The fast path of a compiled function: a generated function that later calls try first.

It asks whether the arguments have the Structures that the function is compiled for, and hands their
arrays to JAX. It looks up, hashes and allocates nothing that the call does not need.
"""

import contextlib
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from ..._partition import ARRAY, GuardWriter, Structure, concrete_array_types, flatten
from ..._traceback import compile_function
from ._arguments import WatchedArrays

FastPath = Callable[[tuple[Any, ...]], Any]

MISS = object()
"""A fast path returns this for arguments that it was not made for."""


def always_miss(args: tuple[Any, ...]) -> Any:
    """The fast path of a function that has not been called yet."""
    return MISS


def make_fast_path(
    structures: Sequence[Structure],
    output: Structure,
    arrays: list[Any],
    *,
    jitted: Callable[..., Any],
    finish: Callable[[Any], Any],
    always_finishes: bool,
    watched: WatchedArrays | None,
    donation_warnings: "DonationWarnings | None",
) -> FastPath:
    """The fast path for arguments of these Structures.

    **Arguments:**

    - `output`: the Structure of the output that plain arrays are.
    - `arrays`: the arrays of a call, as examples of their types.
    - `jitted`: the function of flat arrays.
    - `finish`: makes the user's output of its result, whatever that is.
    - `always_finishes`: whether that is needed even for plain arrays.
    - `watched`: the arrays that must be in attributes of static arguments.
    - `donation_warnings`: a switch for warnings that a trace may have hidden.
    """
    writer = GuardWriter(flatten, arrays, MISS)
    writer.write_all(structures, "args")
    if watched:
        writer.miss_if(f"not {writer.constant(watched.are_current)}()")
    lines = writer.function("call(args)")
    call = f"result = jitted({', '.join(writer.arrays)})"
    namespace = {
        **writer.namespace,
        "array_types": concrete_array_types,
        "jitted": jitted,
        "rebuild": output.rebuilder(cache=True),
        "finish": finish,
    }
    if donation_warnings is None:
        lines.append(f"    {call}")
    else:
        lines += ["    try:", f"        {call}", "    finally:"]
        lines.append("        if to_restore: restore_warnings()")
        namespace["to_restore"] = donation_warnings.to_restore
        namespace["restore_warnings"] = donation_warnings.restore
    # Plain arrays are the output, but where a check may be waited for. Inside another
    # transformation, concrete arguments may give tracers: `finish` sees to them.
    if always_finishes:
        pass
    elif output is ARRAY:
        lines.append("    if type(result) in array_types: return result")
    elif output.num_arrays:
        lines.append("    if type(result) is tuple and type(result[0]) in array_types:")
        lines.append("        return rebuild(result)")
    else:
        lines.append("    if type(result) is tuple: return rebuild(result)")
    lines.append("    return finish(result)")
    return compile_function(lines, namespace, "fast path")


def weak_fast_path(compiled: Any) -> FastPath:
    """A fast path that does not hold `compiled`, which goes with a short-lived function."""
    weak_compiled = weakref.ref(compiled)

    def call(args: tuple[Any, ...]) -> Any:
        compiled = weak_compiled()
        fast_path = None if compiled is None else compiled.own_fast_path
        return MISS if fast_path is None else fast_path(args)

    return call


# --- JAX's warnings of donated buffers, which a call hides if it traces ---


_UNUSED = "(?:Some donated buffers were not usable)"
"""The beginning of JAX's warning. The brackets make it differ from a filter of the user's, which
`warnings` would otherwise take for this one, and move and remove.
"""


class _Filter:
    """A filter that hides JAX's warning of unusable donated buffers, while somebody asks for it.

    There is one filter for all threads: `warnings.catch_warnings` in two of them, the one ending in
    the middle of the other, would leave its filter behind for good.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._num_asking = 0
        self._filter: Any = None

    def begin(self) -> None:
        with self._lock:
            self._num_asking += 1
            if self._num_asking == 1:
                warnings.filterwarnings("ignore", message=_UNUSED)
                self._filter = warnings.filters[0]

    def end(self) -> None:
        with self._lock:
            self._num_asking -= 1
            if self._num_asking == 0 and self._filter in warnings.filters:
                warnings.filters.remove(self._filter)  # pyright: ignore[reportAttributeAccessIssue]


_filter = _Filter()


HIDES_WARNINGS = frozenset({"all", "all-except-first"})
"""The words for `donate` by which the user wants no such warnings."""


class DonationWarnings:
    """A switch that hides JAX's warnings of unusable donated buffers of one function.

    JAX warns when it lowers, which is after the trace and before the call has ended. A call
    that may trace runs inside this, a context that ends with `restore`.

    - `to_restore`: functions to call, last one first, when a call that may have traced has ended,
      well or not.
    """

    def __init__(self) -> None:
        self.to_restore: list[Callable[[], None]] = []

    def silence(self) -> None:
        """Hides these warnings until `restore`."""
        _filter.begin()
        self.to_restore.append(_filter.end)

    def __enter__(self) -> None: ...

    def __exit__(self, *exception: Any) -> None:
        self.restore()

    def restore(self) -> None:
        """Shows them again."""
        if self.to_restore:
            # Another thread may take the last of them.
            with contextlib.suppress(IndexError):
                while True:
                    self.to_restore.pop()()
