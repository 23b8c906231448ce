"""Sums over the operations of a program, by layer and by kind, as traced and as compiled."""

import collections
import dataclasses
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ._operations import Operation, Origin, PlacedOperation, Program, path_of, scopes_in, source_of

# --- The text of HLO and StableHLO programs ---


_INSTRUCTION = re.compile(
    r"^\s+(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>\(.*?\)|\S+) (?P<kind>[a-z][\w\-]*)\("
)
_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) (?:\(.*\) -> .*)?\{")
_CALLED = re.compile(r"\bcalls=%?([\w.\-]+)")
_FUSION = re.compile(r"\bkind=(\w+)")
_OP_NAME = re.compile(r'\bop_name="((?:[^"\\]|\\.)*)"')
_PARAMETER = re.compile(r" parameter\((\d+)\)")
_ALIAS = re.compile(r"\{([\d, ]*)\}: \((\d+), \{[\d, ]*\}")
_STABLEHLO = re.compile(r'(?:= |^\s+)"?(?:stablehlo|chlo)\.(\w+)', re.MULTILINE)

BOOKKEEPING = frozenset(
    {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "call", "after-all"}
)
"""Kinds of HLO instructions that compute nothing."""

_NO_OPERATIONS = frozenset({"constant", "return"})

Kinds = Mapping[str, int]
"""Number of operations of each kind, in descending order."""


class Instruction(NamedTuple):
    """One HLO instruction.

    - `kind`: name of the HLO operation.
    - `op_name`: JAX's name stack for the operation.
    - `computation`: the computation that contains the instruction.
    - `fusion`: the kind of a fusion, such as `kLoop`; `None` for other instructions.
    - `calls`: the computation that a fusion runs; `None` for other instructions.
    """

    kind: str
    op_name: str
    computation: str
    fusion: str | None
    calls: str | None


def instructions_in(text: str) -> list[Instruction]:
    """The instructions of an HLO program, except instructions of the kinds in `BOOKKEEPING`."""
    found = []
    computation = ""
    for line in text.splitlines():
        if match := _INSTRUCTION.match(line):
            if (kind := match["kind"]) in BOOKKEEPING:
                continue
            texts = (each.search(line) if kind == "fusion" else None for each in (_FUSION, _CALLED))
            fusion, calls = (text and text[1] for text in texts)
            found.append(Instruction(kind, _op_name_in(line), computation, fusion, calls))
        elif match := _COMPUTATION.match(line):
            computation = match["name"]
    return found


def _op_name_in(line: str) -> str:
    """JAX's name stack in an instruction, `""` if there is none.

    XLA writes strings with C escapes, in which escaped bytes are UTF-8.
    """
    if (found := _OP_NAME.search(line)) is None:
        return ""
    return found[1].encode().decode("unicode_escape").encode("latin-1").decode(errors="replace")


def kinds_of(instructions: Iterable[Instruction]) -> Kinds:
    """Number of instructions of each kind, in descending order. Fusions are not counted."""
    kinds = collections.Counter(each.kind for each in instructions if each.kind != "fusion")
    return dict(kinds.most_common())


def stablehlo_kinds(text: str) -> Kinds:
    """Number of operations of each kind in a StableHLO module, in descending order."""
    kinds = collections.Counter(_STABLEHLO.findall(text))
    return {kind: count for kind, count in kinds.most_common() if kind not in _NO_OPERATIONS}


def aliases_in(text: str) -> Iterator[tuple[int, str]]:
    """Pairs (output number, name of a parameter). The output reuses the buffer of the parameter."""
    names: dict[str, str] = {}
    for line in text.partition("\nENTRY ")[2].partition("\n}")[0].splitlines():
        if number := _PARAMETER.search(line):
            names[number[1]] = _op_name_in(line)
    head = text.partition("\n")[0].partition("input_output_alias={")[2].partition(" }")[0]
    for output, number in _ALIAS.findall(head):
        if "," not in output:
            yield int(output or 0), names.get(number) or f"parameter {number}"


# --- Rows of the traced program ---


@dataclasses.dataclass(frozen=True)
class Row:
    """Sums over the operations of one kind, or of one layer including its inner layers.

    - `name`: path of the layer, or name of the kind; `""` for the whole program.
    - `operations`: number of operations in the traced program.
    - `runs`: number of executions; each iteration of a `scan` counts.
    - `flops`, `transcendentals`: cost of all executions.
    - `num_bytes`: bytes that all executions would read and write if XLA fused no operations.
    - `is_least`: whether the costs are lower bounds. They are lower bounds if there is an operation
      of unknown cost, or a `while_loop`, whose body counts only once.
    - `compiled`: number of instructions after XLA's optimisations; `None` in a row for a kind.
    """

    name: str
    operations: int
    runs: int
    flops: int
    transcendentals: int
    num_bytes: int
    is_least: bool
    compiled: int | None = None


def rows_by_layer(program: Program, instructions: Sequence[Instruction]) -> tuple[Row, ...]:
    """A row for the whole program, then a row for each layer, in the order of first calls."""
    groups = steps_by_layer(program)
    compiled = _instructions_by_layer(program, instructions)
    return tuple(_row(name, steps, compiled[name]) for name, steps in groups.items())


def rows_by_kind(program: Program) -> tuple[Row, ...]:
    """A row for each kind of operation, in descending order of FLOPs plus transcendentals."""
    groups: dict[str, list[PlacedOperation]] = {}
    for step in program.steps:
        groups.setdefault(step.operation.kind, []).append(step)
    rows = [_row(name, steps) for name, steps in groups.items()]
    return tuple(sorted(rows, key=lambda row: (-row.flops - row.transcendentals, -row.num_bytes)))


def steps_by_layer(program: Program) -> dict[str, list[PlacedOperation]]:
    """Maps the path of each layer to its operations, including the operations of inner layers."""
    groups: dict[str, list[PlacedOperation]] = {"": []}
    for step in program.steps:
        for path in paths_around(step.scopes):
            groups.setdefault(path, []).append(step)
    # The layers are in the order of their first calls, with outer layers before inner layers.
    return groups


def paths_around(scopes: tuple[str, ...]) -> list[str]:
    """Paths of a layer and of the layers around it, outermost first."""
    return list(dict.fromkeys(path_of(scopes[:depth]) for depth in range(len(scopes) + 1)))


def _row(name: str, steps: Sequence[PlacedOperation], compiled: int | None = None) -> Row:
    operations = [step.operation for step in steps]

    def total(number: Callable[[Operation], int | None]) -> int:
        return sum(each.times * (number(each) or 0) for each in operations)

    return Row(
        name=name,
        operations=len(operations),
        runs=sum(each.times for each in operations),
        flops=total(lambda each: each.flops),
        transcendentals=total(lambda each: each.transcendentals),
        num_bytes=total(lambda each: each.num_bytes),
        is_least=any(each.is_in_while or each.flops is None for each in operations),
        compiled=compiled,
    )


def _instructions_by_layer(
    program: Program, instructions: Iterable[Instruction]
) -> collections.Counter[str]:
    known = {scope for step in program.steps for scope in step.scopes}
    found: collections.Counter[str] = collections.Counter()
    for each in instructions:
        # The last name in the stack is the operation, not a scope.
        stack = each.op_name.rpartition("/")[0]
        scopes = tuple(scope for scope in scopes_in(stack) if scope in known)
        found.update(paths_around(scopes))
    return found


@dataclasses.dataclass(frozen=True)
class Stored:
    """An array that the forward pass stores for the backward pass.

    - `layer`: path of the layer that computes the array.
    - `kind`: name of the JAX primitive that computes the array.
    - `type`: dtype and shape.
    """

    layer: str
    kind: str
    type: str
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class Side:
    """Costs of one layer, including its inner layers, in a function and in its gradient.

    - `name`: path of the layer, `""` for the whole program.
    - `operations`, `flops`: costs of the function.
    - `gradient_operations`, `gradient_flops`: costs of computing the value and the gradient.
    - `backward_flops`: FLOPs of the backward pass. `gradient_flops` includes them.
    - `stored_bytes`: bytes that the forward pass stores for the backward pass. Arguments do not
      count, because they exist anyway.
    """

    name: str
    operations: int
    flops: int
    gradient_operations: int
    gradient_flops: int
    backward_flops: int
    stored_bytes: int


def stored_in(program: Program, outputs: Sequence[tuple[str, int]]) -> tuple[Stored, ...]:
    """The arrays that a program returns for the backward pass.

    An array that is returned twice is listed once. Arguments and constants are not listed.

    **Arguments:**

    - `program`: the forward pass, whose outputs are the arrays for the backward pass.
    - `outputs`: for each output, its type and its size in bytes.
    """
    found: dict[Origin, Stored] = {}
    for origin, (type_, num_bytes) in zip(program.outputs, outputs, strict=True):
        source = source_of(origin)
        # A loop stacks the values of its iterations in a new array, even if each value is an
        # argument of the program. So the loop is the operation that makes the array.
        maker = origin[1] if origin[0] == "passed" else None
        if source is not None:
            maker = program.steps[source].operation
        if maker is not None:
            found.setdefault(origin, Stored(maker.layer, maker.kind, type_, num_bytes))
    return tuple(found.values())


def sides(function: Program, gradient: Program, stored: Iterable[Stored]) -> tuple[Side, ...]:
    """Compares a function and its gradient, layer by layer."""
    there, back = steps_by_layer(function), steps_by_layer(gradient)
    scopes = {step.operation.layer: step.scopes for step in (*function.steps, *gradient.steps)}
    num_bytes: collections.Counter[str] = collections.Counter()
    for each in stored:
        for path in paths_around(scopes.get(each.layer, (each.layer,) if each.layer else ())):
            num_bytes[path] += each.num_bytes
    found = []
    for name in dict.fromkeys([*there, *back]):
        gradient_steps = back.get(name, [])
        own, whole = _row(name, there.get(name, [])), _row(name, gradient_steps)
        backward = _row(name, [step for step in gradient_steps if step.operation.is_backward])
        numbers = own.operations, own.flops, whole.operations, whole.flops, backward.flops
        found.append(Side(name, *numbers, num_bytes[name]))
    return tuple(found)


# --- Redundant operations ---


class Redundant(NamedTuple):
    """Number of operations in the traced program that a compiler can remove, by reason.

    - `unused`: operations on which no output or side effect depends.
    - `common`: operations that repeat an earlier operation on the same inputs.
    - `constant`: operations whose inputs are all constants.
    """

    unused: int
    common: int
    constant: int


def redundant_in(program: Program) -> Redundant:
    """Counts redundant operations by reason.

    An operation that is redundant for several reasons counts only once.
    """
    seen: dict[Hashable, int] = {}
    first: dict[int, int] = {}
    constant: set[int] = set()

    def known_as(origin: Origin) -> Origin:
        kind, where = origin
        return (kind, (first[where[0]], where[1])) if kind == "operation" else origin

    for index, step in enumerate(program.steps):
        first[index] = index
        if not step.is_needed or step.has_effect:
            continue
        inputs = tuple(map(known_as, step.inputs))
        if all(
            kind in ("literal", "constant") or (kind == "operation" and where[0] in constant)
            for kind, where in inputs
        ):
            constant.add(index)
        else:
            first[index] = seen.setdefault((step.operation.kind, step.params, inputs), index)
    unused = sum(not step.is_needed for step in program.steps)
    return Redundant(unused, sum(i != j for i, j in first.items()), len(constant))
