"""The types of node: how each is flattened, how its children are named in a path, how it is
rebuilt, and how the guard of a warm call checks for it.
"""

import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu
import numpy as np
from jax.tree_util import default_registry

from .._codegen import compile_function, tuple_of
from .._compat import Tracer
from .._module import (
    BoundMethod,
    CachedPartition,
    ClassRecord,
    Module,
    ModuleMeta,
    can_stay_lazy,
    carries_metadata,
    get_cached,
    has_metadata,
    is_incomplete,
    set_cached,
    stored_fields,
)
from .._pytree import is_array, is_traced_reference
from ._guard import GuardWriter, write_static_guard
from ._static_key import PLAIN_TYPES, StaticKey, plain_key
from ._structure import NOTHING, Intern, Opened, RebuildWriter, Structure, intern, no_meta

# --- An array, which is traced ---


concrete_array_types: set[type] = {np.ndarray, jax.Ref}
"""Instances of these types are arrays and not tracers. Types are added when first seen."""


def is_array_of_jax(value: Any) -> bool:
    """Whether `value` is an array of JAX, a tracer, a traced reference or a NumPy scalar.

    The type of an array that is not a tracer is added to `concrete_array_types`.
    """
    if not isinstance(value, jax.Array | np.generic):
        return is_traced_reference(value)
    if not isinstance(value, Tracer):
        concrete_array_types.add(type(value))
    return True


def are_concrete_arrays(values: Iterable[Any]) -> bool:
    """Whether all of `values` are arrays and not tracers; their types are added as above."""
    return all(
        type(value) in concrete_array_types
        or (is_array_of_jax(value) and type(value) in concrete_array_types)
        for value in values
    )


class ArrayLeaf(Structure):
    __slots__ = ()

    is_leaf = True

    def write_build(self, writer: RebuildWriter, parts: list[str]) -> str:
        return writer.array()

    def write_guard(self, writer: GuardWriter, name: str) -> tuple[()]:
        example, known = writer.take(name), writer.constant(concrete_array_types)
        unknown = f"type({name}) not in {known}"
        if example is not None:
            unknown = f"type({name}) is not {writer.constant(type(example))} and {unknown}"
        writer.miss_if(unknown)
        return ()


ARRAY = ArrayLeaf(object, None, NOTHING, ())
ARRAY.num_arrays = 1


# --- A static leaf: `None`, or what is neither an array nor a node; its `meta` is its value ---


class StaticLeaf(Structure):
    __slots__ = ()

    is_leaf = True

    def write_build(self, writer: RebuildWriter, parts: list[str]) -> str:
        return writer.constant(self.meta)

    def write_guard(self, writer: GuardWriter, name: str) -> tuple[()]:
        write_static_guard(writer, name, self.meta, of_node=False)
        return ()


def static_leaf(value: Any, make: Intern = intern) -> Structure:
    """The Structure of a static leaf. Raises `TypeError` if `value` is not hashable."""
    return make(StaticLeaf, type(value), lambda: value, StaticKey(value), ())


def identity_leaf(value: Any) -> Structure:
    """The Structure of a static leaf that is not hashable, and is compared by identity."""
    static = StaticKey(value, by_identity=True)
    return intern(StaticLeaf, type(value), lambda: value, static, ())


class _Opaque:
    """A wrapper of a value that may change; it hashes by identity."""

    __slots__ = ("of",)

    def __init__(self, value: Any):
        self.of = id(value)

    __hash__ = object.__hash__


def opaque_leaf(value: Any) -> Structure:
    """The Structure of a static leaf that is not hashable, not shared with other leaves."""
    static = StaticKey(_Opaque(value))
    static.is_immutable = False
    return intern(StaticLeaf, type(value), lambda: value, static, ())


# --- A plain tuple ---


class TupleNode(Structure):
    __slots__ = ()

    takes_sequence = True

    @staticmethod
    def open(value: tuple[Any, ...]) -> Opened:
        return Opened(TupleNode, no_meta, None, value, "[{}]".format)

    def write_build(self, writer: RebuildWriter, parts: list[str]) -> str:
        return writer.assign(f"tuple({parts[0]})" if self.has_sequence else tuple_of(parts))

    def write_guard(self, writer: GuardWriter, name: str) -> Sequence[str]:
        return guard_sequence(self, writer, name)


