"""A parser for the text of HLO and StableHLO programs."""

import collections
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

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
            kind = match["kind"]
            if kind in BOOKKEEPING:
                continue
            called, fusion, name = (each.search(line) for each in (_CALLED, _FUSION, _OP_NAME))
            found.append(
                Instruction(
                    kind,
                    _unescaped(name[1]) if name else "",
                    computation,
                    fusion[1] if kind == "fusion" and fusion else None,
                    called[1] if kind == "fusion" and called else None,
                )
            )
        elif match := _COMPUTATION.match(line):
            computation = match["name"]
    return found


def _unescaped(text: str) -> str:
    """Decodes the C escapes that XLA writes in strings. Escaped bytes are decoded as UTF-8."""
    return text.encode().decode("unicode_escape").encode("latin-1").decode(errors="replace")


def kinds_of(instructions: Iterable[Instruction]) -> Kinds:
    """Number of instructions of each kind, in descending order. Fusions are not counted."""
    kinds = collections.Counter(each.kind for each in instructions if each.kind != "fusion")
    return dict(kinds.most_common())


def stablehlo_kinds(text: str) -> Kinds:
    """Number of operations of each kind in a StableHLO module, in descending order."""
    kinds = collections.Counter(_STABLEHLO.findall(text))
    return {kind: count for kind, count in kinds.most_common() if kind not in _NO_OPERATIONS}


def parameters_in(text: str) -> dict[int, str]:
    """Names of the entry computation's parameters, by parameter number."""
    entry = text.partition("\nENTRY ")[2].partition("\n}")[0]
    found = {}
    for line in entry.splitlines():
        number, name = _PARAMETER.search(line), _OP_NAME.search(line)
        if number:
            found[int(number[1])] = _unescaped(name[1]) if name else ""
    return found


def aliases_in(text: str) -> list[tuple[int, int]]:
    """Pairs (output number, parameter number). The output reuses the buffer of the parameter."""
    head = text.partition("\n")[0].partition("input_output_alias={")[2].partition(" }")[0]
    return [
        (int(output or 0), int(parameter))
        for output, parameter in _ALIAS.findall(head)
        if "," not in output
    ]
