"""The `__init__` of a Module class that has none of its own.

`dataclasses` knows its parameters, but would assign through `__setattr__`. That of Modules asks
for each field whether the instance is in its `__init__`, where asking once is enough.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, NoReturn

from .._codegen import compile_function
from ._cached import INITIALISING, get_cached
from ._field import converter_of


def make_init(cls: type, generated: Callable[..., None]) -> Callable[..., None]:
    """The `__init__` that `dataclasses` has `generated` for `cls`, but assigning directly.

    The parameter of a field with a converter is annotated with what the converter takes.
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
                # `dataclasses` has put this in the place of the default.
                namespace[missing] = inspect.signature(generated).parameters[each.name].default
                value = f"{value} if {each.name} is {missing} else {each.name}"
        elif not each.init:
            continue
        lines.append(f"    _eqxlike_set({self}, {each.name!r}, {value})")
        converter = converter_of(each)
        if each.init and converter is not None:
            annotations[each.name] = _input_annotation(converter)
    if hasattr(cls, "__post_init__"):
        # It takes the parameters that are no fields, in the order of their declaration.
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
    """The annotation of a converter's first parameter; `Any` if it has none."""
    try:
        parameters = list(inspect.signature(converter).parameters.values())
    except (TypeError, ValueError):
        return Any
    if not parameters or parameters[0].annotation is inspect.Parameter.empty:
        return Any
    return parameters[0].annotation
