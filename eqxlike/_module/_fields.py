"""The fields of a Module: how they are declared, stored, flattened and initialised.

`field` comes first, with the check of static values. The storage of an instance follows, and then
the functions that are generated for each class: a codec, which flattens and unflattens instances,
and a fast `__init__`.
"""

import array
import collections
import dataclasses
import inspect
import threading
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import jax.tree_util as jtu
import numpy as np

from .._pytree import is_array
from .._traceback import compile_function, tuple_of


def field(
    *, converter: Callable[[Any], Any] | None = None, static: bool = False, **kwargs: Any
) -> Any:
    """Declares a field of a Module. This is `dataclasses.field` with two more arguments.

    **Arguments:**

    - `converter`: a function applied to the field's value once, after `__init__`.
    - `static`: if `True`, the field is part of the tree's structure, not a leaf or subtree. A
      static value must not contain arrays, and each new value causes a new trace. The value should
      be hashable. If the value is a list, a dict or a mutable dataclass, `filter_jit` compares its
      elements in each call. `jax.jit` does not notice if the value is changed in place.
    - `**kwargs`: passed to `dataclasses.field`.

    **Returns:** the field, as `dataclasses.field` returns it.

    !!! example

        >>> import eqxlike as eqx, jax.numpy as jnp
        >>> class Scale(eqx.Module):
        ...     factor: jnp.ndarray = eqx.field(converter=jnp.asarray)
        ...     axis: int = eqx.field(static=True, default=0)
        >>> Scale(2.0)
        Scale(factor=weak_f32[])
    """
    # Equinox has the same keys. Other libraries read them.
    metadata = dict(kwargs.pop("metadata", None) or {})
    for name, value in (("static", static or None), ("converter", converter)):
        if name in metadata:
            raise ValueError(f"Cannot use metadata with name {name!r}: `field` takes `{name}=`.")
        if value is not None:
            metadata[name] = value
    return dataclasses.field(metadata=metadata, **kwargs)


def static_field(**kwargs: Any) -> Any:
    """The old name of `field(static=True)`, as in Equinox. Deprecated.

    **Arguments:**

    - `**kwargs`: as for `field`.

    **Returns:** the field, as `field` returns it.
    """
    warnings.warn(
        "`eqxlike.static_field` is deprecated: write `eqxlike.field(static=True)`.", stacklevel=2
    )
    return field(static=True, **kwargs)


def found_in_class(cls: type, name: str) -> Any:
    """Looks up the attribute `name` in a class and its bases, without calling a descriptor."""
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)


def check_static(owner: type, name: str, value: Any) -> None:
    """Raises `TypeError` if the static field `name` of `owner` cannot hold `value`."""
    # For most values the check ends here, which keeps construction fast.
    if error_of_hash(value) is None and not is_array(value):
        return
    found = _find_array_or_opaque(value, "", set())
    if found is None:
        return
    path, part, error = found
    at = f" at {owner.__name__}.{name}{path}" if path else ""
    if is_array(part):
        raise TypeError(
            f"{owner.__name__}.{name} is a static field and was given an array of shape "
            f"{part.shape} and dtype {part.dtype}{at}. A static field is part "
            "of the tree's structure and cannot hold arrays. Remove `static=True`, or pass a "
            "number or a tuple."
        ) from None
    raise TypeError(
        f"{owner.__name__}.{name} is a static field and was given a value of type "
        f"{type(part).__name__}{at}, which is not hashable ({error}) and cannot be "
        "compared by its elements or attributes. A static field is part of the tree's structure: "
        "pass numbers, strings and functions, or tuples, lists, dicts and dataclasses of them, or "
        "remove `static=True`."
    ) from None


