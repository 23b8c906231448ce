"""Checks of a new Module, and of a class, for known mistakes."""

import inspect
import warnings
from typing import Any

import jax

from .._compat import PjitFunction
from .._dtypes import explain_key
from ._cached import stored_fields
from ._class import RECORD, ClassRecord
from ._field import check_static


def check_all_set(module: Any) -> None:
    """Raises `TypeError` if a field was not set."""
    record: ClassRecord = type(module)._eqxlike_class
    codec = record.codec
    fields = stored_fields(module)
    missing = [
        name
        for name in (*codec.dynamic_names, *codec.static_names)
        if name not in fields and not hasattr(module, name)
    ]
    if missing:
        names = ", ".join(map(repr, missing))
        plural = "s" if len(missing) > 1 else ""
        raise TypeError(
            f"Field{plural} {names} of {type(module).__name__} not initialized by `__init__`."
        )


def check_values(module: Any) -> None:
    """Raises for a value that a field should not have; warns of one that is likely a slip."""
    cls = type(module)
    record: ClassRecord = cls._eqxlike_class
    codec = record.codec
    for name in codec.static_names:
        check_static(cls, name, getattr(module, name))
    for name in (*codec.dynamic_names, *codec.static_names):
        value = getattr(module, name)
        if callable(value):
            _refuse_own_method(module, name, value)
            hides_arrays = _hides_arrays(value)
        elif type(value) in _CONTAINERS:
            elements = value.values() if type(value) is dict else value
            hides_arrays = any(callable(each) and _hides_arrays(each) for each in elements)
        else:
            continue
        if hides_arrays:
            warnings.warn(
                f"{cls.__name__}.{name} was given a JAX-transformed callable around a Module. Its "
                "arrays are out of sight there: they are no leaves, and become constants. Apply "
                "`eqxlike.filter_jit` and its kin, or transform where it is called.",
                stacklevel=3,
            )


_CONTAINERS = frozenset({list, tuple, dict})


def _refuse_own_method(module: Any, name: str, value: Any) -> None:
    if hasattr(type(value), RECORD) and getattr(value, "__self__", None) is module:
        raise ValueError(
            f"{type(module).__name__}.{name} was given a method of the same instance in "
            "`__init__`. The method would hold its own copy of the instance, which later updates "
            f"leave behind. Write a method named {name!r} that calls "
            f"`self.{value.__name__}(...)` instead."
        )


def _hides_arrays(value: Any) -> bool:
    # `jax.vmap` and `jax.grad` return functions, `jax.jit` and custom rules objects of their own.
    if not (inspect.isfunction(value) or isinstance(value, _TRANSFORMED)):
        return False
    wrapped = getattr(value, "__wrapped__", None)
    return hasattr(type(wrapped), RECORD) and bool(jax.tree_util.tree_leaves(wrapped))


_TRANSFORMED = (PjitFunction, jax.custom_jvp, jax.custom_vjp)


def explain_init(cls: type, error: TypeError, args: Any, kwargs: Any) -> None:
    """Raises a clearer `TypeError` if `error`, of an `__init__`, is about its argument `key`."""
    if "PRNG key" not in str(error):
        return
    bound = inspect.signature(cls).bind(*args, **kwargs)
    bound.apply_defaults()
    if "key" in bound.arguments:
        explain_key(error, bound.arguments["key"], cls.__name__)


def warn_of_post_init(cls: type) -> None:
    """Warns that nothing calls the `__post_init__` of `cls`, which has an `__init__` of its own."""
    warnings.warn(
        f"{cls.__module__}.{cls.__qualname__} has both an `__init__` method and a `__post_init__` "
        "method. Only the `__init__` that a dataclass generates calls `__post_init__`: this one "
        "will not be called.",
        stacklevel=3,
    )
