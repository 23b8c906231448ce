"""What several processes of one run do together."""

from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

Result = TypeVar("Result")


def together(action: Callable[[], Result]) -> Result:
    """`action()` in every process, which go on when all are done.

    **Raises:** what `action` raises here; `OSError` if it raised in another process, so that none
    waits for one that has given up.
    """
    if jax.process_count() == 1:
        return action()
    error, result = None, None
    try:
        result = action()
    except Exception as raised:
        error = raised
    is_well = np.asarray(multihost_utils.process_allgather(np.array(error is None)))
    if error is not None:
        raise error
    if not is_well.all():
        failed = ", ".join(map(str, np.flatnonzero(~is_well.reshape(-1))))
        raise OSError(f"A checkpoint failed in process {failed}, whose own error says why.")
    return result  # pyright: ignore


def in_first(action: Callable[[], Result]) -> Result | None:
    """`action()` in the first process alone, for which the others wait; `None` in them."""
    return together(lambda: action() if jax.process_index() == 0 else None)
