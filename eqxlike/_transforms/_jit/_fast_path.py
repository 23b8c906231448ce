"""The fast path of a compiled function: a generated function that later calls try first.

The generated function checks that the arguments have the Structures for which the function is
compiled, and passes their arrays to JAX. It makes no lookups, hashes or allocations that a call
does not need. If the arguments are a Module and an array, and the output has several arrays, the
generated function is in essence:

    def call(args):
        try:
            [x1, x2] = args
            x3 = getattr(x1, "_eqxlike_cached", None) or cache(x1)
            if x3.structure is not EXPECTED: return MISS
            if type(x2) is not ArrayImpl and type(x2) not in array_types: return MISS
        except Exception:
            return MISS
        result = jitted(*x3.arrays, x2)     # JAX's C++ dispatch
        if type(result) is tuple and type(result[0]) in array_types: return rebuild(result)
        return finish(result)

The two classes that follow belong to a `CompiledFunction`: `WatchedArrays` warns if an array in a
static argument was replaced, and `DonationWarnings` hides JAX's warnings during a trace.
"""

import contextlib
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from ..._module import Module
from ..._partition import ARRAY, GuardWriter, Structure, concrete_array_types, flatten
from ..._pytree import is_array
from ..._traceback import compile_function, stacklevel_of_user

FastPath = Callable[[tuple[Any, ...]], Any]

MISS = object()
"""A fast path returns `MISS` if it was not made for the arguments."""


def always_miss(args: tuple[Any, ...]) -> Any:
    """The fast path of a function that has not been called yet."""
    return MISS


def make_fast_path(
    compiled: Any, jitted: Any, output: Structure, arrays: list[Any], always_finishes: bool
) -> FastPath:
    """Generates the fast path to a `CompiledFunction`.

    The fast path misses if the arguments have other Structures, or if `compiled.watched` has
    changed. It shows JAX's warnings that `compiled.donation_warnings` has hidden during a trace.

    **Arguments:**

    - `jitted`: the function of flat arrays.
    - `output`: the Structure of the output if `jitted` returns plain arrays.
    - `arrays`: the arrays of a call, as examples of their types.
    - `always_finishes`: whether `compiled.finish` is needed even for plain arrays.
    """
    writer = GuardWriter(flatten, arrays, MISS)
    writer.write_all(compiled.structures, "args")
    if compiled.watched:
        writer.miss_if(f"not {writer.constant(compiled.watched.are_current)}()")
    lines = writer.function("call(args)")
    call = f"result = jitted({', '.join(writer.arrays)})"
    namespace = {
        **writer.namespace,
        "array_types": concrete_array_types,
        "jitted": jitted,
        "rebuild": output.rebuilder(cache=True),
        "finish": compiled.finish,
    }
    if compiled.donation_warnings is None:
        lines.append(f"    {call}")
    else:
        lines += ["    try:", f"        {call}", "    finally:"]
        lines.append("        if to_restore: restore_warnings()")
        namespace["to_restore"] = compiled.donation_warnings.to_restore
        namespace["restore_warnings"] = compiled.donation_warnings.restore
    # If the result is plain arrays, `finish` is not needed, unless the call must wait for a check.
    # Inside another transformation, the result may contain tracers even if the arguments do not.
    # `finish` handles tracers.
    if output is ARRAY and not always_finishes:
        lines.append("    if type(result) in array_types: return result")
    elif not always_finishes:
        is_concrete = " and type(result[0]) in array_types" if output.num_arrays else ""
        lines.append(f"    if type(result) is tuple{is_concrete}: return rebuild(result)")
    lines.append("    return finish(result)")
    return compile_function(lines, namespace, "fast path")


def weak_fast_path(compiled: Any) -> FastPath:
    """A fast path that refers to `compiled` weakly, so that Python can free `compiled`."""
    weak_compiled = weakref.ref(compiled)

    def call(args: tuple[Any, ...]) -> Any:
        compiled = weak_compiled()
        fast_path = None if compiled is None else compiled.own_fast_path
        return MISS if fast_path is None else fast_path(args)

    return call