def _find_array_or_opaque(
    value: Any, path: str, inside: set[int]
) -> tuple[str, Any, Exception | None] | None:
    """Finds a part of `value` that is an array, or is neither hashable nor a container of parts.

    **Returns:** the path of the first such part, the part itself, and the error that prevents
    hashing (`None` for an array). The result is `None` if there is no such part.
    """
    # A NumPy scalar is an array to `is_array`, but immutable and hashable like a Python number.
    if error_of_hash(value) is None and (not is_array(value) or isinstance(value, np.generic)):
        return None
    if is_array(value):
        return path, value, None
    if id(value) in inside:
        return path, value, RecursionError("it contains itself")
    parts = _parts(value)
    if parts is None:
        return path, value, error_of_hash(value)
    inside.add(id(value))
    for key, part in parts:
        if found := _find_array_or_opaque(part, path + key, inside):
            return found
    inside.discard(id(value))
    return None


def error_of_hash(value: Any) -> Exception | None:
    try:
        hash(value)
    except Exception as error:  # A `__hash__` may raise any exception.
        return error
    return None


def _parts(value: Any) -> list[tuple[str, Any]] | None:
    """The parts of an unhashable value, with their paths; `None` if it cannot be taken apart."""
    elements: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        elements = [(f"[{key!r}]", each) for key, each in value.items()]
    elif isinstance(value, list | tuple | collections.deque):
        elements = [(f"[{index}]", each) for index, each in enumerate(value)]
    elif isinstance(value, slice):
        # Slices are not hashable up to Python 3.11.
        elements = [(f".{name}", getattr(value, name)) for name in ("start", "stop", "step")]
    elif not isinstance(value, set | bytearray | array.array):
        is_compared_by_value = type(value).__hash__ is None and hasattr(value, "__dict__")
        if not (is_compared_by_value or dataclasses.is_dataclass(value)):
            return None
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    names = {field.name: None for field in fields} | getattr(value, "__dict__", {})
    return elements + [(f".{name}", getattr(value, name, None)) for name in names]


# --- The storage of a Module: frozen fields, and a slot that caches the partition ---
#
# The slot is outside of `__dict__`, so that `vars`, `copy`, `pickle` and the dataclass functions do
# not see it. The slot has one of three states:
#
# - It is empty.
# - It holds `Initialising` while `__init__` runs and may assign fields. `ModuleMeta.__call__` fills
#   the slot before `__init__` runs, and clears it afterwards.
# - It holds a `CachedPartition`. To change the partition, a new object is put into the slot, so
#   that another thread sees either the old or the new partition.
#
# Three functions of `_partition` write a partition:
#
# - `flatten` (`_cache` in `_flatten.py`), for the Modules that it has walked through;
# - `ModuleNode.cache`, which a fast path calls for a Module whose slot is empty;
# - the function that `RebuildWriter` writes, for the Modules that a filtered function returns.
#
# A Module that a filtered function returns may be *lazy*: it has its partition, but no fields yet.
# The first read of a field builds all fields from the partition and stores them. A training loop
# reads no fields: it passes the partition to the next call, and so avoids building some hundred
# objects. A Module is lazy if and only if its slot holds a `LazyPartition`. An empty `__dict__`
# would be no proof, since `object.__setattr__` can write to the `__dict__` of a lazy Module.


class CachedPartition:
    """The arrays of a Module, in tree order, and the Structure of everything else.

    Usually `structure` is the interned Structure. But the Module may have its own static
    containers, which are equal to the containers in the interned Structure. Then `structure` is an
    `_OfOwnContainers` (`_partition/_flatten.py`).
    """

    __slots__ = ("arrays", "structure")

    def __init__(self, arrays: tuple[Any, ...], structure: Any):
        self.arrays = arrays
        self.structure = structure


class LazyPartition(CachedPartition):
    """The partition of a Module whose fields have not been built yet."""

    __slots__ = ()


class _Storage:
    __slots__ = ("__dict__", "__weakref__", "_eqxlike_cached")


