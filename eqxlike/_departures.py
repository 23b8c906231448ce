"""What of a traced program leaves the device on which it runs."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
from jax.extend.core import jaxprs_in_params

from ._traceback import is_of_user

_CALLS = {
    "check": "error_if",
    "debug_callback": "jax.debug.callback or jax.debug.print",
    "debug_print": "jax.debug.print",
    "infeed": "infeed",
    "io_callback": "io_callback",
    "outfeed": "outfeed",
    "pure_callback": "pure_callback",
}
"""Each operation that calls the host, and what the user calls it."""


@dataclasses.dataclass(frozen=True)
class Departure:
    """An operation that leaves the device.

    - `what`: as the user wrote it.
    - `where`: file and line of the user; empty if JAX does not know.
    """

    what: str
    where: str

    def __str__(self) -> str:
        return f"{self.what} at {self.where}" if self.where else self.what


def departures(jaxpr: Any, device: Any = None) -> Iterator[Departure]:
    """The operations of a jaxpr, and of those inside it, that call the host.

    **Arguments:**

    - `device`: those that put arrays elsewhere than on this one are told too; `None` for those that
      call the host alone.
    """
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in _CALLS:
            yield Departure(_CALLS[name], _line_of_user(equation.source_info))
        elif device is not None and name == "device_put":
            places = equation.params.get("devices", ())
            for place in places:
                if place is not None and not _is_on(place, device):
                    what = f"jax.device_put to {place}"
                    yield Departure(what, _line_of_user(equation.source_info))
        for inner in jaxprs_in_params(equation.params):
            yield from departures(inner, device)


def _is_on(place: Any, device: Any) -> bool:
    """Whether a place that `jax.device_put` knows is the memory of this device."""
    if isinstance(place, jax.sharding.Sharding):
        is_own_memory = place.memory_kind in (None, device.default_memory().kind)
        return place.device_set == {device} and is_own_memory
    return place == device if isinstance(place, jax.Device) else "host" not in str(place).lower()


def _line_of_user(source: Any) -> str:
    traceback = getattr(source, "traceback", None)
    for frame in traceback.frames if traceback is not None else ():
        if is_of_user(frame.file_name):
            return f"{frame.file_name}:{frame.line_num}"
    return ""