def guard_sequence(structure: Structure, writer: GuardWriter, name: str) -> Sequence[str]:
    """Writes the guard of a plain tuple or list."""
    writer.miss_if(f"type({name}) is not {writer.constant(structure.node_type)}")
    if structure.has_sequence:
        return [name]
    return writer.unpack(name, len(structure.children))


# --- A plain list ---


class ListNode(Structure):
    """A list, which may change between two calls.

    So no Module above it caches a partition (`is_immutable` makes `Structure.is_cacheable` false,
    which `flatten` reads), and the generated guard reads type, length and elements at each call.
    """

    __slots__ = ()

    is_immutable = False
    takes_sequence = True

    @staticmethod
    def open(value: list[Any]) -> Opened:
        return Opened(ListNode, no_meta, None, value, "[{}]".format)

    def write_build(self, writer: RebuildWriter, parts: list[str]) -> str:
        return writer.assign(f"[*{parts[0]}]" if self.has_sequence else f"[{', '.join(parts)}]")

    def write_guard(self, writer: GuardWriter, name: str) -> Sequence[str]:
        return guard_sequence(self, writer, name)


# --- A namedtuple of a class that is not registered with JAX ---


as_tuple = tuple.__getitem__
"""Called with a slice, it gives the children as JAX sees them, even if `__iter__` is overridden."""


class NamedTupleNode(Structure):
    __slots__ = ()

    @staticmethod
    def open(value: Any) -> Opened:
        names = type(value)._fields
        children = as_tuple(value, slice(None))
        return Opened(NamedTupleNode, no_meta, None, children, lambda index: f".{names[index]}")

    def write_build(self, writer: RebuildWriter, parts: list[str]) -> str:
        cls = writer.constant(self.node_type)
        if _is_built_as_generated(self.node_type):
            return writer.assign(f"new_tuple({cls}, {tuple_of(parts)})")
        return writer.assign(f"{cls}({', '.join(parts)})")

    def write_guard(self, writer: GuardWriter, name: str) -> Sequence[str]:
        writer.miss_if(f"type({name}) is not {writer.constant(self.node_type)}")
        if self.node_type.__iter__ is not tuple.__iter__:  # pyright: ignore
            name = f"{writer.constant(as_tuple)}({name}, {writer.constant(slice(None))})"
        return writer.unpack(name, len(self.children))


def _is_built_as_generated(cls: Any) -> bool:
    """Whether calling the class, as JAX does, only makes the tuple."""
    new, init = cls.__new__, cls.__init__
    module = getattr(new, "__module__", "")
    is_generated = any(module == f"namedtuple_{base.__name__}" for base in cls.__mro__)
    return is_generated and init is object.__init__


# --- A plain dict ---


class _Meta(NamedTuple):
    """The keys as JAX sorts them, and in the insertion order of the first dict."""

    keys: tuple[Any, ...]
    as_inserted: tuple[Any, ...]


class DictNode(Structure):
    __slots__ = ()

    is_immutable = False
    takes_sequence = True

    @staticmethod
    def open(value: dict[Any, Any]) -> Opened:
        try:
            children, keys = default_registry.flatten_one_level(value)  # pyright: ignore
        except Exception as error:
            raise TypeError(
                "the keys of a dict in a pytree must be sortable: those of this one, of types "
                f"{', '.join(sorted({type(key).__name__ for key in value}))}, are not"
            ) from error

        def make_meta() -> _Meta:
            return _Meta(keys, tuple(value))

        return Opened(DictNode, make_meta, keys, children, lambda index: f"[{keys[index]!r}]")

    def write_build(self, writer: RebuildWriter, parts: list[str]) -> str:
        keys = self.meta.keys
        if self.has_sequence:
            return writer.assign(f"dict(zip({writer.constant(keys)}, {parts[0]}))")
        items = (f"{writer.constant(key)}: {part}" for key, part in zip(keys, parts, strict=True))
        return writer.assign(f"{{{', '.join(items)}}}")

    def write_guard(self, writer: GuardWriter, name: str) -> Sequence[str]:
        writer.miss_if(f"type({name}) is not dict")
        keys = self.meta.keys
        if all(type(key) is str for key in keys):
            # A missing key raises when its value is taken.
            differ = f"{{*map(type, {name})}} != {writer.constant({str})}"
        else:
            key = writer.constant(self.static.key)
            differ = f"not {writer.constant(_have_key)}({name}, {key})"
        if self.has_sequence:
            writer.miss_if(f"len({name}) != {len(keys)} or {differ}")
            return [writer.assign(f"{writer.constant(operator.itemgetter(*keys))}({name})")]
        found = writer.unpack(name, len(keys))
        if keys:
            # Usually the keys are the same objects, so of the same types, in the first dict's
            # order.
            pairs = zip(found, map(writer.constant, self.meta.as_inserted), strict=True)
            writer.miss_if(f"({' or '.join(f'{x} is not {c}' for x, c in pairs)}) and {differ}")
        return [writer.assign(f"{name}[{writer.constant(key)}]") for key in keys]


