"""What may move between host and devices: everything, or what is asked for."""

import contextlib
import types
from collections.abc import Iterator
from typing import Literal

import jax

from ._traceback import is_of_user

Mode = Literal["transparent", "explicit"]

_GUARDS = {"transparent": "allow", "explicit": "disallow"}


@contextlib.contextmanager
def transfers(mode: Mode) -> Iterator[None]:
    """Says what may move between the host and the devices, as long as the context is open.

    This is `jax.transfer_guard`, with errors that say where.

    - `"transparent"`: everything, as JAX does by itself.
    - `"explicit"`: what somebody asks for, by `jax.device_put` and `jax.device_get`. A hidden copy
      is an error that names file and line, and, from a filtered function, the paths of arguments:
      a NumPy array that is passed, a Python number beside an array outside of a compiled function,
      a value that is printed. On a CPU, where the host reads what the device has written without a
      copy, values may be read.

    It holds for the thread that opens it. Contexts may be nested, and the innermost counts.

    **Arguments:**

    - `mode`: see above.

    **Raises:** `ValueError` for another mode. Within the context, what JAX's guard raises, a
    `RuntimeError`, with a note.

    !!! example

        >>> import eqxlike as eqx, jax, jax.numpy as jnp, numpy as np
        >>> @eqx.filter_jit
        ... def double(x):
        ...     return 2 * x
        >>> x = np.ones(3, np.float32)
        >>> with eqx.transfers("explicit"):
        ...     print(double(jax.device_put(x)))
        [2. 2. 2.]
        >>> with eqx.transfers("explicit"):
        ...     double(x)
        Traceback (most recent call last):
        ...
        jax.errors.JaxRuntimeError: INVALID_ARGUMENT: Disallowed host-to-device transfer: ...
    """
    if mode not in _GUARDS:
        known = " or ".join(map(repr, _GUARDS))
        raise ValueError(
            f"transfers expects {known}, got {mode!r}. The callbacks of a program are in "
            "`eqxlike.graph.report(function, *args).effects`."
        )
    try:
        with jax.transfer_guard(_GUARDS[mode]):
            yield
    except jax.errors.JaxRuntimeError as error:
        where = _line_of_user(error.__traceback__)
        # An outer context of ours adds no second note.
        is_noted = any(note.startswith(where) for note in getattr(error, "__notes__", ()))
        if "Disallowed" in str(error) and where and not is_noted:
            error.add_note(
                f"{where} copies between host and device, which nobody asked for: use "
                "`jax.device_put` or `jax.device_get`, or do it outside of `eqxlike.transfers`."
            )
        raise


def _line_of_user(entry: types.TracebackType | None) -> str:
    """File and line of the innermost frame that is neither ours nor JAX's."""
    where = ""
    while entry is not None:
        file_name = entry.tb_frame.f_code.co_filename
        if is_of_user(file_name) and file_name != contextlib.__file__:
            where = f"{file_name}:{entry.tb_lineno}"
        entry = entry.tb_next
    return where
