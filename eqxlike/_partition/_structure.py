"""Structures: trees without their arrays.

A `Structure` is interned: while it lives, an equal one is the same object, so that on a warm
call "is it the same structure?" is one comparison of identities. It consists of the Structures of
its children, down to arrays and static leaves. The types of node are in `_node_types`.
"""

import threading
import types
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from .._codegen import SourceWriter, compile_function
from .._module import CachedPartition, LazyPartition, set_cached, stored_fields
from ._guard import GuardWriter
from ._static_key import StaticKey

MIN_RUN = 16
"""Fewer adjacent nodes are handled one by one: code without a loop is faster then."""


class Structure:
    """The base of the types of node. `intern` and its kin make instances; identity compares them.

    - `node_type`: the type of the node.
    - `meta`: everything else needed to rebuild the node; the value, for a static leaf.
    - `static`: the key of everything static in the node itself.
    - `children`: the Structures of the children; or one `Row`, for many leaves.
    - `num_arrays`: the number of arrays in the subtree.
    - `is_cacheable`: whether nothing inside can change while somebody holds the arrays:
      no list, no dict, no foreign node, no mutable static value.
    - `is_exact`: whether two trees of this Structure with the same arrays are interchangeable, even
      in what their equality ignores.
    - `anchor`: a function inside that was defined in another one, and may be short-lived.
    - `generated`: functions generated for this Structure, on first use.
    """

    __slots__ = (
        "__weakref__",
        "anchor",
        "children",
        "generated",
        "is_cacheable",
        "is_exact",
        "meta",
        "node_type",
        "num_arrays",
        "static",
    )

    is_immutable: bool = True
    """Whether nodes of this type are immutable themselves."""

    takes_sequence: bool = False
    """Whether the children of a node of this type may be taken as one sequence."""

    is_leaf: bool = False
    is_row: bool = False

    def __init__(
        self, node_type: type, meta: Any, static: StaticKey, children: tuple["Structure", ...]
    ):
        self.node_type = node_type
        self.meta = meta
        self.static = static
        self.children = children
        self.num_arrays = sum(child.num_arrays for child in children)
        are_cacheable = all(child.is_cacheable for child in children)
        self.is_cacheable = self.is_immutable and static.is_immutable and are_cacheable
        self.is_exact = static.is_exact and all(child.is_exact for child in children)
        own = (each for each in static.held if _is_short_lived(each))
        inner = (child.anchor for child in children if child.anchor is not None)
        self.anchor: types.FunctionType | None = next(own, None) or next(inner, None)
        self.generated: dict[Hashable, Any] = {}

    @property
    def has_row(self) -> bool:
        """Whether the children are the leaves of one `Row`."""
        return len(self.children) == 1 and self.children[0].is_row

    @property
    def has_run(self) -> bool:
        """Whether the children are many nodes of one Structure, for which a loop is written."""
        return (
            self.takes_sequence
            and len(self.children) >= MIN_RUN
            and not self.children[0].is_leaf
            and self.children.count(self.children[0]) == len(self.children)
        )

    @property
    def has_sequence(self) -> bool:
        """Whether the children are taken as one sequence."""
        return self.has_row or self.has_run

    @property
    def is_cacheable_module(self) -> bool:
        return False

    @property
    def can_stay_lazy(self) -> bool:
        """Whether a Module of this Structure may be built without its fields."""
        return False

    def is_current(self) -> bool:
        """Whether the static objects that it was made from are unchanged."""
        if self.is_exact:
            return True
        return self.static.is_current() and all(child.is_current() for child in self.children)

    def rebuilder(self, *, cache: bool) -> Callable[[tuple[Any, ...]], Any]:
        """The function from a tuple of `num_arrays` arrays to a tree of this Structure.

        **Arguments:**

        - `cache`: whether the outermost Modules built cache their partition, and stay lazy if they
          can. The arrays must be concrete then: a tracer must not be cached.
        """
        rebuild = self.generated.get(cache)
        if rebuild is None:
            rebuild = self.generated[cache] = RebuildWriter(cache).write(self)
        return rebuild

    def write_build(self, writer: "RebuildWriter", parts: list[str]) -> str:
        """Writes how to build a node of this type, and returns its expression.

        **Arguments:**

        - `parts`: the expressions of the children; or one for the sequence of all.
        """
        raise NotImplementedError

    def write_guard(self, writer: GuardWriter, name: str) -> Sequence[str]:
        """Writes the guard that checks whether `name` is such a node, apart from its children.

        **Returns:** the names of the children; or one for the sequence of all.
        """
        raise NotImplementedError


def _is_short_lived(value: Any) -> bool:
    if not isinstance(value, types.FunctionType):
        return False
    return "<locals>" in value.__qualname__ or value.__name__ == "<lambda>"


