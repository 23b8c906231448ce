"""Generates two functions for a Structure.

The first function builds a tree with this Structure from its arrays. The second function checks if
a tree has this Structure, and takes its arrays. For each of the two functions, a class walks over
the Structure and writes the lines. To write the lines for one node, the class calls a function for
the type of the node. These functions follow the class in this file; `_structure` assigns them to
the types of node.
"""

import contextlib
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.tree_util import default_registry

from .._module import (
    METADATA_KEY,
    CachedPartition,
    LazyPartition,
    carries_metadata,
    get_cached,
    set_cached,
    stored_fields,
)
from .._traceback import compile_function, tuple_of
from ._static_key import Container, StaticKey, plain_key, snapshot_of, write_static_guard

concrete_array_types: set[type] = {np.ndarray, jax.Ref}
"""Instances of these types are arrays and not tracers. A type is added when it is first seen."""


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


# For each type of node, a function that writes the lines that build the node, and returns the
# expression for the node. `parts` has an expression for each child, or a single expression for the
# sequence of all children.


def build_array(node: Any, writer: RebuildWriter, parts: list[str]) -> str:
    writer.num_arrays += 1
    return f"arrays[{writer.num_arrays - 1}]"


def build_static_leaf(node: Any, writer: RebuildWriter, parts: list[str]) -> str:
    return writer.constant(node.meta)


def build_tuple(node: Any, writer: RebuildWriter, parts: list[str]) -> str:
    return writer.assign(f"tuple({parts[0]})" if node.has_sequence else tuple_of(parts))


def build_list(node: Any, writer: RebuildWriter, parts: list[str]) -> str:
    return writer.assign(f"[*{parts[0]}]" if node.has_sequence else f"[{', '.join(parts)}]")


def build_named_tuple(node: Any, writer: RebuildWriter, parts: list[str]) -> str:
    cls, name = node.node_type, writer.constant(node.node_type)
    generated = {f"namedtuple_{base.__name__}" for base in cls.__mro__}
    if getattr(cls.__new__, "__module__", "") in generated and cls.__init__ is object.__init__:
        # No code of the user runs when JAX calls the class.
        return writer.assign(f"new_tuple({name}, {tuple_of(parts)})")
    return writer.assign(f"{name}({', '.join(parts)})")


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
    meta = node.meta
    if not meta.array_places:
        return writer.constant(meta.leaves)
    arrays = writer.arrays(node.num_arrays)
    if not meta.static_places:
        return arrays

    # This function does not refer to `node`: it would keep `node` alive, which holds the function.
    def merge(arrays: Sequence[Any]) -> list[Any]:
        leaves = [*meta.leaves]
        for place, array in zip(meta.array_places, arrays, strict=True):
            leaves[place] = array
        return leaves

    return writer.assign(f"{writer.constant(merge)}({arrays})")


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
        self.miss_if(f"{found} is not {self.constant(structure.interned or structure)}")
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
        if self._containers:
            # One call checks all containers, since a call costs more than comparing ten objects.
            is_current = self.constant(snapshot_of(self._containers).is_current)
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


# For each type of node, a function that writes the lines that check if the variable `name` holds
# such a node. The lines do not check the children. The function returns the name of a variable for
# each child, or a single name for the sequence of all children.


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
    """Writes the guard of a plain tuple or list."""
    writer.miss_if(f"type({name}) is not {writer.constant(node.node_type)}")
    if node.has_sequence:
        return [name]
    return writer.unpack(name, len(node.children))


as_tuple = tuple.__getitem__
"""Called with a slice, returns the elements that JAX sees, even if a class overrides `__iter__`."""


def guard_named_tuple(node: Any, writer: GuardWriter, name: str) -> Sequence[str]:
    writer.miss_if(f"type({name}) is not {writer.constant(node.node_type)}")
    if node.node_type.__iter__ is not tuple.__iter__:
        name = f"{writer.constant(as_tuple)}({name}, {writer.constant(slice(None))})"
    return writer.unpack(name, len(node.children))


def guard_dict(node: Any, writer: GuardWriter, name: str) -> Sequence[str]:
    writer.miss_if(f"type({name}) is not dict")
    keys = node.meta.keys
    if all(type(key) is str for key in keys):
        # The names of the keys need no check: the lines below raise an error if a key is missing.
        differ = f"{{*map(type, {name})}} != {writer.constant({str})}"
    else:
        key = writer.constant(node.static.key)
        differ = f"not {writer.constant(_have_key)}({name}, {key})"
    if node.has_sequence:
        writer.miss_if(f"len({name}) != {len(keys)} or {differ}")
        return [writer.assign(f"{writer.constant(operator.itemgetter(*keys))}({name})")]
    found = writer.unpack(name, len(keys))
    if keys:
        # The guard compares the keys by identity first: usually they are the same objects as in the
        # first dict, in the same order.
        pairs = zip(found, map(writer.constant, node.meta.as_inserted), strict=True)
        writer.miss_if(f"({' or '.join(f'{x} is not {c}' for x, c in pairs)}) and {differ}")
    return [writer.assign(f"{name}[{writer.constant(key)}]") for key in keys]


def _have_key(value: dict[Any, Any], key: Any) -> bool:
    """Whether the sorted keys of a dict have this `StaticKey.key`, which also compares types."""
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
        interned = writer.constant(node.interned or node)
        writer.miss_if(f"({found}.interned or {found}) is not {interned}")
        if node.snapshot is not None:
            writer.check(node.snapshot.containers)
            same = f"{found}.snapshot is {writer.constant(node.snapshot)}"
            writer.miss_if(f"not ({same} or {found}.snapshot.is_current())")
    writer.take_all(f"{partition}.arrays", node.num_arrays)
    return []


def _guard_fields(node: Any, writer: GuardWriter, name: str) -> Sequence[str]:
    """Writes the guard of a Module that caches no partition, for example because of a list."""
    layout = node.node_type._eqxlike_class.codec.layout
    writer.miss_if(f"type({name}) is not {writer.constant(node.node_type)}")
    # The guard reads the fields from the `__dict__`, as flattening does, and so bypasses a user's
    # properties and `__getattribute__`. If a field is missing, the guard raises an error, and
    # `flatten` handles the Module.
    fields = writer.assign(f"{writer.constant(stored_fields)}({name})")
    if carries_metadata(node.node_type):
        writer.miss_if(f"{METADATA_KEY!r} in {fields}")
    if not writer.reads_fields:
        writer.check(node.static.containers)
    for field, value in zip(layout.static_names, node.meta, strict=True):
        stored = writer.assign(f"{fields}[{field!r}]")
        if writer.reads_fields and StaticKey(value, of_node=True).containers:
            # Equal containers are not enough: the snapshot of the cached partition is valid only
            # for the same container objects.
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