def _have_key(value: dict[Any, Any], key: Any) -> bool:
    """Whether the keys of a dict, including their types, contain this `key`."""
    return StaticKey(tuple(sorted(value))).key == key


# --- A Module. Its `meta` holds the values of its static fields ---


_TAKE = "take"


def _record(structure: Structure) -> ClassRecord:
    return structure.node_type._eqxlike_class  # pyright: ignore[reportAttributeAccessIssue]


class ModuleNode(Structure):
    __slots__ = ()

    @staticmethod
    def open(value: Module) -> Opened:
        codec = type(value)._eqxlike_class.codec
        children, statics = codec.flatten(value)
        is_complete = not is_incomplete(statics)
        # During `__init__` some fields are missing.
        names = codec.layout.dynamic_names if is_complete else statics[0]
        static = (is_complete, *statics)
        return Opened(ModuleNode, lambda: statics, static, children, lambda i: f".{names[i]}")

    @property
    def is_immutable(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return _record(self).traits.is_immutable

    @property
    def is_cacheable_module(self) -> bool:
        # A method is bound again at each access and would lose its cache. Its instance has one.
        return self.is_cacheable and not issubclass(self.node_type, BoundMethod)

    @property
    def can_stay_lazy(self) -> bool:
        return self.is_cacheable and can_stay_lazy(self.node_type)

    def fields(self, dynamic: tuple[Any, ...]) -> dict[str, Any]:
        """The fields of an instance with these arrays, by name."""
        return stored_fields(self.rebuilder(cache=False)(dynamic))

    def write_build(self, writer: RebuildWriter, parts: list[str]) -> str:
        codec, complete = _record(self).codec, _record(self).traits.complete
        if is_incomplete(self.meta):
            unflatten, statics = writer.constant(codec.unflatten), writer.constant(self.meta)
            return writer.assign(f"{unflatten}({statics}, {tuple_of(parts)})")
        module = writer.assign(f"new({writer.constant(self.node_type)})")
        names = (*codec.dynamic_names, *codec.static_names)
        values = (*parts, *map(writer.constant, self.meta))
        if names:
            writer.line(f"fields = stored_fields({module})")
        for name, value in zip(names, values, strict=True):
            writer.line(f"fields[{name!r}] = {value}")
        if complete is not None:
            writer.line(f"{writer.constant(complete)}(fields)")
        return module

    def write_guard(self, writer: GuardWriter, name: str) -> Sequence[str]:
        if self.is_cacheable_module and not writer.reads_fields:
            return self._guard_cached(writer, name)
        if is_incomplete(self.meta):
            writer.compare_by_walk(self, name)
            return []
        return self._guard_fields(writer, name)

    def _guard_cached(self, writer: GuardWriter, name: str) -> Sequence[str]:
        cached = f"getattr({name}, '_eqxlike_cached', None)"
        is_plain = self.node_type.__getattribute__ is object.__getattribute__
        if not is_plain or hasattr(self.node_type, "__getattr__"):
            cached = f"{writer.constant(get_cached)}({name})"
        partition = writer.assign(f"{cached} or {writer.constant(self.cache)}({name})")
        writer.miss_if(f"{partition}.structure is not {writer.constant(self)}")
        writer.take_all(f"{partition}.arrays", self.num_arrays)
        return []

    def cache(self, module: Any) -> CachedPartition | None:
        """Caches the partition of an instance that has none yet, such as a user's new one.

        **Returns:** the partition, or `None` if the instance is not of this Structure.
        """
        take = self.generated.get(_TAKE)
        if take is None:
            take = self.generated[_TAKE] = self._make_take()
        arrays = take(module)
        if arrays is None:
            return None
        partition = CachedPartition(arrays, self)
        set_cached(module, partition)
        return partition

    def _make_take(self) -> Callable[[Any], tuple[Any, ...] | None]:
        """A function from a Module of this Structure to its arrays, from others to `None`."""
        writer = GuardWriter(None, None, None, reads_fields=True)
        writer.write(self, "module")
        lines = [*writer.function("take(module)"), f"    return {tuple_of(writer.arrays)}"]
        return compile_function(lines, writer.namespace, f"arrays of {self.node_type.__name__}")

    def _guard_fields(self, writer: GuardWriter, name: str) -> Sequence[str]:
        """Writes the guard of a Module that caches nothing, for example because it holds a list."""
        codec = _record(self).codec
        writer.miss_if(f"type({name}) is not {writer.constant(self.node_type)}")
        # The guard reads fields where flattening and rebuilding do, bypassing a user's properties
        # and `__getattribute__`. A missing field raises, and the general walk handles it.
        fields = writer.assign(f"{writer.constant(stored_fields)}({name})")
        if carries_metadata(self.node_type):
            writer.miss_if(f"{writer.constant(has_metadata)}({fields})")
        for field, value in zip(codec.static_names, self.meta, strict=True):
            stored = writer.assign(f"{fields}[{field!r}]")
            write_static_guard(writer, stored, value, of_node=True)
        return [writer.assign(f"{fields}[{field!r}]") for field in codec.dynamic_names]


# --- A node of any other type registered with JAX. Its `meta` is the treedef of this level ---


flatten_one_level = default_registry.flatten_one_level


class ForeignNode(Structure):
    __slots__ = ()

    is_immutable = False
    takes_sequence = True

    @staticmethod
    def open(value: Any, children: Sequence[Any], data: Any) -> Opened:
        """The node `value`, which its own function has flattened to `children` and `data`."""
        return Opened(
            ForeignNode, lambda: _ForeignMeta(value, data), data, (*children,), "[{}]".format
        )

    def write_build(self, writer: RebuildWriter, parts: list[str]) -> str:
        children = parts[0] if self.has_sequence else tuple_of(parts)
        return writer.assign(f"{writer.constant(self.meta.treedef.unflatten)}({children})")

    def write_guard(self, writer: GuardWriter, name: str) -> Sequence[str]:
        writer.miss_if(f"type({name}) is not {writer.constant(self.node_type)}")
        children, data = writer.unpack(f"{writer.constant(flatten_one_level)}({name})", 2)
        write_static_guard(writer, data, self.meta.data, of_node=True)
        if self.has_sequence:
            return [writer.assign(f"(*{children},)")]
        return writer.unpack(children, len(self.children))


class _ForeignMeta:
    """The treedef that rebuilds a node, and the `data` that its own function returned."""

    __slots__ = ("data", "treedef")

    def __init__(self, value: Any, data: Any):
        self.data = data
        # JAX asks about the node itself first. Identity would not do: it may contain itself.
        is_child = itertools.chain((False,), itertools.repeat(True))
        self.treedef = jtu.tree_structure(value, is_leaf=lambda _: next(is_child))


# --- Finding the type of node of a value ---


_OF_PYTHON = {tuple: TupleNode, list: ListNode, dict: DictNode}


def open_node(value: Any) -> Opened | None:
    """The node of `value`, or `None` if it is a leaf. `None` itself counts as a leaf here."""
    node_type = type(value)
    structure_type = _OF_PYTHON.get(node_type)
    if structure_type is not None:
        return structure_type.open(value)
    if is_array_of_jax(value):
        return None
    if isinstance(node_type, ModuleMeta):
        return ModuleNode.open(value)
    flattened = flatten_one_level(value)
    if flattened is None:
        return None
    children, data = flattened
    # For an unregistered namedtuple, JAX returns its class as the data.
    if data is node_type and isinstance(value, tuple):
        return NamedTupleNode.open(value)
    return ForeignNode.open(value, children, data)


# --- Many leaves below one node, taken all at once, without a Structure and code for each ---


MIN_ROW = 64
"""Fewer leaves than this get a Structure each: separate code is faster then."""


class _RowMeta(NamedTuple):
    """The leaves of a row, with `None` for each array, and the positions of the arrays."""

    leaves: tuple[Any, ...]
    array_places: tuple[int, ...]
    static_places: tuple[int, ...]


class Row(Structure):
    """The only child of a node, representing all leaves below it."""

    __slots__ = ()

    is_row = True

    def __init__(self, node_type: type, meta: _RowMeta, static: StaticKey, children: tuple[()]):
        super().__init__(node_type, meta, static, children)
        self.num_arrays = len(meta.array_places)

    def write_build(self, writer: RebuildWriter, parts: list[str]) -> str:
        if not self.meta.array_places:
            return writer.constant(self.meta.leaves)
        arrays = writer.arrays(self.num_arrays)
        if not self.meta.static_places:
            return arrays
        return writer.assign(f"{writer.constant(_merger(self.meta))}({arrays})")

    def write_guard(self, writer: GuardWriter, name: str) -> tuple[()]:
        meta = self.meta
        writer.miss_if(f"len({name}) != {len(meta.leaves)}")
        arrays = name
        if meta.static_places:
            statics = writer.assign(f"{writer.constant(_getter(meta.static_places))}({name})")
            key = writer.constant(self.static.key)
            writer.miss_if(f"{writer.constant(plain_key)}({statics}) != {key}[-1]")
            if meta.array_places:
                arrays = writer.assign(f"{writer.constant(_getter(meta.array_places))}({name})")
        if meta.array_places:
            known = writer.constant(concrete_array_types)
            writer.miss_if(f"not {known}.issuperset(map(type, {arrays}))")
            writer.take_all(arrays, self.num_arrays)
        return ()


def make_row(children: Sequence[Any], *, with_abstract: bool) -> tuple[Row, tuple[Any, ...]] | None:
    """The row of these children and its arrays; `None` if not all are leaves of known types."""
    types = [*map(type, children)]
    known = {*types}
    arrays = known & concrete_array_types
    for leaf_type in known - arrays - PLAIN_TYPES:
        is_abstract = with_abstract and leaf_type is jax.ShapeDtypeStruct
        leaves = (x for x in children if type(x) is leaf_type)
        if not is_abstract and not all(is_array_of_jax(x) or is_array(x) for x in leaves):
            return None
        arrays.add(leaf_type)
    count = len(types)
    if arrays == known:
        places = tuple(range(count))
        meta = _RowMeta((None,) * count, places, ())
        row = intern(Row, object, lambda: meta, StaticKey((count,)), ())
        return row, tuple(children)  # pyright: ignore[reportReturnType]
    array_places = tuple(place for place, leaf_type in enumerate(types) if leaf_type in arrays)
    static_places = tuple(place for place, leaf_type in enumerate(types) if leaf_type not in arrays)
    statics = tuple(children[place] for place in static_places)

    def make_meta() -> _RowMeta:
        leaves = [None] * count
        for place, value in zip(static_places, statics, strict=True):
            leaves[place] = value
        return _RowMeta(tuple(leaves), array_places, static_places)

    static = StaticKey(None)
    static.key = (count, array_places, plain_key(statics))
    row = intern(Row, object, make_meta, static, ())
    taken = tuple(children[place] for place in array_places)
    return row, taken  # pyright: ignore[reportReturnType]


def _getter(places: tuple[int, ...]) -> Callable[[Any], tuple[Any, ...]]:
    if len(places) == 1:
        return lambda leaves: (leaves[places[0]],)
    return operator.itemgetter(*places)


def _merger(meta: _RowMeta) -> Callable[[Sequence[Any]], list[Any]]:
    def merge(arrays: Sequence[Any]) -> list[Any]:
        leaves = [*meta.leaves]
        for place, array in zip(meta.array_places, arrays, strict=True):
            leaves[place] = array
        return leaves

    return merge
