"""Generates two functions for a Structure.

The first function builds a tree with this Structure from its arrays. The second function checks if
a tree has this Structure, and takes its arrays. For each of the two functions, a class walks over
the Structure and writes the lines. To write the lines for one node, the class calls a method of the
node: `Structure.write_build` or `Structure.write_guard`.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from .._module import (
    CachedPartition,
    LazyPartition,
    set_cached,
    stored_fields,
)
from .._traceback import compile_function
from ._static_key import Container, snapshot_of


class SourceWriter:
    """Writes lines of Python source, and chooses the names of variables and constants in them.

    - `lines`: the lines written so far.
    - `namespace`: maps each name in the lines to its value, except the names of variables.
    """

    def __init__(self, namespace: dict[str, Any]):
        self.lines: list[str] = []
        self.namespace = namespace
        self._constants: dict[int, str] = {}
        self._num_names = 0
        self._depth = 0

    def line(self, source: str) -> None:
        self.lines.append("    " * self._depth + source)

    @contextlib.contextmanager
    def block(self, header: str) -> Iterator[None]:
        """Context manager: lines written inside it form an indented block below `header`."""
        self.line(header)
        self._depth += 1
        yield
        self._depth -= 1

    def name(self, stem: str) -> str:
        """Returns a new name that begins with `stem`."""
        self._num_names += 1
        return f"{stem}{self._num_names}"

    def assign(self, source: str) -> str:
        """Writes an assignment of `source` to a new variable, and returns the variable's name."""
        name = self.name("x")
        self.line(f"{name} = {source}")
        return name

    def constant(self, value: Any) -> str:
        """Returns an expression for `value`: `None`, `True`, `False`, or a name in `namespace`."""
        if value is None or value is True or value is False:
            return repr(value)
        name = self._constants.get(id(value))
        if name is None:
            name = self._constants[id(value)] = self.name("c")
            self.namespace[name] = value
        return name


# --- Building a tree ---


class RebuildWriter(SourceWriter):
    """Writes the function that builds a tree from its arrays.

    It writes a line for each node, after the lines of its children. The function is faster than
    `treedef.unflatten`, which calls a Python function for each Module.

    - `cache`: whether the outermost Modules that the function builds cache their partition.
    """

    def __init__(self, cache: bool):
        super().__init__(
            {
                "CachedPartition": CachedPartition,
                "LazyPartition": LazyPartition,
                "new": object.__new__,
                "new_tuple": tuple.__new__,
                "set_cached": set_cached,
                "stored_fields": stored_fields,
            }
        )
        self.cache = cache
        self.num_arrays = 0

    def write(self, root: Any) -> Callable[[tuple[Any, ...]], Any]:
        # An explicit stack is used, so that deep trees need no deep recursion. A frame is
        # (Structure, expressions of the children written so far, index of the first array, whether
        # the node is inside a Module that caches its partition).
        frames: list[tuple[Any, list[str], int, bool]] = [(root, [], 0, False)]
        while True:
            structure, parts, first_array, is_inside = frames[-1]
            is_cached = self.cache and structure.is_cacheable_module
            if is_cached and not is_inside and structure.can_stay_lazy:
                expression = self.assign(f"new({self.constant(structure.node_type)})")
                self.num_arrays += structure.num_arrays
            elif structure.has_run:
                run = self._run(structure.children, self.cache and not (is_inside or is_cached))
                expression = structure.write_build(self, [run])
            elif len(parts) < len(structure.children):
                child = structure.children[len(parts)]
                frames.append((child, [], self.num_arrays, is_inside or is_cached))
                continue
            else:
                expression = structure.write_build(self, parts)
            if is_cached and not is_inside:
                # If the tree is a single Module, the slice is the tuple itself, and not a copy.
                made = "LazyPartition" if structure.can_stay_lazy else "CachedPartition"
                taken = f"arrays[{first_array}:{self.num_arrays}]"
                partition = f"{made}({taken}, {self.constant(structure)})"
                self.line(f"set_cached({expression}, {partition})")
            frames.pop()
            if not frames:
                lines = [*self.lines, f"return {expression}"]
                source = ["def rebuild(arrays):", *(f"    {line}" for line in lines)]
                origin = f"rebuild {root.node_type.__name__}"
                return compile_function(source, self.namespace, origin)
            frames[-1][1].append(expression)

    def _run(self, nodes: tuple[Any, ...], cache: bool) -> str:
        """The expression for a list of adjacent nodes that all have the same Structure."""
        count, each = len(nodes), nodes[0].num_arrays
        build = self.constant(nodes[0].rebuilder(cache=cache))
        if not each:
            return self.assign(f"[{build}(()) for _ in range({count})]")
        start = self.num_arrays
        self.num_arrays += count * each
        places = f"range({start}, {self.num_arrays}, {each})"
        return self.assign(f"[{build}(arrays[i : i + {each}]) for i in {places}]")

    def arrays(self, count: int) -> str:
        """The expression for a tuple of the next `count` arrays, in tree order."""
        self.num_arrays += count
        return f"arrays[{self.num_arrays - count}:{self.num_arrays}]"