class Opened(NamedTuple):
    """A node flattened one level, which needs only the Structures of its children to be interned.

    - `structure_type`: the subclass of `Structure`.
    - `make_meta`: a function that makes the `meta` of a new Structure.
    - `static`: the static part of the node itself, which distinguishes it.
    - `children`: the children, which are flattened next.
    - `name_child`: a function from the index of a child to its name in a path.
    """

    structure_type: type[Structure]
    make_meta: Callable[[], Any]
    static: Any
    children: Sequence[Any]
    name_child: Callable[[int], str]


NOTHING = StaticKey(None)
"""The key of a node without static parts."""


def no_meta() -> None:
    """The meta of a node that needs none."""


# --- The table of Structures ---


class _Interned(weakref.ref[Structure]):
    """A Structure in the table. As a key it is equal to that of the Structure, and to no other."""

    __slots__ = ("hash", "key")

    key: Hashable
    hash: int

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        return other is self.key


def _forget(interned: _Interned) -> None:
    # Garbage collection calls this anywhere. A `WeakValueDictionary` would call the `__eq__` of
    # users' objects here. If that calls JAX while jaxlib 0.10.2 takes a traceback (Python 3.11),
    # jaxlib releases code objects twice, and the process crashes later.
    _table.pop(interned, None)


def _find(key: Hashable) -> Structure | None:
    interned = _table.get(key)
    return None if interned is None else interned()


_table: dict[Hashable, _Interned] = {}
# Garbage collection may run code that takes the lock again in the thread that holds it.
_lock = threading.RLock()


def intern(
    structure_type: type[Structure],
    node_type: type,
    make_meta: Callable[[], Any],
    static: StaticKey,
    children: tuple[Structure, ...],
) -> Structure:
    """The unique Structure with these parts; `static` determines its meta."""
    # The key has the `id`s of the class and the children, which the Structure itself keeps alive. A
    # key that held them could keep the Structure alive, through a closure with a compiled function.
    key = (structure_type, id(node_type), static.key, tuple(map(id, children)))
    found = _find(key)
    if found is None or not found.static.is_current():
        made = structure_type(node_type, make_meta(), static, children)
        with _lock:
            found = _find(key)
            # A Structure whose meta has changed in place is replaced.
            if found is None or not found.static.is_current():
                # A dict keeps its existing key, and the entry must have this very one.
                _table.pop(key, None)
                entry = _Interned(made, _forget)
                entry.key, entry.hash = key, hash(key)
                _table[key], found = entry, made
    return found


Parts = tuple[type[Structure], type, Callable[[], Any], StaticKey, tuple[Structure, ...]]
"""The arguments of `intern`."""

Intern = Callable[[*Parts], Structure]


def make_private(*parts: *Parts) -> Structure:
    """A new Structure with these very objects in it, or the interned one if that is exact."""
    structure_type, node_type, make_meta, static, children = parts
    if static.is_exact and all(child.is_exact for child in children):
        return intern(*parts)
    made = structure_type(node_type, make_meta(), static, children)
    made.is_cacheable = False
    return made


def make_output(*parts: *Parts) -> Structure:
    """The Structure of a node of an output: its objects are not replaced by equal ones."""
    *_, static, _ = parts
    return intern(*parts) if static.is_exact else make_private(*parts)


def num_interned() -> int:
    """The number of Structures alive."""
    return len(_table)


# --- Generated code that builds a tree of one Structure ---


class RebuildWriter(SourceWriter):
    """Writes the function that builds a tree from its arrays, a line for each node, children first.

    `treedef.unflatten` would call a Python function for each Module.

    - `cache`: whether the outermost Modules built cache their partition.
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

    def write(self, root: Structure) -> Callable[[tuple[Any, ...]], Any]:
        # An explicit stack: deep trees need no deep recursion. A frame is
        # (structure, expressions of the children so far, first array, is inside a cached Module).
        frames: list[tuple[Structure, list[str], int, bool]] = [(root, [], 0, False)]
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
                # A slice of a whole tuple is that tuple: no copy if there is one Module.
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

    def _compile(self, root: Structure, expression: str) -> Callable[[tuple[Any, ...]], Any]:
        lines = [*self.lines, f"return {expression}"]
        source = ["def rebuild(arrays):", *(f"    {line}" for line in lines)]
        return compile_function(source, self.namespace, f"rebuild {root.node_type.__name__}")

    def array(self) -> str:
        """The expression for the next array."""
        self.num_arrays += 1
        return f"arrays[{self.num_arrays - 1}]"

    def arrays(self, count: int) -> str:
        """The expression for a tuple of the next arrays."""
        self.num_arrays += count
        return f"arrays[{self.num_arrays - count}:{self.num_arrays}]"
