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
    """Options of our own Module classes, which users' classes do not have.

    A class statement sets them: `class State(Module, _traits=Traits(is_immutable=False))`.
    Subclasses inherit all but `flattening` and `frozen_fields`.

    - `is_immutable`: whether instances never change. The partition of a mutable one is not cached.
    - `complete`: a function that is called with the `__dict__` of an unflattened instance and adds
      values that are derived from the fields.
    - `flattening`: a function from the codec of the class to an object with the functions by which
      JAX flattens instances.
    - `frozen_fields`: the fields in which arrays are frozen.
    - `unfrozen`: the class without frozen arrays, if this class has frozen arrays.
    - `is_layer`: whether a call gets a name in a traced program; false for wrappers.
    """

    is_immutable: bool = True
    complete: Callable[[dict[str, Any]], None] | None = None
    flattening: Callable[[Codec], Any] | None = None
    frozen_fields: tuple[str, ...] = ()
    unfrozen: type | None = None
    is_layer: bool = True


@dataclasses.dataclass(slots=True)
class ClassRecord:
    """The metaclass's record of one class; complete once the class is a dataclass.

    - `cls`: the class.
    - `makes_init`: whether its `__init__` is generated.
    - `is_forced`: whether the class statement declares it abstract.
    - `is_strict`: whether it follows the rules of strict classes.
    - `traits`: its options, if it is one of our own classes.
    - `derived`: the subclasses generated from it, which freeze arrays or report calls.
    - `codec`: the functions that flatten and unflatten instances.
    - `defaults`: the fields with a default, and the defaults.
    - `converters`: the fields with a converter, and the converters.
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
    """The record of `cls` itself; `None` if it is not a Module class, or not complete yet."""
    return vars(cls).get(RECORD)


class StoredFunction:
    """The base of descriptors for a function of a Module class.

    It is callable, and an instance of `types.FunctionType` to `isinstance`: class decorators such
    as `beartype` and `typeguard` look for functions in `vars(cls)` and replace them.
    """

    __class__ = property(lambda self: types.FunctionType)  # pyright: ignore

    def __init__(self, function: Callable[..., Any]):
        wrapper: Any = self
        functools.update_wrapper(wrapper, function)
        # A plain function has no `__wrapped__`.
        del wrapper.__wrapped__
        self.function = function

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # For example `__code__` and `__defaults__`. During a copy the instance is still empty.
        if "function" not in vars(self):
            raise AttributeError(name)
        return getattr(self.function, name)


# Module classes that are pickled by value, as cloudpickle does for classes of `__main__`.
#
# Unpickling first makes an empty class with the same name and bases, and then sets its attributes.
# The empty class has no fields, but the metaclass has already generated code for it and registered
# the code with JAX. So a record is pickled as a `CarriedClass`. When unpickling sets it as an
# attribute of the class, the metaclass calls its `restore` instead, which completes the class.


_KEPT = ("makes_init", "is_forced", "is_strict", "traits", "defaults", "converters")
"""The attributes of a record that are pickled unchanged."""


class CarriedClass:
    """A pickled record, with the parts of the class that pickling by value leaves out."""

    layout: Layout
    fields: dict[str, dataclasses.Field]
    abstract: frozenset[str]

    def restore(self, cls: Any) -> None:
        """Completes an empty class by the pickled fields, codec and record."""
        for each in self.fields.values():
            for name in ("default", "default_factory"):
                # Unpickling makes a new object of `MISSING`.
                if isinstance(getattr(each, name), type(dataclasses.MISSING)):
                    setattr(each, name, dataclasses.MISSING)
        # The setter of the metaclass would add the inherited fields and abstract names.
        type.__setattr__(cls, "__dataclass_fields__", self.fields)
        type.__setattr__(cls, "__abstractmethods__", self.abstract)
        record: ClassRecord = cls._eqxlike_class
        for name in _KEPT:
            setattr(record, name, getattr(self, name))
        codec = generate_codec(cls, self.layout, record.traits.complete)
        # JAX keeps the functions with which a class was registered, so their code is replaced.
        functions = {
            name: replace_body(getattr(record.codec, name), getattr(codec, name))
            for name in ("flatten", "flatten_with_keys", "unflatten")
        }
        record.codec = dataclasses.replace(codec, **functions)
