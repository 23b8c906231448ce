"""The switch of the checking mode, in which every cached partition is compared with a fresh one.

With the environment variable `EQXLIKE_CHECK_PARTITIONS=1`, or inside `checking_partitions()`, no
filtered call takes its fast path: each Module is flattened again and compared, leaf by leaf and by
identity, with the partition cached on it. A difference raises `PartitionError`.
"""

import contextlib
import os
from collections.abc import Callable, Iterator

_depth = int(os.environ.get("EQXLIKE_CHECK_PARTITIONS", "0") not in ("", "0"))
_listeners: list[Callable[[], None]] = []


class PartitionError(RuntimeError):
    """A Module was changed behind its back: its cached partition differs from what it holds now."""


def is_checking() -> bool:
    return _depth > 0


def when_switched_on(listener: Callable[[], None]) -> None:
    """Registers `listener`, called with no arguments each time the mode is switched on."""
    _listeners.append(listener)


@contextlib.contextmanager
def checking_partitions() -> Iterator[None]:
    """Compares every cached partition with a fresh one, as long as the context is open.

    The mode holds for the whole process, all threads included. It makes filtered calls many times
    slower; use it in tests, or to find out who mutates a Module through its `__dict__`.

    **Raises:** `PartitionError` from the filtered call that meets a changed Module.

    !!! example

        >>> import eqxlike as eqx, jax.numpy as jnp
        >>> double = eqx.filter_jit(lambda x: 2 * x)
        >>> with eqx.checking_partitions():
        ...     print(double(jnp.array(3.0)))
        6.0
    """
    global _depth
    _depth += 1
    for listener in _listeners:
        listener()
    try:
        yield
    finally:
        _depth -= 1
