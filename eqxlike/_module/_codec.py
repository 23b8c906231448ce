"""Generated code that flattens and unflattens the instances of a Module class.

`jax.jit` calls these functions for every argument of every call. The functions are generated so
that they can read each field by name, without a loop. They read the fields from `__dict__`, since
reading attributes is slow in a class with a `__getattr__`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.tree_util as jtu

from .._traceback import compile_function, tuple_of
from ._cached import read_fields, stored_fields
from ._field import found_in_class, is_static

_new = object.__new__


class Layout(NamedTuple):
    """The description of a class from which its codec is generated.

    - `dynamic_names`: the names of the fields that are children.
    - `static_names`: the names of the static fields.
    - `stored_or_nothing`: the names of the fields for which the class has a property that can be
      set. Such a field counts as missing if it is not in the `__dict__` of an instance.
    - `asks_for_metadata`: whether the code must check if an instance has its own metadata.
    """

    dynamic_names: tuple[str, ...]
    static_names: tuple[str, ...]
    stored_or_nothing: frozenset[str]
    asks_for_metadata: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Codec:
    """The functions by which JAX flattens and unflattens the instances of a class.

    `flatten` returns `(children, statics)`: a tuple of the values of the dynamic fields, and a
    tuple of the values of the static fields. Both tuples have the order of the names in `layout`.
    `unflatten` needs only these two tuples.
    """

    layout: Layout
    flatten: Callable[[Any], tuple[tuple[Any, ...], tuple[Any, ...]]]
    flatten_with_keys: Callable[[Any], tuple[tuple[Any, ...], tuple[Any, ...]]]
    unflatten: Callable[[tuple[Any, ...], Any], Any]


METADATA_KEY = "_eqxlike_metadata"
"""The key of the metadata of an instance in its `__dict__`; the file `_wrapper` describes it."""


def has_metadata(fields: dict[str, Any]) -> bool:
    """Whether an instance has its own metadata; `fields` is the `__dict__` of the instance."""
    return METADATA_KEY in fields


def carries_metadata(cls: Any) -> bool:
    """Whether instances of `cls` may have their own metadata. Flattening preserves the metadata."""
    return isinstance(getattr(cls, "__wrapped__", None), property)


class _Incomplete(tuple):
    """The static part of an instance that has metadata, or that lacks fields during `__init__`.

    Only `unflatten` can rebuild an instance from this static part.
    """

    __slots__ = ()


def is_incomplete(statics: tuple[Any, ...]) -> bool:
    """Whether `statics` holds more than the values of the static fields; see `_Incomplete`."""
    return type(statics) is _Incomplete


def layout_of(cls: type) -> Layout:
    """The layout of the dataclass `cls`."""
    fields = [
        field
        for field in dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
        if not _is_property(cls, field.name)
    ]
    dynamic = tuple(field.name for field in fields if not is_static(field))
    static = tuple(field.name for field in fields if is_static(field))
    return Layout(
        dynamic_names=dynamic,
        static_names=static,
        # The property must not be read instead of the field, since it may return something else.
        stored_or_nothing=frozenset(
            name
            for name in (*dynamic, *static)
            if hasattr(type(found_in_class(cls, name)), "__set__")
        ),
        # Instances of most classes have no metadata, and then the codec does not look for it.
        asks_for_metadata=carries_metadata(cls),
    )


def generate_codec(
    cls: type, layout: Layout, complete: Callable[[dict[str, Any]], None] | None
) -> Codec:
    """Generates the codec of a class with this layout; `Traits` describes `complete`.

    This function uses `layout` and not the fields of `cls`, because a class that is being unpickled
    has no fields yet.
    """
    dynamic, static = layout.dynamic_names, layout.static_names
    namespace: dict[str, Any] = {
        "cls": cls,
        "new": _new,
        "has_metadata": has_metadata,
        "incomplete_type": _Incomplete,
        "stored_fields": stored_fields,
        "flatten_by_name": _make_flatten_by_name(layout),
        "unflatten_incomplete": _make_unflatten_incomplete(cls, complete),
        "complete": complete,
    }
    for index, name in enumerate(dynamic):
        namespace[f"key{index}"] = jtu.GetAttrKey(name)
    children = [f"fields[{name!r}]" for name in dynamic]
    keyed = [f"(key{index}, {child})" for index, child in enumerate(children)]
    statics = tuple_of(f"fields[{name!r}]" for name in static)

    def flatten_source(function: str, parts: list[str], with_keys: bool) -> list[str]:
        by_name = f"return flatten_by_name(self, {with_keys})"
        return [
            f"def {function}(self):",
            "    fields = stored_fields(self)",
            *([f"    if has_metadata(fields): {by_name}"] if layout.asks_for_metadata else []),
            "    try:",
            f"        return {tuple_of(parts)}, {statics}",
            "    except KeyError:",
            f"        {by_name}",
        ]

    unflatten_source = [
        "def unflatten(statics, children):",
        "    if type(statics) is incomplete_type:",
        "        return unflatten_incomplete(statics, children)",
        "    self = new(cls)",
        "    fields = stored_fields(self)",
    ]
    if dynamic:
        unflatten_source.append(f"    {tuple_of(children)} = children")
    if static:
        unflatten_source.append(f"    {statics} = statics")
    if complete is not None:
        unflatten_source.append("    complete(fields)")
    unflatten_source.append("    return self")

    origin = f"pytree of {cls.__module__}.{cls.__qualname__}"
    return Codec(
        layout=layout,
        flatten=compile_function(flatten_source("flatten", children, False), namespace, origin),
        flatten_with_keys=compile_function(
            flatten_source("flatten_with_keys", keyed, True), namespace, origin
        ),
        unflatten=compile_function(unflatten_source, namespace, origin),
    )


def _is_property(cls: type, name: str) -> bool:
    """Whether a read-only property overrides the field `name`, so that no value is stored for it.

    A property that can be set does not count, since it may store the value under the field's name.
    """
    found = found_in_class(cls, name)
    return isinstance(found, property) and found.fset is None


def _make_flatten_by_name(layout: Layout):
    """Makes the function that flattens an instance that has metadata or lacks fields in `__dict__`.

    An instance lacks fields in its `__dict__` if it is lazy, if class attributes replace fields, or
    while its `__init__` runs.
    """
    dynamic, static, stored_or_nothing, _ = layout

    def flatten_by_name(self: Any, with_keys: bool):
        fields = read_fields(self)

        def read(names: tuple[str, ...]) -> dict[str, Any]:
            return {
                name: fields[name] if name in fields else getattr(self, name)
                for name in names
                if name in fields or (name not in stored_or_nothing and hasattr(self, name))
            }

        named, named_statics = read(dynamic), read(static)
        children = tuple(named.values())
        if with_keys:
            children = tuple(zip(map(jtu.GetAttrKey, named), children, strict=True))
        metadata = fields.get(METADATA_KEY)
        is_complete = len(named) == len(dynamic) and len(named_statics) == len(static)
        if is_complete and metadata is None:
            return children, tuple(named_statics.values())
        return children, _Incomplete((tuple(named), tuple(named_statics.items()), metadata))

    return flatten_by_name


def _make_unflatten_incomplete(cls: type, complete: Callable[[dict[str, Any]], None] | None):
    def unflatten_incomplete(statics: _Incomplete, children: Any):
        present, named_statics, metadata = statics
        self = _new(cls)
        fields = stored_fields(self)
        fields.update(zip(present, children, strict=True))
        fields.update(named_statics)
        if complete is not None:
            complete(fields)
        if metadata is not None:
            metadata.write(fields)
        return self

    return unflatten_incomplete
