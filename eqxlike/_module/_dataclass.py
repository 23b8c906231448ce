"""The making of a Module class into a dataclass."""

import abc
import dataclasses
import inspect
from typing import Any

from ._abstract import abstract_names, take_abstract
from ._cached import CachesPartition, Field
from ._init import make_init


def make_dataclass(cls: Any, makes_init: bool) -> tuple[dataclasses.Field, ...]:
    """Makes `cls` a dataclass, with an `__init__` if `makes_init`, and returns its fields.

    The `__setattr__` of Modules freezes instances. `dataclasses` is not told that they are frozen:
    it would refuse a `@dataclass` that somebody writes above the class.
    """
    annotations = inspect.get_annotations(cls)
    concrete = take_abstract(cls)
    if concrete is not None:
        cls.__annotations__ = concrete
    dataclasses.dataclass(init=makes_init, repr=False, eq=False)(cls)
    if concrete is not None:
        cls.__annotations__ = annotations
    # Where somebody wrote a `__setattr__`, each assignment goes through it.
    if makes_init and cls.__setattr__ is CachesPartition.__setattr__:
        cls.__init__ = make_init(cls, cls.__init__)
    fields = dataclasses.fields(cls)
    for each in fields:
        _install_field(cls, each)
    # A field overrides what is abstract above, now that it stands in the class.
    abc.update_abstractmethods(cls)
    return fields


def _install_field(cls: Any, each: dataclasses.Field) -> None:
    """Puts a `Field` in the class, in the place of the default.

    A method or a property of that name in a base stays, as for any dataclass.
    """
    found = found_in_class(cls, each.name)
    is_default = each.name in vars(cls) and not hasattr(type(found), "__set__")
    if found is None or is_default or type(found) is Field:
        type.__setattr__(cls, each.name, Field(each.name, each.default))


def amend(cls: Any, name: str, value: Any) -> Any:
    """The value to set in a class under `name`: `value`, and what its setter does not know.

    `abc` and `dataclasses` set theirs when the class is made, and again when a decorator asks.
    """
    if name == "__abstractmethods__":
        # Python then refuses to make instances, and making one needs no look at the class.
        return value | abstract_names(cls)
    if name == "__dataclass_fields__":
        # The second time, the arguments of `field` are no longer there to be read.
        return {**value, **vars(cls).get(name, {})}
    return value


def found_in_class(cls: type, name: str) -> Any:
    """The attribute `name` as a class, or one above it, stores it; no descriptor is asked."""
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)
