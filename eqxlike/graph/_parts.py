"""The parts of a report, as data."""

import dataclasses
from collections.abc import Mapping

Kinds = Mapping[str, int]
"""How many operations there are of each kind, most first."""


@dataclasses.dataclass(frozen=True)
class Row:
    """What belongs to one layer, or is of one kind. What lies inside a layer counts for it too.

    - `name`: the path of the layer, `""` for the whole program; or the kind.
    - `operations`: how many stand in the traced program.
    - `runs`: how often they are run, with all turns of each `scan`.
    - `flops`, `transcendentals`: of all runs.
    - `num_bytes`: read and written by all runs, if each were run by itself.
    - `is_least`: whether it is more, by an amount that only a run tells: the turns of a
      `while_loop`, and operations whose cost nobody knows.
    - `compiled`: the instructions left after XLA; `None` for a kind.
    """

    name: str
    operations: int
    runs: int
    flops: int
    transcendentals: int
    num_bytes: int
    is_least: bool
    compiled: int | None = None


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What XLA was given, and what it made of it.

    - `stablehlo`: the operations that it was given, by kind.
    - `before`: the same in its own language, before it optimises.
    - `after`: those that were left, with those inside fusions.
    - `fusions`: how many fusions of each kind there are.
    - `fused`: how many of the instructions left stand in one.
    """

    stablehlo: Kinds
    before: Kinds
    after: Kinds
    fusions: Kinds
    fused: int

    @property
    def changes(self) -> tuple[tuple[str, int, int], ...]:
        """The kinds with their numbers before and after."""
        kinds = dict.fromkeys([*self.before, *self.after])
        return tuple((kind, self.before.get(kind, 0), self.after.get(kind, 0)) for kind in kinds)


@dataclasses.dataclass(frozen=True)
class Memory:
    """The bytes that a run takes, as XLA plans them.

    - `arguments`, `outputs`: of these arrays.
    - `aliased`: of outputs that lie in the buffers of arguments.
    - `temporaries`: of what lies between.
    - `peak`: of all of these at once.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    peak: int


@dataclasses.dataclass(frozen=True)
class Constant:
    """An array that is part of the program.

    - `type`: its dtype and shape.
    - `layer`, `source`: the layer and the line that first read it.
    """

    type: str
    num_bytes: int
    layer: str
    source: str


@dataclasses.dataclass(frozen=True)
class Effect:
    """An operation that leaves the device: a callback to the host, or a copy between devices.

    - `kind`: the name of JAX's primitive, as `pure_callback`; `check` is that of `error_if`.
    - `times`: how often it is run.
    - `source`: the line that asked for it.
    """

    kind: str
    layer: str
    times: int
    source: str


@dataclasses.dataclass(frozen=True)
class Stored:
    """An array that the way there keeps for the way back.

    - `kind`: the operation that computes it.
    """

    layer: str
    kind: str
    type: str
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class Side:
    """One layer of a function, and of its gradient. What lies inside a layer counts for it too.

    - `name`: the path of the layer, `""` for the whole program.
    - `operations`, `flops`: of the function.
    - `gradient_operations`, `gradient_flops`: of the program that computes its value and gradient.
    - `backward_flops`: the part of them on the way back.
    - `stored_bytes`: of what the way there keeps for the way back. Arguments, which are there
      anyway, do not count.
    """

    name: str
    operations: int
    flops: int
    gradient_operations: int
    gradient_flops: int
    backward_flops: int
    stored_bytes: int
