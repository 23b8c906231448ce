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
        if type(result) is tuple and type(result[0]) in array_types:
            return rebuild(result)
        return finish(result)
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from ..._partition import ARRAY, GuardWriter, Structure, concrete_array_types, flatten
from ..._traceback import compile_function
from ._arguments import WatchedArrays
from ._donation_warnings import DonationWarnings

FastPath = Callable[[tuple[Any, ...]], Any]

MISS = object()
"""A fast path returns `MISS` if it was not made for the arguments."""


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
    donation_warnings: DonationWarnings | None,
) -> FastPath:
    """Generates the fast path for arguments with the given Structures.

    **Arguments:**

    - `structures`: the Structure of each argument.
    - `output`: the Structure of the output if `jitted` returns plain arrays.
    - `arrays`: the arrays of a call, as examples of their types.
    - `jitted`: the function of flat arrays.
    - `finish`: converts any result of `jitted` to the user's output.
    - `always_finishes`: whether `finish` is needed even for plain arrays.
    - `watched`: the arrays in attributes of static arguments. The fast path misses if one of them
      has changed.
    - `donation_warnings`: hides JAX's warnings about donation during a trace. The fast path shows
      the warnings again at the end of the call. `None` if no warnings are hidden.
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
    # If the result is plain arrays, `finish` is not needed, unless the call must wait for a check.
    # Inside another transformation, the result may contain tracers even if the arguments do not.
    # `finish` handles tracers.
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
    """A fast path that refers to `compiled` weakly, so that Python can free `compiled`."""
    weak_compiled = weakref.ref(compiled)

    def call(args: tuple[Any, ...]) -> Any:
        compiled = weak_compiled()
        fast_path = None if compiled is None else compiled.own_fast_path
        return MISS if fast_path is None else fast_path(args)

    return call
