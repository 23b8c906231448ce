"""The record that each Module class has in addition to its dataclass, made with the class."""

import dataclasses
import pickle
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

RECORD = "_eqxlike_class"
"""The name under which a Module class has its record."""


class Layout(NamedTuple):
    """What the codec of a class is generated from.

    - `dynamic_names`, `static_names`: the names of the fields, children and static.
    - `stored_or_nothing`: those whose value is stored in an instance, or nowhere.
    - `asks_for_metadata`: whether instances may have their own metadata.
    """

    dynamic_names: tuple[str, ...]
    static_names: tuple[str, ...]
    stored_or_nothing: frozenset[str]
    asks_for_metadata: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Codec:
    """The names of a class's fields, children and static, and the functions that JAX calls.

    `flatten` returns `(children, statics)`, both tuples in the order of the names, which is all
    that `unflatten` needs. `complete`, unless it is `None`, is called with the `__dict__` of the
    new instance and adds what can be derived from the fields.
    """

    layout: Layout
    dynamic_names: tuple[str, ...]
    static_names: tuple[str, ...]
    flatten: Callable[[Any], tuple[tuple[Any, ...], tuple[Any, ...]]]
    flatten_with_keys: Callable[[Any], tuple[tuple[Any, ...], tuple[Any, ...]]]
    unflatten: Callable[[tuple[Any, ...], Any], Any]
    complete: Callable[[dict[str, Any]], None] | None


@dataclasses.dataclass(frozen=True, slots=True)
class Traits:
    """The traits by which one of our own Module classes differs from users' classes.

    The class statement sets them, `class State(Module, _traits=Traits(is_fixed=False))`.
    Subclasses inherit all but `flattening`.

    - `is_fixed`: whether instances never change. If not, no partition of them is cached.
    - `complete`: a function called with the `__dict__` of an unflattened instance; it adds what can
      be derived from the fields.
    - `flattening`: a function from the codec of the class to the object by which JAX flattens.
    - `unfrozen`: the same class without frozen arrays, if this one has some.
    - `is_layer`: whether a call gets its own name in a program. Calls of mere wrappers do not.
    """

    is_fixed: bool = True
    complete: Callable[[dict[str, Any]], None] | None = None
    flattening: Callable[[Codec], Any] | None = None
    unfrozen: type | None = None
    is_layer: bool = True


class CarriedClass:
    """The record of a class, as tools that pickle classes by value carry it; see `take_up`."""

    makes_init: bool
    is_forced: bool
    is_strict: bool
    traits: Traits
    layout: Layout
    defaults: tuple[tuple[str, Any], ...]
    converters: tuple[tuple[str, Callable[[Any], Any]], ...]
    fields: dict[str, dataclasses.Field]
    abstract: frozenset[str]


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
        if self.traits.flattening is not None:
            raise pickle.PicklingError(
                f"cannot pickle the class of a {self.cls.__name__} with frozen arrays by itself; "
                "pickle an instance of it."
            )
        names = ("makes_init", "is_forced", "is_strict", "traits", "defaults", "converters")
        own: Any = vars(self.cls)
        state = {
            **{name: getattr(self, name) for name in names},
            "layout": self.codec.layout,
            "fields": own["__dataclass_fields__"],
            "abstract": own["__abstractmethods__"],
        }
        return CarriedClass, (), state


def own_record(cls: type) -> ClassRecord | None:
    """The record of `cls` itself; `None` if it is not a Module class, or not complete yet."""
    return vars(cls).get(RECORD)