# --- Arrays in attributes of a static argument, such as the instance of a plain class ---


class WatchedArrays:
    """The arrays in attributes of static arguments, at the time of the trace.

    A static object is compared by identity, as in `jax.jit`. Arrays in the object become constants
    of the compiled function. If an attribute later holds another array, the compiled function still
    uses the old array. The next call then warns once.

    **Arguments:**

    - `name`: the name of the function that is traced.
    - `static`: the static arguments of this function.
    """

    def __init__(self, name: str, static: Iterable[Any]):
        self._name = name
        # Each entry has the `__dict__` of an object, the name of an attribute, the array in it, and
        # the name of the object's class.
        self._watched = [
            (attributes, attribute, value, type(each).__name__)
            for each in static
            if not isinstance(each, Module | type)
            and type(attributes := getattr(each, "__dict__", None)) is dict
            for attribute, value in attributes.items()
            if is_array(value)
        ]

    def __bool__(self) -> bool:
        return bool(self._watched)

    def are_current(self) -> bool:
        """Returns `True` if all attributes still hold the same arrays."""
        # This runs in each call, and a loop takes half the time of `all`.
        for attributes, name, array, _ in self._watched:  # noqa: SIM110
            if attributes.get(name) is not array:
                return False
        return True

    def warn_of_changes(self) -> None:
        """Warns once for each attribute that no longer holds the same array."""
        watched = self._watched
        self._watched = [each for each in watched if each[0].get(each[1]) is each[2]]
        for attributes, name, array, type_name in watched:
            if attributes.get(name) is not array:
                warnings.warn(
                    f"`{type_name}.{name}` held an array when `{self._name}` was traced, and "
                    f"has been assigned since. A {type_name} is not a Module: it is static, "
                    "compared by identity, and the compiled function still uses the old array. "
                    "Make it an `eqxlike.Module`, or pass the array as an argument.",
                    stacklevel=stacklevel_of_user(),
                )


# --- JAX's warnings about unusable donated buffers, which are hidden while a call traces ---


_UNUSED = "(?:Some donated buffers were not usable)"
"""The beginning of JAX's warning, as a regular expression. The group `(?:...)` makes it differ from
a filter that the user may have set for the same warning. `warnings` would otherwise treat the two
filters as one, and remove the user's filter.
"""


class _Filter:
    """Hides JAX's warning about unusable donated buffers, while at least one call needs this.

    All threads share one filter. `warnings.catch_warnings` would not work: if two threads use it at
    the same time, a filter may remain forever.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._num_users = 0
        self._filter: Any = None

    def begin(self) -> None:
        with self._lock:
            self._num_users += 1
            if self._num_users == 1:
                warnings.filterwarnings("ignore", message=_UNUSED)
                self._filter = warnings.filters[0]

    def end(self) -> None:
        with self._lock:
            self._num_users -= 1
            if self._num_users == 0 and self._filter in warnings.filters:
                warnings.filters.remove(self._filter)  # pyright: ignore[reportAttributeAccessIssue]


_filter = _Filter()


HIDES_WARNINGS = frozenset({"all", "all-except-first"})
"""The values of `donate` for which JAX's warnings are hidden."""


class DonationWarnings:
    """Context manager that hides JAX's warnings about unusable donated buffers of one function.

    JAX warns when it lowers the function. This happens after the trace and before the end of the
    call. So the end of a trace calls `silence`, and the end of the call calls `restore`.

    - `to_restore`: functions to call when the call returns or raises, from the last to the first.
    """

    def __init__(self) -> None:
        self.to_restore: list[Callable[[], None]] = []

    def silence(self) -> None:
        """Hides JAX's warnings until `restore` is called."""
        _filter.begin()
        self.to_restore.append(_filter.end)

    def __enter__(self) -> None: ...

    def __exit__(self, *exception: Any) -> None:
        self.restore()

    def restore(self) -> None:
        """Shows JAX's warnings again."""
        if self.to_restore:
            # Another thread may have popped the last function.
            with contextlib.suppress(IndexError):
                while True:
                    self.to_restore.pop()()
