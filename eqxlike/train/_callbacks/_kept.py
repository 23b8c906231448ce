"""What checkpoints keep of callbacks."""

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any

from jaxtyping import PyTree

from .._run import Run
from ._callback import Callback


def kept_by(callbacks: Sequence[Callback]) -> tuple[dict[str, Any], dict[str, PyTree]]:
    """What `load_kept` needs: JSON, and the arrays of those callbacks that have some, by name."""
    data, arrays = {}, {}
    for name, callback in _named(callbacks).items():
        state, own = callback.save_state(), callback.save_arrays()
        if own is not None:
            arrays[name] = own
        if state is not None or own is not None:
            data[name] = {"state": state, "has_arrays": own is not None}
    return data, arrays


def load_kept(
    callbacks: Sequence[Callback],
    run: Run,
    data: dict[str, Any],
    read: Callable[[str, PyTree], PyTree],
) -> None:
    """Gives back to callbacks what was kept of those of their names.

    **Arguments:**

    - `data`: as `kept_by` gave it.
    - `read`: `read(name, like)` gives the arrays of a name.
    """
    for name, callback in _named(callbacks).items():
        kept = data.get(name)
        if kept is None:
            continue
        if kept["state"] is not None:
            callback.load_state(run, kept["state"])
        if kept["has_arrays"]:
            callback.load_arrays(run, functools.partial(read, name))


def _named(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """The callbacks by their names, of which those that come again have their number."""
    named: dict[str, Callback] = {}
    counts: collections.Counter[str] = collections.Counter()
    for callback in callbacks:
        name = callback.state_name
        counts[name] += 1
        named[name if counts[name] == 1 else f"{name} #{counts[name]}"] = callback
    return named
