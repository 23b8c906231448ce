"""A Module. Its `meta` holds the values of its static fields."""

from collections.abc import Callable, Sequence
from typing import Any

from ..._codegen import compile_function
from ..._module import (
    BoundMethod,
    CachedPartition,
    ClassRecord,
    Module,
    can_stay_lazy,
    carries_metadata,
    get_cached,
    has_metadata,
    is_incomplete,
    set_cached,
    stored_fields,
)
from .._guard import GuardWriter
from .._rebuild import RebuildWriter, tuple_of
from .._structure import Opened, Structure

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
        # In the middle of an `__init__` some fields are missing.
        names = codec.dynamic_names if is_complete else statics[0]
        static = (is_complete, *statics)
        return Opened(ModuleNode, lambda: statics, static, children, lambda i: f".{names[i]}")

    @property
    def is_fixed(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return _record(self).traits.is_fixed

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
        codec = _record(self).codec
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
        if codec.complete is not None:
            writer.line(f"{writer.constant(codec.complete)}(fields)")
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
        """Caches the partition of an instance that has none yet, such as one that a user has made.

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
        """A function from a Module of this Structure to its arrays, and from others to `None`."""
        writer = GuardWriter(None, None, None, reads_fields=True)
        writer.write(self, "module")
        lines = [
            "def take(module):",
            "    try:",
            *(f"        {line}" for line in writer.lines),
            "    except Exception:",
            "        return MISS",
            f"    return {tuple_of(writer.arrays)}",
        ]
        return compile_function(lines, writer.namespace, f"arrays of {self.node_type.__name__}")

    def _guard_fields(self, writer: GuardWriter, name: str) -> Sequence[str]:
        """Writes the guard of a Module that caches nothing, such as one that holds a list."""
        codec = _record(self).codec
        writer.miss_if(f"type({name}) is not {writer.constant(self.node_type)}")
        # The guard reads fields where flattening and rebuilding do, past a user's properties and
        # `__getattribute__`. A field that is missing there raises, and the walk sees to it.
        fields = writer.assign(f"{writer.constant(stored_fields)}({name})")
        if carries_metadata(self.node_type):
            writer.miss_if(f"{writer.constant(has_metadata)}({fields})")
        for field, value in zip(codec.static_names, self.meta, strict=True):
            writer.miss_if_static_differs(writer.assign(f"{fields}[{field!r}]"), value)
        return [writer.assign(f"{fields}[{field!r}]") for field in codec.dynamic_names]
