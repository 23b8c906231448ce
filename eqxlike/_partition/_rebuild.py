"""Generated code that builds a tree of one Structure from its arrays.

`treedef.unflatten` would call a Python function for each Module.
"""

from collections.abc import Callable
from typing import Any, Protocol

from .._codegen import compile_function
from .._module import CachedPartition, LazyPartition, set_cached, stored_fields


class Node(Protocol):
    """A Structure, as far as a `RebuildWriter` needs it."""

    node_type: type
    num_arrays: int

    @property
    def children(self) -> tuple[Any, ...]: ...
    @property
    def has_run(self) -> bool: ...
    def rebuilder(self, *, cache: bool) -> Callable[[tuple[Any, ...]], Any]: ...
    @property
    def is_cacheable_module(self) -> bool: ...
    @property
    def can_stay_lazy(self) -> bool: ...
    def write_build(self, writer: "RebuildWriter", parts: list[str]) -> str: ...


class RebuildWriter:
    """Writes the function that builds a tree: one line for each node, children before parents.

    - `cache`: whether the outermost Modules built cache their partition.
    """

    def __init__(self, cache: bool):
        self.cache = cache
        self.lines: list[str] = []
        self.namespace: dict[str, Any] = {
            "CachedPartition": CachedPartition,
            "LazyPartition": LazyPartition,
            "new": object.__new__,
            "new_tuple": tuple.__new__,
            "set_cached": set_cached,
            "stored_fields": stored_fields,
        }
        self.constants: dict[int, str] = {}
        self.num_arrays = 0
        self.num_nodes = 0

    def write(self, root: Node) -> Callable[[tuple[Any, ...]], Any]:
        # This keeps a stack of its own, so that deep trees need no deep recursion. A frame is
        # (structure, expressions of the children so far, first array, is inside a cached Module).
        frames: list[tuple[Node, list[str], int, bool]] = [(root, [], 0, False)]
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
                # The slice of a whole tuple is that tuple: no copy where there is one Module.
                made = "LazyPartition" if structure.can_stay_lazy else "CachedPartition"
                taken = f"arrays[{first_array}:{self.num_arrays}]"
                partition = f"{made}({taken}, {self.constant(structure)})"
                self.line(f"set_cached({expression}, {partition})")
            frames.pop()
            if not frames:
                return self._compile(root, expression)
            frames[-1][1].append(expression)

    def _run(self, nodes: tuple[Any, ...], cache: bool) -> str:
        """The expression for a list of nodes of one Structure."""
        count, each = len(nodes), nodes[0].num_arrays
        build = self.constant(nodes[0].rebuilder(cache=cache))
        if not each:
            return self.assign(f"[{build}(()) for _ in range({count})]")
        start = self.num_arrays
        self.num_arrays += count * each
        places = f"range({start}, {self.num_arrays}, {each})"
        return self.assign(f"[{build}(arrays[i : i + {each}]) for i in {places}]")

    def _compile(self, root: Node, expression: str) -> Callable[[tuple[Any, ...]], Any]:
        lines = ["def rebuild(arrays):", *self.lines, f"    return {expression}"]
        return compile_function(lines, self.namespace, f"rebuild {root.node_type.__name__}")

    def array(self) -> str:
        """The expression for the next array."""
        self.num_arrays += 1
        return f"arrays[{self.num_arrays - 1}]"

    def arrays(self, count: int) -> str:
        """The expression for a tuple of the next arrays."""
        self.num_arrays += count
        return f"arrays[{self.num_arrays - count}:{self.num_arrays}]"

    def assign(self, expression: str) -> str:
        """A name for the value of `expression`."""
        name = f"v{self.num_nodes}"
        self.num_nodes += 1
        self.line(f"{name} = {expression}")
        return name

    def line(self, source: str) -> None:
        self.lines.append(f"    {source}")

    def constant(self, value: Any) -> str:
        """A name for `value`."""
        if value is None or value is True or value is False:
            return repr(value)
        name = self.constants.get(id(value))
        if name is None:
            name = self.constants[id(value)] = f"c{len(self.constants)}"
            self.namespace[name] = value
        return name


def tuple_of(parts: list[str]) -> str:
    """The source of a tuple of these expressions."""
    return "(" + "".join(f"{part}, " for part in parts) + ")"
