"""Making a Module class a dataclass."""

import abc
import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, NoReturn

from .._traceback import compile_function
from ._abstract import abstract_names, take_abstract
from ._cached import INITIALISING, FrozenStorage, LazyAttribute, get_cached
from ._codec import carries_metadata
from ._field import converter_of, found_in_class


def make_dataclass(cls: Any, makes_init: bool) -> tuple[dataclasses.Field, ...]:
    """Makes `cls` a dataclass, with an `__init__` if `makes_init`, and returns its fields.

    `frozen=True` is not used, since `dataclasses` would then reject a user's `@dataclass` decorator
    on the class. Instead, the `__setattr__` of Modules freezes the instances.
    """
    annotations = inspect.get_annotations(cls)
    concrete = take_abstract(cls)
    if concrete is not None:
        cls.__annotations__ = concrete
    dataclasses.dataclass(init=makes_init, repr=False, eq=False)(cls)
    if concrete is not None:
        cls.__annotations__ = annotations
    # The faster `__init__` does not call `__setattr__`, so it is not used if a user wrote a
    # `__setattr__`.
    if makes_init and cls.__setattr__ is FrozenStorage.__setattr__:
        cls.__init__ = make_init(cls, cls.__init__)
    fields = dataclasses.fields(cls)
    for each in fields:
        # A method or property of this name in a base class stays, as in any dataclass.
        found = found_in_class(cls, each.name)
        is_default = each.name in vars(cls) and not hasattr(type(found), "__set__")
        if found is None or is_default or type(found) is LazyAttribute:
            type.__setattr__(cls, each.name, LazyAttribute(each.name, each.default))
    # The fields are attributes of the class now, so they override abstract attributes of its bases.
    abc.update_abstractmethods(cls)
    return fields


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


def amend(cls: Any, name: str, value: Any) -> Any:
    """Completes the `value` that `abc` or `dataclasses` sets as the attribute `name` of a class.

    `abc` and `dataclasses` set the attribute when the class is made. They set it again if the user
    decorates the class with `@dataclass`.
    """
    if name == "__abstractmethods__":
        # If this set is not empty, Python itself refuses to make instances.
        return value | abstract_names(cls)
    if name == "__dataclass_fields__":
        # If the fields are set a second time, the first fields are kept, because the second fields
        # lack the arguments of `field`.
        return {**value, **vars(cls).get(name, {})}
    return value


# The generated `__init__` of a Module class.
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
        "_eqxlike_initialising": INITIALISING,
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
        converter = converter_of(each)
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
        parameters = list(inspect.signature(converter).parameters.values())
    except (TypeError, ValueError):
        return Any
    if not parameters or parameters[0].annotation is inspect.Parameter.empty:
        return Any
    return parameters[0].annotation
