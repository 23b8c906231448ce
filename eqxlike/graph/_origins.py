"""Where the values of a traced program come from."""

import dataclasses
from collections.abc import Iterable
from typing import Any

Origin = tuple[str, Any]
"""Where a value comes from: `("argument", i)`, `("constant", i)`, `("literal", value)`, or
`("operation", (i, j))`, the output `j` of operation `i`; `("passed", (passing, origin))`, what a
loop hands to its turns, or a loop or a choice hands out, with a place that it may come from.
"""


@dataclasses.dataclass(frozen=True, eq=False)
class Passing:
    """The passing on of one value by a loop or a choice. It equals no other.

    - `layer`: the path of the layer around.
    - `kind`: the name of JAX's primitive.
    """

    layer: str
    kind: str


def passed_on(origins: Iterable[Origin], layer: str, kind: str) -> list[Origin]:
    """The origins of values that a loop or a choice makes of these: nobody knows of which."""
    return [("passed", (Passing(layer, kind), each)) for each in origins]


def root_of(origin: Origin) -> Origin:
    """Where a value comes from that may have been passed on."""
    while origin[0] == "passed":
        origin = origin[1][1]
    return origin


def source_of(origin: Origin) -> int | None:
    """The operation that a value comes from, for one of a loop before the first turn."""
    kind, where = root_of(origin)
    return where[0] if kind == "operation" else None
