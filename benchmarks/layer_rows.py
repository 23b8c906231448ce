"""The rows of the layer benchmark, the tables that they stand in, and what holds in each row.

A row is a `Case`, as in `benchmarks.cases`, with the table that it belongs to and with a check of
its own: what a model draws is a library's choice, what it computes is not.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from benchmarks.cases import Case, check_agreement
from benchmarks.layer_timing import Prepare
from eqxlike._timing import Call


@dataclasses.dataclass(frozen=True)
class Table:
    """What some rows measure alike.

    Attributes:
        title: what is done in one call.
        clocks: which of "completion" and "dispatch" to print.
        is_first_call: whether each call is of a new function; the builders of a row's columns then
            make a `Prepare`.
        unit: of the times, one of `benchmarks.table.UNITS_US`.
    """

    title: str
    clocks: tuple[str, ...] = ("completion",)
    is_first_call: bool = False
    unit: str = "milliseconds"


@dataclasses.dataclass(frozen=True)
class Row:
    """One piece of work in all columns.

    Attributes:
        table: where it stands.
        case: its name, its columns and the baseline.
        check: raises AssertionError unless the columns do the same; takes what they built.
        count_lines: returns the lines of each column's lowered program, where that is of interest.
    """

    table: Table
    case: Case
    check: Callable[[Mapping[str, Call]], None]
    count_lines: Callable[[], dict[str, int]] | None = None

    @property
    def name(self) -> str:
        """The name to select the row by: of the table, then of the case."""
        return f"{self.table.title}; {self.case.name}"


def count_parameters(tree: Any) -> int:
    """Return the number of parameters of a model of any library."""
    leaves = jax.tree_util.tree_leaves(tree)
    return sum(leaf.size for leaf in leaves if isinstance(leaf, jax.Array))


def check_sizes(calls: Mapping[str, Call]) -> None:
    """Raise unless all columns build models of as many parameters.

    Raises:
        AssertionError: says how many there are in each column.
    """
    sizes = {column: count_parameters(call()) for column, call in calls.items()}
    if len(set(sizes.values())) > 1:
        raise AssertionError(f"the models differ in their numbers of parameters: {sizes}")


def check_first_calls(preparations: Mapping[str, Prepare]) -> None:
    """Raise unless the first calls of all columns return the same numbers."""
    check_agreement({column: prepare() for column, prepare in preparations.items()}, times=1)
