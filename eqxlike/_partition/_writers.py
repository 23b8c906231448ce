"""Generated code for the trees of one Structure: one function builds a tree from its arrays, and
one checks whether a tree has the Structure and takes its arrays.

Both are written by a walk over the Structure. Each walk is followed by the functions that it calls
to write the lines of a node. `_structure` assigns these functions to the types of node.
"""

import contextlib
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.tree_util import default_registry

from .._module import (
    CachedPartition,
    LazyPartition,
    carries_metadata,
    get_cached,
    has_metadata,
    set_cached,
    stored_fields,
)
from .._traceback import compile_function, tuple_of
from ._static_key import Container, StaticKey, plain_key, snapshot_of, write_static_guard

concrete_array_types: set[type] = {np.ndarray, jax.Ref}
"""Instances of these types are arrays and not tracers. Types are added when first seen."""


class SourceWriter:
    """Writes lines of source, with names for what they assign and for the values they refer to.

    - `lines`: the lines written so far.
    - `namespace`: the values that the lines refer to, by name.
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
        """Puts the lines written inside it below `header`."""
        self.line(header)
        self._depth += 1
        yield
        self._depth -= 1

    def name(self, stem: str) -> str:
        """A new name."""
        self._num_names += 1
        return f"{stem}{self._num_names}"

    def assign(self, source: str) -> str:
        """A name for the value of `source`."""
        name = self.name("x")
        self.line(f"{name} = {source}")
        return name

    def constant(self, value: Any) -> str:
        """An expression for `value`: a name, unless it is a constant of the language."""
        if value is None or value is True or value is False:
            return repr(value)
        name = self._constants.get(id(value))
        if name is None:
            name = self._constants[id(value)] = self.name("c")
            self.namespace[name] = value
        return name


# --- Building a tree ---


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

    def write(self, root: Any) -> Callable[[tuple[Any, ...]], Any]:
        # An explicit stack: deep trees need no deep recursion. A frame is
        # (structure, expressions of the children so far, first array, is inside a cached Module).
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

    def _compile(self, root: Any, expression: str) -> Callable[[tuple[Any, ...]], Any]:
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


# Functions that write the lines that build a node, one for each type. `parts` are the expressions
# of its children, or a single expression for the sequence of all. Each returns the expression of
# the node.


def build_array(node: Any, writer: RebuildWriter, parts: list[str]) -> str:
    return writer.array()


def build_static_leaf(node: Any, writer: RebuildWriter, parts: list[str]) -> str:
    return writer.constant(node.meta)


def build_tuple(node: Any, writer: RebuildWriter, parts: list[str]) -> str:
    return writer.assign(f"tuple({parts[0]})" if node.has_sequence else tuple_of(parts))


def build_list(node: Any, writer: RebuildWriter, parts: list[str]) -> str:
    return writer.assign(f"[*{parts[0]}]" if node.has_sequence else f"[{', '.join(parts)}]")


def build_named_tuple(node: Any, writer: RebuildWriter, parts: list[str]) -> str:
    cls = writer.constant(node.node_type)
    if _is_built_as_generated(node.node_type):
        return writer.assign(f"new_tuple({cls}, {tuple_of(parts)})")
    return writer.assign(f"{cls}({', '.join(parts)})")


def _is_built_as_generated(cls: Any) -> bool:
    """Whether a call of the class, as JAX makes it, only creates the tuple."""
    new, init = cls.__new__, cls.__init__
    module = getattr(new, "__module__", "")
    is_generated = any(module == f"namedtuple_{base.__name__}" for base in cls.__mro__)
    return is_generated and init is object.__init__


def build_dict(node: Any, writer: RebuildWriter, parts: list[str]) -> str:
    keys = node.meta.keys
    if node.has_sequence:
        return writer.assign(f"dict(zip({writer.constant(keys)}, {parts[0]}))")
    items = (f"{writer.constant(key)}: {part}" for key, part in zip(keys, parts, strict=True))
    return writer.assign(f"{{{', '.join(items)}}}")


def build_module(node: Any, writer: RebuildWriter, parts: list[str]) -> str:
    record = node.node_type._eqxlike_class
    if node.is_incomplete:
        unflatten, statics = writer.constant(record.codec.unflatten), writer.constant(node.meta)
        return writer.assign(f"{unflatten}({statics}, {tuple_of(parts)})")
    module = writer.assign(f"new({writer.constant(node.node_type)})")
    layout = record.codec.layout
    names = (*layout.dynamic_names, *layout.static_names)
    values = (*parts, *map(writer.constant, node.meta))
    if names:
        writer.line(f"fields = stored_fields({module})")
    for name, value in zip(names, values, strict=True):
        writer.line(f"fields[{name!r}] = {value}")
    if record.traits.complete is not None:
        writer.line(f"{writer.constant(record.traits.complete)}(fields)")
    return module


def build_foreign(node: Any, writer: RebuildWriter, parts: list[str]) -> str:
    children = parts[0] if node.has_sequence else tuple_of(parts)
    return writer.assign(f"{writer.constant(node.meta.treedef.unflatten)}({children})")


def build_row(node: Any, writer: RebuildWriter, parts: list[str]) -> str:
    if not node.meta.array_places:
        return writer.constant(node.meta.leaves)
    arrays = writer.arrays(node.num_arrays)
    if not node.meta.static_places:
        return arrays
    return writer.assign(f"{writer.constant(_merger(node.meta))}({arrays})")


def _merger(meta: Any) -> Callable[[Sequence[Any]], list[Any]]:
    def merge(arrays: Sequence[Any]) -> list[Any]:
        leaves = [*meta.leaves]
        for place, array in zip(meta.array_places, arrays, strict=True):
            leaves[place] = array
        return leaves

    return merge


# --- Checking whether a tree has a Structure, in a warm call ---


_MAX_GUARDS = 4_000
"""After this many lines, further nodes are flattened by the general walk in each call: compiling a
longer function would take longer than many such walks.
"""


class GuardWriter(SourceWriter):
    """Writes the guards of trees: lines that return `MISS` for any other tree.

    - `arrays`: the expressions of the arrays of the trees, to be put between brackets.

    Each node is a `Structure`, which is defined in a file above this one.

    **Arguments:**

    - `flatten`: the general walk.
    - `arrays`: the arrays of an example, in order. The guards try the types of these arrays first.
    - `miss`: the value to return for other trees.
    - `reads_fields`: whether to read the fields of Modules that may cache their partition.
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
        """Writes the guards of the trees in a sequence, the value of `name`."""
        for root, each in zip(roots, self.unpack(name, len(roots)), strict=True):
            self.write(root, each)

    def write(self, root: Any, name: str) -> None:
        """Writes the guards of one tree, the value of `name`."""
        # An explicit stack: deep trees need no deep recursion.
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

    def compare_by_walk(self, structure: Any, name: str) -> None:
        """Writes the guard of a value that is flattened in each call."""
        dynamic, found = self.name("dynamic"), self.name("structure")
        self.line(f"{dynamic}, {found} = flatten({name})")
        self.miss_if(f"{found} is not {self.constant(structure.interned)}")
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

    def function(self, signature: str) -> list[str]:
        """The lines of a function that begins with the guards."""
        lines = self.lines
        if (snapshot := snapshot_of(self._containers)) is not None:
            # A single call for all containers: a call costs more than comparing ten more objects.
            is_current = self.constant(snapshot.is_current)
            lines = [f"if not {is_current}(): return MISS", *lines]
        return [
            f"def {signature}:",
            "    try:",
            *(f"        {line}" for line in lines),
            # A value of another type may lack an attribute or item that the guards read.
            "    except Exception:",
            "        return MISS",
        ]

    def check(self, containers: Iterable[Container]) -> None:
        """Checks, before everything else, that these containers are unchanged."""
        self._containers += containers

    def miss_if(self, condition: str) -> None:
        self.line(f"if {condition}: return MISS")

    def unpack(self, source: str, count: int) -> list[str]:
        """Names for the `count` values of `source`; the line raises if there are more or fewer."""
        names = [self.name("x") for _ in range(count)]
        self.line(f"[{', '.join(names)}] = {source}")
        return names


