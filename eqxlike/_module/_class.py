"""What is known of a Module class beside its dataclass: one record, made with the class."""

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

RECORD = "_eqxlike_class"
"""The name under which a Module class has its record."""


@dataclasses.dataclass(frozen=True, slots=True)
class Codec:
    """For one class: which fields are children and which static, and the functions JAX calls.

    `flatten` returns `(children, statics)`, both tuples in the order of the names. They tell all
    that `unflatten` puts into an instance: `complete`, if there is one, is called with its
    `__dict__` and adds what follows from the fields.
    """

    dynamic_names: tuple[str, ...]
    static_names: tuple[str, ...]
    flatten: Callable[[Any], tuple[tuple[Any, ...], tuple[Any, ...]]]
    flatten_with_keys: Callable[[Any], tuple[tuple[Any, ...], tuple[Any, ...]]]
    unflatten: Callable[[tuple[Any, ...], Any], Any]
    complete: Callable[[dict[str, Any]], None] | None


@dataclasses.dataclass(frozen=True, slots=True)
class Traits:
    """How one of our own Module classes differs from those that users write.

    Given in the class statement, `class State(Module, _traits=Traits(is_fixed=False))`, and
    inherited but for `flattening`.

    - `is_fixed`: whether instances stay as they are built. If not, no partition of them is cached.
    - `complete`: called with the `__dict__` of an instance that was unflattened; adds what follows
        from its fields.
    - `flattening`: makes, of the codec of the class, what JAX is to flatten instances with.
    - `unfrozen`: the class of which this is one with frozen arrays.
    """

    is_fixed: bool = True
    complete: Callable[[dict[str, Any]], None] | None = None
    flattening: Callable[[Codec], Any] | None = None
    unfrozen: type | None = None


@dataclasses.dataclass(slots=True)
class ClassRecord:
    """What the metaclass knows of one class. The lower half is known once it is a dataclass.

    - `makes_init`: whether its `__init__` is generated.
    - `is_forced`: whether it was declared abstract by a word, with nothing abstract in it.
    - `is_strict`: whether it keeps the rules of strict classes.
    - `traits`: how it differs from the classes that users write.
    - `derived`: the subclasses that were made of it, by what they are made for.
    - `codec`: how instances are flattened.
    - `defaults`: of fields, by name.
    - `converters`: of fields, by name.
    """

    makes_init: bool
    is_forced: bool
    is_strict: bool
    traits: Traits
    derived: dict[Hashable, type] = dataclasses.field(default_factory=dict)
    codec: Codec = dataclasses.field(init=False)
    defaults: tuple[tuple[str, Any], ...] = ()
    converters: tuple[tuple[str, Callable[[Any], Any]], ...] = ()


def own_record(cls: type) -> ClassRecord | None:
    """The record of `cls` itself; `None` if it is no Module class, or is being made."""
    return vars(cls).get(RECORD)
