"""The warm call: a function generated for one combination of Structures.

It asks whether the arguments have these Structures and hands their arrays to JAX. It looks up,
hashes and allocates nothing that the call does not need. For other arguments it returns `MISS`.
"""

from collections.abc import Callable, Sequence
from typing import Any

from ..._codegen import compile_function
from ..._partition import ARRAY, GuardWriter, Structure, concrete_array_types, flatten
from ._donation import DonationWarnings

MISS = object()
"""A fast path returns this for arguments that it was not made for."""


def always_miss(args: tuple[Any, ...]) -> Any:
    """The fast path of a function that has not been called yet."""
    return MISS


FastPath = Callable[[tuple[Any, ...]], Any]


def make_fast_path(
    structures: tuple[Structure, ...],
    arrays: Sequence[Any],
    jitted: Callable[..., Any],
    output: Structure,
    finish: Callable[[Any], Any],
    donation_warnings: DonationWarnings,
    is_current: Callable[[], bool] | None,
) -> FastPath:
    """The function from arguments of these Structures to the output of the user's function.

    **Arguments:**

    - `structures`: the Structure of each argument.
    - `arrays`: the arrays of arguments that have these Structures, as examples of their types.
    - `jitted`: a function that is called with the arrays of all arguments, in order.
    - `output`: the Structure of the output where `jitted` returns a plain tuple, or a bare array.
    - `finish`: a function that is called with the result of `jitted` in all other cases.
    - `donation_warnings`: which of them to show again once `jitted` has returned.
    - `is_current`: whether to go on with arguments of these Structures; `None` for always.
    """
    writer = GuardWriter(flatten, arrays, MISS)
    names = writer.unpack("args", len(structures))
    for name, structure in zip(names, structures, strict=True):
        writer.write(structure, name)
    if is_current is not None:
        writer.miss_if(f"not {writer.constant(is_current)}()")
    lines = [
        "def call(args):",
        "    try:",
        *(f"        {line}" for line in writer.lines),
        # An argument of another type may lack what the guards ask it for.
        "    except Exception:",
        "        return MISS",
    ]
    call = f"result = jitted({', '.join(writer.arrays)})"
    if donation_warnings.to_restore is None:
        lines.append(f"    {call}")
    else:
        lines += ["    try:", f"        {call}", "    finally:"]
        lines.append("        if to_restore: restore_warnings()")
    # Inside another transformation, concrete arguments may give tracers: `finish` sees to them.
    if output is ARRAY:
        lines.append("    if type(result) in array_types: return result")
    elif output.num_arrays:
        lines.append("    if type(result) is tuple and type(result[0]) in array_types:")
        lines.append("        return rebuild(result)")
    else:
        lines.append("    if type(result) is tuple: return rebuild(result)")
    lines.append("    return finish(result)")
    namespace = {
        **writer.namespace,
        "array_types": concrete_array_types,
        "jitted": jitted,
        "rebuild": output.rebuilder(cache=True),
        "finish": finish,
        "restore_warnings": donation_warnings.restore,
        "to_restore": donation_warnings.to_restore,
    }
    return compile_function(lines, namespace, "fast path")