# Functions that write the lines that check whether the value `name` is a node of a type, apart from
# its children. Each returns the names of the children, or a single name for the sequence of all.


def guard_array(node: Any, writer: GuardWriter, name: str) -> Sequence[str]:
    example, known = writer.take(name), writer.constant(concrete_array_types)
    unknown = f"type({name}) not in {known}"
    if example is not None:
        unknown = f"type({name}) is not {writer.constant(type(example))} and {unknown}"
    writer.miss_if(unknown)
    return ()


def guard_static_leaf(node: Any, writer: GuardWriter, name: str) -> Sequence[str]:
    write_static_guard(writer, name, node.meta, of_node=False)
    return ()


def guard_sequence(node: Any, writer: GuardWriter, name: str) -> Sequence[str]:
    """For a plain tuple or list."""
    writer.miss_if(f"type({name}) is not {writer.constant(node.node_type)}")
    if node.has_sequence:
        return [name]
    return writer.unpack(name, len(node.children))


as_tuple = tuple.__getitem__
"""With a slice, it returns the children as JAX sees them, even if `__iter__` is overridden."""


def guard_named_tuple(node: Any, writer: GuardWriter, name: str) -> Sequence[str]:
    writer.miss_if(f"type({name}) is not {writer.constant(node.node_type)}")
    if node.node_type.__iter__ is not tuple.__iter__:
        name = f"{writer.constant(as_tuple)}({name}, {writer.constant(slice(None))})"
    return writer.unpack(name, len(node.children))