# These functions read and write the slots directly. They bypass the `__setattr__` of a frozen
# Module and a `__getattr__` that a user defines.
_slot: Any = _Storage.__dict__["_eqxlike_cached"]
set_cached = _slot.__set__
clear_slot = _slot.__delete__
stored_fields = _Storage.__dict__["__dict__"].__get__
"""Returns the stored `__dict__` of a Module, which is empty if the Module is lazy."""


class Initialising:
    """The class itself is in the slot while `__init__` runs and may assign fields."""


def get_cached(module: "FrozenStorage") -> Any:
    """The value in the slot `_eqxlike_cached`, or `None` if the slot is empty."""
    try:
        return _slot.__get__(module)
    except AttributeError:
        return None


_reading = threading.Lock()


def read_fields(module: "FrozenStorage") -> dict[str, Any]:
    """Returns the `__dict__` of a Module. If the Module is lazy, its fields are built first."""
    fields = stored_fields(module)
    cached = get_cached(module)
    if type(cached) is LazyPartition:
        built = cached.structure.fields(cached.arrays)
        with _reading:
            # If two threads build the fields at once, both return the fields of the first thread.
            if get_cached(module) is cached:
                for name, value in built.items():
                    fields.setdefault(name, value)
                set_cached(module, CachedPartition(cached.arrays, cached.structure))
    return fields


class LazyAttribute:
    """Descriptor for a field of a Module class. It builds the fields of a lazy instance.

    It is not a data descriptor, so Python calls it only if the `__dict__` of the instance lacks the
    field. The field is missing if the instance is lazy, or while its `__init__` runs. On the class,
    the descriptor returns the default of the field, as in any dataclass.
    """

    __slots__ = ("default", "name")

    def __init__(self, name: str, default: Any = dataclasses.MISSING):
        self.name = name
        self.default = default

    def __reduce__(self) -> tuple[Any, ...]:
        # `MISSING` is not pickled, since unpickling would make another object.
        has_default = self.default is not dataclasses.MISSING
        return LazyAttribute, (self.name, *([self.default] if has_default else []))

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is not None:
            fields = read_fields(instance)
            if self.name in fields:
                return fields[self.name]
        if self.default is not dataclasses.MISSING:
            return self.default
        what = (
            f"type object {owner.__name__!r}" if instance is None else f"{owner.__name__!r} object"
        )
        raise AttributeError(
            f"{what} has no attribute {self.name!r}", name=self.name, obj=instance or owner
        )


