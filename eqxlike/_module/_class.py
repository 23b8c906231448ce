"""The record that the metaclass stores in each Module class, and descriptors for its functions."""

import dataclasses
import functools
import pickle
import types
from collections.abc import Callable, Hashable
from typing import Any

from .._traceback import replace_body
from ._codec import Codec, Layout, generate_codec

RECORD = "_eqxlike_class"
"""The name of the attribute in which a Module class stores its record."""


@dataclasses.dataclass(frozen=True, slots=True)
class Traits:
    """Options that only Module classes of this package have.

    A class statement sets them: `class State(Module, _traits=Traits(is_immutable=False))`.
    Subclasses inherit all but `flattening` and `frozen_fields`.

    - `is_immutable`: `True` if instances never change. The partition of a mutable instance is not
      cached.
    - `complete`: a function that is called with the `__dict__` of each unflattened instance, and
      adds values that are derived from the fields.
    - `flattening`: a function that takes the codec of the class and returns an object with the
      methods by which JAX flattens instances.
    - `frozen_fields`: the names of the fields in which arrays are frozen.
    - `unfrozen`: the same class without frozen arrays, if this class has frozen arrays.
    - `is_layer`: `True` if a call gets a name in a traced program; `False` for wrappers.
    """

    is_immutable: bool = True
    complete: Callable[[dict[str, Any]], None] | None = None
    flattening: Callable[[Codec], Any] | None = None
    frozen_fields: tuple[str, ...] = ()
    unfrozen: type | None = None
    is_layer: bool = True


@dataclasses.dataclass(slots=True)
class ClassRecord:
    """The metaclass's record of one class. It is complete once the class is a dataclass.

    - `cls`: the class.
    - `makes_init`: whether the `__init__` of the class is generated.
    - `is_forced`: whether the class statement declares the class abstract.
    - `is_strict`: whether the class must follow the rules of strict classes.
    - `traits`: the options of the class, if it is a class of this package.
    - `derived`: the generated subclasses of the class, which freeze arrays or report calls.
    - `codec`: the functions that flatten and unflatten instances.
    - `defaults`: for each field with a default, a pair of the field's name and the default.
    - `converters`: for each field with a converter, a pair of the field's name and the converter.
    """

    cls: type
    makes_init: bool
    is_forced: bool
    is_strict: bool
    traits: Traits
    derived: dict[Hashable, type] = dataclasses.field(default_factory=dict)
    codec: Codec = dataclasses.field(init=False)
    defaults: tuple[tuple[str, Any], ...] = ()
    converters: tuple[tuple[str, Callable[[Any], Any]], ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        if self.traits.flattening is not None:
            raise pickle.PicklingError(
                f"cannot pickle the class of a {self.cls.__name__} with frozen arrays; pickle an "
                "instance of it."
            )
        own: Any = vars(self.cls)
        state = {
            **{name: getattr(self, name) for name in _KEPT},
            "layout": self.codec.layout,
            "fields": own["__dataclass_fields__"],
            "abstract": own["__abstractmethods__"],
        }
        return CarriedClass, (), state


def own_record(cls: type) -> ClassRecord | None:
    """The record of `cls` itself; `None` if `cls` is not a Module class, or not complete yet."""
    return vars(cls).get(RECORD)


class StoredFunction:
    """Base class of descriptors for a function of a Module class.

    A descriptor is callable, and `isinstance(descriptor, types.FunctionType)` is true. Class
    decorators such as `beartype` and `typeguard` need this, because they look for functions in
    `vars(cls)` and replace them.
    """

    __class__ = property(lambda self: types.FunctionType)  # pyright: ignore

    def __init__(self, function: Callable[..., Any]):
        wrapper: Any = self
        functools.update_wrapper(wrapper, function)
        # The descriptor should look like a plain function, which has no `__wrapped__`.
        del wrapper.__wrapped__
        self.function = function

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # Python calls this method for `__code__`, `__defaults__` and so on. While a descriptor is
        # being copied, its `__dict__` is still empty.
        if "function" not in vars(self):
            raise AttributeError(name)
        return getattr(self.function, name)


# Module classes that are pickled by value, as cloudpickle does for classes of `__main__`.
#
# Unpickling first makes an empty class with the same name and bases, and then sets its attributes.
# The empty class has no fields, but the metaclass has already generated code for this class and
# registered the code with JAX. So the record of a class is pickled as a `CarriedClass`. When
# unpickling sets this `CarriedClass` as an attribute of the empty class, the metaclass instead
# calls `CarriedClass.restore`, which completes the class.


_KEPT = ("makes_init", "is_forced", "is_strict", "traits", "defaults", "converters")
"""The attributes of a `ClassRecord` that are pickled unchanged."""


class CarriedClass:
    """A pickled record, with the parts of the class that pickling by value leaves out."""

    layout: Layout
    fields: dict[str, dataclasses.Field]
    abstract: frozenset[str]

    def restore(self, cls: Any) -> None:
        """Gives an empty class the fields, codec and record of the pickled class."""
        for each in self.fields.values():
            for name in ("default", "default_factory"):
                # Unpickling makes a new object instead of `MISSING`, so the types are compared.
                if isinstance(getattr(each, name), type(dataclasses.MISSING)):
                    setattr(each, name, dataclasses.MISSING)
        # `type.__setattr__` bypasses the `__setattr__` of the metaclass, which would replace the
        # restored fields and abstract names.
        type.__setattr__(cls, "__dataclass_fields__", self.fields)
        type.__setattr__(cls, "__abstractmethods__", self.abstract)
        record: ClassRecord = cls._eqxlike_class
        for name in _KEPT:
            setattr(record, name, getattr(self, name))
        codec = generate_codec(cls, self.layout, record.traits.complete)
        # JAX keeps the functions with which the class was registered, so new code is put into them.
        functions = {
            name: replace_body(getattr(record.codec, name), getattr(codec, name))
            for name in ("flatten", "flatten_with_keys", "unflatten")
        }
        record.codec = dataclasses.replace(codec, **functions)
