"""Module classes that are pickled by value, as cloudpickle pickles those of `__main__`.

Where it is loaded, such a class is made empty first, with its name and bases, and then each of its
attributes is set. By then the metaclass has generated code for a class without fields, and JAX
knows that code. So among the attributes is a `CarriedClass`, the record of the class as it was;
when it is set, the new class becomes what it says.
"""

import dataclasses
from typing import Any

from .._codegen import replace_body
from ._class import CarriedClass, ClassRecord
from ._codec import generate_codec


def take_up(cls: Any, carried: CarriedClass) -> None:
    """Gives a class that was made empty the fields, the codec and the record that were carried."""
    for each in carried.fields.values():
        _mend_missing(each)
    # The setter of the metaclass would let the inherited fields, and what is abstract above, stay.
    type.__setattr__(cls, "__dataclass_fields__", carried.fields)
    type.__setattr__(cls, "__abstractmethods__", carried.abstract)
    record: ClassRecord = cls._eqxlike_class
    record.makes_init = carried.makes_init
    record.is_forced = carried.is_forced
    record.is_strict = carried.is_strict
    record.traits = carried.traits
    record.defaults = carried.defaults
    record.converters = carried.converters
    codec = generate_codec(cls, carried.layout, carried.traits.complete)
    # JAX keeps the functions with which a class was registered: these have to be the new ones.
    functions = {
        name: replace_body(getattr(record.codec, name), getattr(codec, name))
        for name in ("flatten", "flatten_with_keys", "unflatten")
    }
    record.codec = dataclasses.replace(codec, **functions)


def _mend_missing(field: dataclasses.Field) -> None:
    """Pickled by value, the mark of what a field lacks is another object."""
    for name in ("default", "default_factory"):
        if isinstance(getattr(field, name), type(dataclasses.MISSING)):
            setattr(field, name, dataclasses.MISSING)
