"""Generated code that asks whether a tree has a Structure, and takes its arrays.

This file only writes it down: each type of node knows what to ask.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from ._static_guard import write_static_guard

_MAX_GUARDS = 4_000
"""After this many lines, nodes are flattened by the general walk in each call: compiling so long a
function takes longer than many such walks.
"""


class Node(Protocol):
    """A Structure, as far as a `GuardWriter` needs it."""

    num_arrays: int

    @property
    def children(self) -> tuple[Any, ...]: ...
    @property
    def has_run(self) -> bool: ...
    def write_guard(self, writer: "GuardWriter", name: str) -> Sequence[str]: ...


class GuardWriter:
    """Writes the guards of trees: lines that return `MISS` for any other tree.

    - `lines`: the lines written so far.
    - `arrays`: the source of the arrays of the trees, to stand between brackets.
    - `namespace`: the values that the lines refer to, by name.

    **Arguments:**

    - `flatten`: the general walk.
    - `arrays`: the arrays of an example, in order. The guards try their types first.
    - `miss`: the value to return for any other tree.
    - `reads_fields`: whether to read the fields of Modules that may cache their partition.
    """

    def __init__(
        self,
        flatten: Any,
        arrays: Sequence[Any] | None,
        miss: Any,
        *,
        reads_fields: bool = False,
    ):
        self.lines: list[str] = []
        self.arrays: list[str] = []
        self.namespace: dict[str, Any] = {"MISS": miss, "flatten": flatten}
        self.reads_fields = reads_fields
        self._examples = arrays
        self._num_arrays = 0
        self._num_names = 0
        self._depth = 0
        self._constants: dict[int, str] = {}

    def write(self, root: Node, name: str) -> None:
        """Writes the guards of one tree, the value of `name`."""
        # This keeps a stack of its own, so that deep trees need no deep recursion.
        nodes: list[tuple[Node, str]] = [(root, name)]
        while nodes:
            node, name = nodes.pop()
            if len(self.lines) > _MAX_GUARDS:
                self.compare_by_walk(node, name)
                continue
            names = node.write_guard(self, name)
            if node.has_run:
                self._write_run(node.children[0], names[0], len(node.children))
                continue
            nodes += zip(reversed(node.children[: len(names)]), reversed(names), strict=True)

    def _write_run(self, child: Node, sequence: str, count: int) -> None:
        """Writes the guard of `count` nodes of one Structure, in a loop."""
        arrays, element = self.name("arrays"), self.name("x")
        before, self.arrays = self.arrays, []
        num_before = self._num_arrays
        self.miss_if(f"len({sequence}) != {count}")
        self.line(f"{arrays} = []")
        with self.block(f"for {element} in {sequence}:"):
            self.write(child, element)
            if child.num_arrays:
                self.line(f"{arrays} += ({', '.join(self.arrays)},)")
        self.arrays, self._num_arrays = before, num_before
        self.take_all(arrays, count * child.num_arrays)

    def compare_by_walk(self, structure: Node, name: str) -> None:
        """Writes the guard of a value that is flattened in each call."""
        dynamic, found = self.name("dynamic"), self.name("structure")
        self.line(f"{dynamic}, {found} = flatten({name})")
        self.miss_if(f"{found} is not {self.constant(structure)}")
        self.take_all(dynamic, structure.num_arrays)

    def take(self, name: str) -> Any:
        """Takes the value `name` as the next array; returns the example's array, or `None`."""
        self.arrays.append(name)
        self._num_arrays += 1
        return None if self._examples is None else self._examples[self._num_arrays - 1]

    def take_all(self, name: str, num_arrays: int) -> None:
        """Takes the values of the sequence `name` as the next arrays."""
        if num_arrays:
            self.arrays.append(f"*{name}")
            self._num_arrays += num_arrays

    def miss_if(self, condition: str) -> None:
        self.line(f"if {condition}: return MISS")

    def miss_if_static_differs(self, name: str, value: Any, *, of_node: bool = True) -> None:
        """As `write_static_guard`."""
        write_static_guard(self, name, value, of_node=of_node)

    def unpack(self, source: str, count: int) -> list[str]:
        """Names for the `count` values of `source`; the line raises if there are more or fewer."""
        names = [self.name("x") for _ in range(count)]
        self.line(f"[{', '.join(names)}] = {source}")
        return names

    def assign(self, source: str) -> str:
        """A name for the value of `source`."""
        name = self.name("x")
        self.line(f"{name} = {source}")
        return name

    @contextlib.contextmanager
    def block(self, header: str) -> Iterator[None]:
        """Puts the lines that are written inside it below `header`."""
        self.line(header)
        self._depth += 1
        yield
        self._depth -= 1

    def line(self, source: str) -> None:
        self.lines.append("    " * self._depth + source)

    def name(self, stem: str) -> str:
        self._num_names += 1
        return f"{stem}{self._num_names}"

    def constant(self, value: Any) -> str:
        """A name for `value`."""
        name = self._constants.get(id(value))
        if name is None:
            name = self._constants[id(value)] = self.name("c")
            self.namespace[name] = value
        return name
