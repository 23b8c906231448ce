"""What the metaclass puts into a Module class: its record, and its functions as descriptors."""

import dataclasses
import functools
import pickle
import types
from collections.abc import Callable, Hashable
from typing import Any

from .._traceback import replace_body
from ._codec import Codec, Layout, generate_codec

RECORD = "_eqxlike_class"
"""The name under which a Module class has its record."""


@dataclasses.dataclass(frozen=True, slots=True)
class Traits:
    """The traits by which one of our own Module classes differs from users' classes.

    The class statement sets them, `class State(Module, _traits=Traits(is_immutable=False))`.
    Subclasses inherit all but `flattening` and `frozen_fields`.

    - `is_immutable`: whether instances never change. If not, no partition of them is cached.
    - `complete`: a function called with the `__dict__` of an unflattened instance; it adds what can
      be derived from the fields.
    - `flattening`: a function from the codec of the class to the object by which JAX flattens.
    - `frozen_fields`: the fields in which arrays are frozen.
    - `unfrozen`: the same class without frozen arrays, if this one has some.
    - `is_layer`: whether a call gets its own name in a program. Calls of mere wrappers do not.
    """

    is_immutable: bool = True
    complete: Callable[[dict[str, Any]], None] | None = None
    flattening: Callable[[Codec], Any] | None = None
    frozen_fields: tuple[str, ...] = ()
    unfrozen: type | None = None
    is_layer: bool = True


@dataclasses.dataclass(slots=True)
class ClassRecord:
    """The metaclass's record of one class, complete once the class is a dataclass.

    - `cls`: the class.
    - `makes_init`: whether its `__init__` is generated.
    - `is_forced`: whether the class statement declares it abstract, whatever its body.
    - `is_strict`: whether it follows the rules of strict classes.
    - `traits`: how it differs from users' classes.
    - `derived`: the subclasses generated from it, with frozen arrays or observed.
    - `codec`: how instances are flattened.
    - `defaults`: the fields that have a default, with it.
    - `converters`: the fields that have a converter, with it.
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
        return _carry(self)


def own_record(cls: type) -> ClassRecord | None:
    """The record of `cls` itself; `None` if it is not a Module class, or not complete yet."""
    return vars(cls).get(RECORD)


class StoredFunction:
    """A function as a Module class stores it, in a descriptor.

    Read from `vars` of the class, it can be called, and `isinstance` takes it for a function: class
    decorators such as `beartype` and `typeguard` replace each `types.FunctionType` by another.
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


# Module classes pickled by value, as cloudpickle pickles those of `__main__`.
#
# Unpickling first makes such a class empty, with its name and bases, and then sets each of its
# attributes. By then the metaclass has generated code for a class without fields, and JAX has
# registered that code. So the record is pickled as a `CarriedClass`. The metaclass, asked to set
# that as an attribute, calls its `restore` instead, which gives the class what it lacks.


_KEPT = ("makes_init", "is_forced", "is_strict", "traits", "defaults", "converters")
"""The parts of a record that are pickled as they are."""


class CarriedClass:
    """A pickled record, with the parts of the class that pickling by value leaves out."""

    layout: Layout
    fields: dict[str, dataclasses.Field]
    abstract: frozenset[str]

    def restore(self, cls: Any) -> None:
        """Gives an empty class the fields, the codec and the record that were carried."""
        for each in self.fields.values():
            for name in ("default", "default_factory"):
                # Pickling by value makes the mark of a missing part another object.
                if isinstance(getattr(each, name), type(dataclasses.MISSING)):
                    setattr(each, name, dataclasses.MISSING)
        # The metaclass's setter would keep the inherited fields, and the abstract names of bases.
        type.__setattr__(cls, "__dataclass_fields__", self.fields)
        type.__setattr__(cls, "__abstractmethods__", self.abstract)
        record: ClassRecord = cls._eqxlike_class
        for name in _KEPT:
            setattr(record, name, getattr(self, name))
        codec = generate_codec(cls, self.layout, record.traits.complete)
        # JAX keeps the functions with which a class was registered: these must be the new ones.
        functions = {
            name: replace_body(getattr(record.codec, name), getattr(codec, name))
            for name in ("flatten", "flatten_with_keys", "unflatten")
        }
        record.codec = dataclasses.replace(codec, **functions)


def _carry(record: ClassRecord) -> tuple[Any, ...]:
    """What `pickle` takes for a record."""
    if record.traits.flattening is not None:
        raise pickle.PicklingError(
            f"cannot pickle the class of a {record.cls.__name__} with frozen arrays by itself; "
            "pickle an instance of it."
        )
    own: Any = vars(record.cls)
    state = {
        **{name: getattr(record, name) for name in _KEPT},
        "layout": record.codec.layout,
        "fields": own["__dataclass_fields__"],
        "abstract": own["__abstractmethods__"],
    }
    return CarriedClass, (), state