# --- Checking in a warm call if a tree has a Structure ---


_MAX_GUARDS = 4_000
"""Maximum number of lines. All further nodes are flattened by `flatten` in each call, because
compiling a longer function takes longer than many calls of `flatten`.
"""


class GuardWriter(SourceWriter):
    """Writes guards: lines that return `MISS` if a tree does not have the given Structure.

    Each node is a `Structure`. `Structure` is not imported here, since `_structure` imports this
    file.

    The attribute `arrays` has the expressions of the arrays that the guards take from the trees.
    The caller puts these expressions between brackets.

    **Arguments:**

    - `flatten`: the function `flatten`, for values that must be flattened in each call.
    - `arrays`: example arrays in tree order, or `None`. The guards try their types first.
    - `miss`: the value that the guards return for a tree with another Structure.
    - `reads_fields`: if `True`, the guards read the fields of a Module and not its cached
      partition.
    """

    def __init__(
        self, flatten: Any, arrays: Sequence[Any] | None, miss: Any, *, reads_fields: bool = False
    ):
        super().__init__({"MISS": miss, "flatten": flatten})
        self.arrays: list[str] = []
        self.reads_fields = reads_fields
        self._containers: list[Container] = []
        self._examples = arrays
        self._num_arrays = 0

    def write_all(self, roots: Sequence[Any], name: str) -> None:
        """Writes the guards of several trees.

        In the generated code, the variable called `name` is the sequence of trees.
        """
        for root, each in zip(roots, self.unpack(name, len(roots)), strict=True):
            self.write(root, each)

    def write(self, root: Any, name: str) -> None:
        """Writes the guards of one tree. The variable `name` holds the tree."""
        # An explicit stack is used, so that deep trees need no deep recursion.
        nodes: list[tuple[Any, str]] = [(root, name)]
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

    def _write_run(self, child: Any, sequence: str, count: int) -> None:
        """Writes the guard of `count` nodes that have the same Structure, as a loop."""
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

    def compare_by_walk(self, structure: Any, name: str) -> None:
        """Writes a guard that calls `flatten` for the value of `name` in each call."""
        dynamic, found = self.name("dynamic"), self.name("structure")
        self.line(f"{dynamic}, {found} = flatten({name})")
        self.miss_if(f"{found} is not {self.constant(structure.interned)}")
        self.take_all(dynamic, structure.num_arrays)

    def take(self, name: str) -> Any:
        """Takes the variable `name` as the next array.

        Returns the example array at this position, or `None` if there are no example arrays.
        """
        self.arrays.append(name)
        self._num_arrays += 1
        return None if self._examples is None else self._examples[self._num_arrays - 1]

    def take_all(self, name: str, num_arrays: int) -> None:
        """Takes the elements of the sequence in the variable `name` as the next arrays."""
        if num_arrays:
            self.arrays.append(f"*{name}")
            self._num_arrays += num_arrays

    def function(self, signature: str) -> list[str]:
        """The first lines of a function with this signature: its header and the guards."""
        lines = self.lines
        if (snapshot := snapshot_of(self._containers)) is not None:
            # One call checks all containers, since a call costs more than comparing ten objects.
            is_current = self.constant(snapshot.is_current)
            lines = [f"if not {is_current}(): return MISS", *lines]
        return [
            f"def {signature}:",
            "    try:",
            *(f"        {line}" for line in lines),
            # The guards may raise, since another value may lack an attribute or item that the
            # guards read.
            "    except Exception:",
            "        return MISS",
        ]

    def check(self, containers: Iterable[Container]) -> None:
        """Makes the function check first that these containers are unchanged."""
        self._containers += containers

    def miss_if(self, condition: str) -> None:
        self.line(f"if {condition}: return MISS")

    def unpack(self, source: str, count: int) -> list[str]:
        """Writes a line that unpacks `source` to `count` new variables, and returns their names.

        The line raises an error if `source` has more or fewer elements.
        """
        names = [self.name("x") for _ in range(count)]
        self.line(f"[{', '.join(names)}] = {source}")
        return names
