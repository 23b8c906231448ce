"""`transfers`, which forbids implicit copies between the host and the devices."""

import contextlib
import traceback
from collections.abc import Iterator
from typing import Literal

import jax

from ._traceback import is_of_user

Mode = Literal["transparent", "explicit"]

_GUARDS = {"transparent": "allow", "explicit": "disallow"}


@contextlib.contextmanager
def transfers(mode: Mode) -> Iterator[None]:
    """Context manager that allows or forbids implicit copies between the host and the devices.

    It is `jax.transfer_guard` with error messages that show where a copy happens. It applies to the
    current thread. If contexts are nested, the innermost context applies.

    **Arguments:**

    - `mode`: `"transparent"` allows every copy, as JAX does by default. `"explicit"` allows only
      copies by `jax.device_put` and `jax.device_get`, and raises an error for an implicit copy.
      Passing a NumPy array to a compiled function and printing a value are implicit copies. Outside
      of a compiled function, combining a Python number with an array is also an implicit copy. On a
      CPU, values may be printed and read, since reading needs no copy.

    **Raises:** `ValueError` if `mode` is another value. Inside the context, an implicit copy raises
    JAX's error, which is a `RuntimeError`. A note in the error shows file and line. If a filtered
    function was called, the error also shows the paths of the arguments.

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
            f"transfers expects {known}, got {mode!r}. To list the callbacks of a program, use "
            "`eqxlike.graph.report(function, *args).effects`."
        )
    try:
        with jax.transfer_guard(_GUARDS[mode]):
            yield
    except jax.errors.JaxRuntimeError as error:
        where = ""
        for frame, line in traceback.walk_tb(error.__traceback__):
            file_name = frame.f_code.co_filename
            if is_of_user(file_name) and file_name != contextlib.__file__:
                where = f"{file_name}:{line}"
        # If contexts are nested, only the innermost context adds a note.
        is_noted = any(note.startswith(where) for note in getattr(error, "__notes__", ()))
        if "Disallowed" in str(error) and where and not is_noted:
            error.add_note(
                f"{where} copies implicitly between host and device: use `jax.device_put` or "
                "`jax.device_get`, or copy outside of `eqxlike.transfers`."
            )
        raise