class FrozenStorage(_Storage):
    """Base class of `Module`. It has the slot, and allows only `__init__` to assign fields."""

    __slots__ = ()

    @property
    def __dict__(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return read_fields(self)

    # The methods are hidden from type checkers, which would otherwise allow assigning to any name.
    if not TYPE_CHECKING:

        def __setattr__(self, name: str, value: Any) -> None:
            # `__dataclass_fields__` contains `ClassVar`s and `InitVar`s too.
            field = type(self).__dataclass_fields__.get(name)
            is_field = field is not None and field._field_type is dataclasses._FIELD
            is_initialising = get_cached(self) is Initialising
            if is_field and is_initialising:
                return object.__setattr__(self, name, value)
            type_name = type(self).__name__
            if is_initialising:
                raise dataclasses.FrozenInstanceError(
                    f"cannot assign to field {name!r}: {type_name} declares no such field. Write "
                    f"`{name}: <type>` in the body of the class."
                )
            raise dataclasses.FrozenInstanceError(
                f"cannot assign to field {name!r} of a {type_name}: a Module is frozen once "
                f"`__init__` is done. `eqxlike.tree_at(lambda module: module.{name}, module, "
                "value)` makes a changed copy."
            )

        def __delattr__(self, name: str) -> None:
            raise dataclasses.FrozenInstanceError(
                f"cannot delete field {name!r} of a {type(self).__name__}: a Module is frozen."
            )

    def __getstate__(self) -> dict[str, Any]:
        # `copy` and `pickle` get the fields, but not the cached partition.
        return self.__dict__


def can_stay_lazy(cls: type) -> bool:
    """Whether instances of `cls` can be lazy.

    This requires that reading any field calls a `LazyAttribute`. So instances cannot be lazy if
    `cls` has a method or a property with the name of a field. They also cannot be lazy if they may
    have metadata, since metadata is stored with the fields.
    """
    if carries_metadata(cls):
        return False
    names = [field.name for field in dataclasses.fields(cls)]  # pyright: ignore[reportArgumentType]
    return bool(names) and all(type(found_in_class(cls, name)) is LazyAttribute for name in names)


# --- Generated code that flattens and unflattens the instances of a Module class ---
#
# `jax.jit` calls these functions for every argument of every call. The functions are generated so
# that they can read each field by name, without a loop. They read the fields from `__dict__`, since
# reading attributes is slow in a class with a `__getattr__`.


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
    dynamic, static, stored_or_nothing = [], [], []
    for field in dataclasses.fields(cls):  # pyright: ignore[reportArgumentType]
        found = found_in_class(cls, field.name)
        if isinstance(found, property) and found.fset is None:
            # A read-only property overrides the field, so no value is stored for it.
            continue
        names = static if field.metadata.get("static") else dynamic
        names.append(field.name)
        if hasattr(type(found), "__set__"):
            # The property must not be read instead of the field: it may return something else.
            stored_or_nothing.append(field.name)
    return Layout(
        tuple(dynamic),
        tuple(static),
        frozenset(stored_or_nothing),
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
        "new": object.__new__,
        "incomplete_type": _Incomplete,
        "stored_fields": stored_fields,
        "flatten_by_name": _flatten_by_name,
        "unflatten_incomplete": _unflatten_incomplete,
        "layout": layout,
        "complete": complete,
    }
    for index, name in enumerate(dynamic):
        namespace[f"key{index}"] = jtu.GetAttrKey(name)
    children = [f"fields[{name!r}]" for name in dynamic]
    keyed = [f"(key{index}, {child})" for index, child in enumerate(children)]
    statics = tuple_of(f"fields[{name!r}]" for name in static)

    def flatten_source(function: str, parts: list[str], with_keys: bool) -> list[str]:
        by_name = f"return flatten_by_name(self, layout, {with_keys})"
        has_metadata = f"{METADATA_KEY!r} in fields"
        return [
            f"def {function}(self):",
            "    fields = stored_fields(self)",
            *([f"    if {has_metadata}: {by_name}"] if layout.asks_for_metadata else []),
            "    try:",
            f"        return {tuple_of(parts)}, {statics}",
            "    except KeyError:",
            f"        {by_name}",
        ]

    unflatten_source = [
        "def unflatten(statics, children):",
        "    if type(statics) is incomplete_type:",
        "        return unflatten_incomplete(cls, complete, statics, children)",
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


def _flatten_by_name(
    module: Any, layout: Layout, with_keys: bool
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Flattens an instance that has metadata or lacks fields in its `__dict__`.

    An instance lacks fields in its `__dict__` if it is lazy, if class attributes replace fields, or
    while its `__init__` runs.
    """
    fields = read_fields(module)

    def read(names: tuple[str, ...]) -> dict[str, Any]:
        return {
            name: fields[name] if name in fields else getattr(module, name)
            for name in names
            if name in fields or (name not in layout.stored_or_nothing and hasattr(module, name))
        }

    named, named_statics = read(layout.dynamic_names), read(layout.static_names)
    children = tuple(named.values())
    if with_keys:
        children = tuple(zip(map(jtu.GetAttrKey, named), children, strict=True))
    metadata = fields.get(METADATA_KEY)
    is_complete = (*named, *named_statics) == (*layout.dynamic_names, *layout.static_names)
    if is_complete and metadata is None:
        return children, tuple(named_statics.values())
    return children, _Incomplete((tuple(named), tuple(named_statics.items()), metadata))


def _unflatten_incomplete(cls: type, complete: Any, statics: _Incomplete, children: Any) -> Any:
    present, named_statics, metadata = statics
    module = object.__new__(cls)
    fields = stored_fields(module)
    fields.update(zip(present, children, strict=True))
    fields.update(named_statics)
    if complete is not None:
        complete(fields)
    if metadata is not None:
        metadata.write(fields)
    return module


# --- The generated `__init__` of a Module class ---
#
# The `__init__` of `dataclasses` calls `__setattr__` for each field. The `__setattr__` of Modules
# would check for each field whether the `__init__` of the instance is running. The `__init__`
# generated here checks this once.


def make_init(cls: type, generated: Callable[..., None]) -> Callable[..., None]:
    """Makes an `__init__` that does the same as `generated`, without calling `__setattr__`.

    `generated` is the `__init__` of `dataclasses`. If a field has a converter, the annotation of
    the parameter comes from the converter.
    """
    code = generated.__code__
    num_named = code.co_argcount + code.co_kwonlyargcount
    self, *parameters = code.co_varnames[:num_named]
    by_position = parameters[: code.co_argcount - 1]
    by_keyword = parameters[len(by_position) :]
    namespace: dict[str, Any] = {
        "_eqxlike_get_cached": get_cached,
        "_eqxlike_initialising": Initialising,
        "_eqxlike_refuse": _refuse,
        "_eqxlike_set": object.__setattr__,
    }
    listed = [self, *by_position, *(["*"] if by_keyword else []), *by_keyword]
    lines = [
        f"def __init__({', '.join(listed)}):",
        f"    if _eqxlike_get_cached({self}) is not _eqxlike_initialising:",
        f"        _eqxlike_refuse({self})",
    ]
    annotations = dict(generated.__annotations__)
    fields = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
    for index, each in enumerate(fields):
        value = each.name
        if each.default_factory is not dataclasses.MISSING:
            factory, missing = f"_eqxlike_factory{index}", f"_eqxlike_missing{index}"
            namespace[factory] = each.default_factory
            value = f"{factory}()"
            if each.init:
                # The placeholder that `dataclasses` uses as the default of the parameter.
                namespace[missing] = inspect.signature(generated).parameters[each.name].default
                value = f"{value} if {each.name} is {missing} else {each.name}"
        elif not each.init:
            continue
        lines.append(f"    _eqxlike_set({self}, {each.name!r}, {value})")
        converter = each.metadata.get("converter")
        if each.init and converter is not None:
            annotations[each.name] = _input_annotation(converter)
    if hasattr(cls, "__post_init__"):
        # `__post_init__` takes the values of the `InitVar`s, in the order of declaration.
        declared: Any = vars(cls)["__dataclass_fields__"]
        variables = {*parameters} - {each.name for each in fields}
        passed = ", ".join(name for name in declared if name in variables)
        lines.append(f"    {self}.__post_init__({passed})")
    origin = f"__init__ of {cls.__module__}.{cls.__qualname__}"
    init: Any = compile_function(lines, namespace, origin)
    for name in ("__module__", "__qualname__", "__defaults__", "__kwdefaults__"):
        setattr(init, name, getattr(generated, name))
    init.__annotations__ = annotations
    return init


def _refuse(module: Any) -> NoReturn:
    raise dataclasses.FrozenInstanceError(
        f"cannot call `__init__` of a {type(module).__name__} again: a Module is frozen."
    )


def _input_annotation(converter: Callable[[Any], Any]) -> Any:
    """The annotation of a converter's first parameter; `Any` if there is no annotation."""
    try:
        first = next(iter(inspect.signature(converter).parameters.values()), None)
    except (TypeError, ValueError):
        return Any
    return Any if first is None or first.annotation is first.empty else first.annotation