def guard_dict(node: Any, writer: GuardWriter, name: str) -> Sequence[str]:
    writer.miss_if(f"type({name}) is not dict")
    keys = node.meta.keys
    if all(type(key) is str for key in keys):
        # A missing key raises when its value is taken.
        differ = f"{{*map(type, {name})}} != {writer.constant({str})}"
    else:
        key = writer.constant(node.static.key)
        differ = f"not {writer.constant(_have_key)}({name}, {key})"
    if node.has_sequence:
        writer.miss_if(f"len({name}) != {len(keys)} or {differ}")
        return [writer.assign(f"{writer.constant(operator.itemgetter(*keys))}({name})")]
    found = writer.unpack(name, len(keys))
    if keys:
        # Usually the keys are the same objects as in the first dict, in the same order.
        pairs = zip(found, map(writer.constant, node.meta.as_inserted), strict=True)
        writer.miss_if(f"({' or '.join(f'{x} is not {c}' for x, c in pairs)}) and {differ}")
    return [writer.assign(f"{name}[{writer.constant(key)}]") for key in keys]


def _have_key(value: dict[Any, Any], key: Any) -> bool:
    """Whether the keys of a dict, including their types, have this `StaticKey.key`."""
    return StaticKey(tuple(sorted(value))).key == key


def guard_module(node: Any, writer: GuardWriter, name: str) -> Sequence[str]:
    if node.is_cacheable_module and not writer.reads_fields:
        return _guard_cached(node, writer, name)
    if node.is_incomplete:
        writer.compare_by_walk(node, name)
        return []
    return _guard_fields(node, writer, name)


def _guard_cached(node: Any, writer: GuardWriter, name: str) -> Sequence[str]:
    cached = f"getattr({name}, '_eqxlike_cached', None)"
    is_plain = node.node_type.__getattribute__ is object.__getattribute__
    if not is_plain or hasattr(node.node_type, "__getattr__"):
        cached = f"{writer.constant(get_cached)}({name})"
    cached += f" or {writer.constant(node.cache)}({name})"
    if node.is_exact:
        partition = writer.assign(cached)
        writer.miss_if(f"{partition}.structure is not {writer.constant(node)}")
    else:
        partition = writer.assign(
            f"{cached} or flatten({name}) and {writer.constant(get_cached)}({name})"
        )
        found = writer.assign(f"{partition}.structure")
        writer.miss_if(f"{found}.interned is not {writer.constant(node.interned)}")
        if node.snapshot is not None:
            writer.check(node.snapshot.containers)
            same = f"{found}.snapshot is {writer.constant(node.snapshot)}"
            writer.miss_if(f"not ({same} or {found}.snapshot.is_current())")
    writer.take_all(f"{partition}.arrays", node.num_arrays)
    return []


def _guard_fields(node: Any, writer: GuardWriter, name: str) -> Sequence[str]:
    """For a Module that caches no partition, for example because it contains a list."""
    layout = node.node_type._eqxlike_class.codec.layout
    writer.miss_if(f"type({name}) is not {writer.constant(node.node_type)}")
    # The guard reads fields where flattening and rebuilding do, bypassing a user's properties and
    # `__getattribute__`. A missing field raises, and the general walk handles it.
    fields = writer.assign(f"{writer.constant(stored_fields)}({name})")
    if carries_metadata(node.node_type):
        writer.miss_if(f"{writer.constant(has_metadata)}({fields})")
    if not writer.reads_fields:
        writer.check(node.static.containers)
    for field, value in zip(layout.static_names, node.meta, strict=True):
        stored = writer.assign(f"{fields}[{field!r}]")
        if writer.reads_fields and StaticKey(value, of_node=True).containers:
            # The snapshot of the cached partition is valid for these very objects only.
            writer.miss_if(f"{stored} is not {writer.constant(value)}")
        else:
            write_static_guard(writer, stored, value, of_node=True)
    return [writer.assign(f"{fields}[{field!r}]") for field in layout.dynamic_names]


flatten_one_level = default_registry.flatten_one_level


def guard_foreign(node: Any, writer: GuardWriter, name: str) -> Sequence[str]:
    writer.miss_if(f"type({name}) is not {writer.constant(node.node_type)}")
    children, data = writer.unpack(f"{writer.constant(flatten_one_level)}({name})", 2)
    writer.check(node.static.containers)
    write_static_guard(writer, data, node.meta.data, of_node=True)
    if node.has_sequence:
        return [writer.assign(f"(*{children},)")]
    return writer.unpack(children, len(node.children))


def guard_row(node: Any, writer: GuardWriter, name: str) -> Sequence[str]:
    meta = node.meta
    writer.miss_if(f"len({name}) != {len(meta.leaves)}")
    arrays = name
    if meta.static_places:
        statics = writer.assign(f"{writer.constant(_getter(meta.static_places))}({name})")
        key = writer.constant(node.static.key)
        writer.miss_if(f"{writer.constant(plain_key)}({statics}) != {key}[-1]")
        if meta.array_places:
            arrays = writer.assign(f"{writer.constant(_getter(meta.array_places))}({name})")
    if meta.array_places:
        known = writer.constant(concrete_array_types)
        writer.miss_if(f"not {known}.issuperset(map(type, {arrays}))")
        writer.take_all(arrays, node.num_arrays)
    return ()


def _getter(places: tuple[int, ...]) -> Callable[[Any], tuple[Any, ...]]:
    if len(places) == 1:
        return lambda leaves: (leaves[places[0]],)
    return operator.itemgetter(*places)
