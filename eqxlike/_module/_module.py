"""What a Module is: a frozen dataclass that is a pytree."""

import abc
import dataclasses
import inspect
import types
from collections.abc import Callable
from typing import Any, dataclass_transform

import jax.tree_util as jtu

from .._pytree import tree_equal, tree_pformat
from ._codec import Codec, make_codec
from ._field import check_static, converter_of, field
from ._kept import (
    INITIALISING,
    KeepsPartition,
    drop_kept,
    has_default,
    set_kept,
    stored_fields,
)


# Not `frozen_default=True`: a type checker would refuse the assignments of a custom `__init__`.
@dataclass_transform(field_specifiers=(field, dataclasses.field))
class ModuleMeta(abc.ABCMeta):
    """Makes each subclass of `Module` a frozen dataclass and registers it as a pytree."""

    _eqxlike_codec: Codec
    _eqxlike_converters: tuple[tuple[str, Callable[[Any], Any]], ...]
    _eqxlike_defaults: tuple[tuple[str, Any], ...]

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any], /, **kwargs):
        cls = super().__new__(mcs, name, bases, namespace, **kwargs)
        for key, value in namespace.items():
            if inspect.isfunction(value) and not (key.startswith("__") and key.endswith("__")):
                setattr(cls, key, Method(value))
        # As everywhere in Python, a subclass inherits an `__init__` that somebody wrote.
        makes_init = cls.__init__ is object.__init__ or (
            "__init__" not in namespace and hasattr(cls.__init__, _IS_GENERATED)
        )
        dataclasses.dataclass(init=makes_init, repr=False, eq=False, frozen=True)(cls)
        if makes_init:
            # On the function, not in a table: `functools.wraps` carries it to a patched one.
            setattr(cls.__init__, _IS_GENERATED, True)
        # `dataclass` refuses assignment always; `KeepsPartition` allows it in `__init__`.
        del cls.__setattr__, cls.__delattr__
        _take_defaults_off(cls)
        codec = make_codec(cls)
        cls._eqxlike_codec = codec
        fields = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
        cls._eqxlike_defaults = tuple(
            (each.name, each.default) for each in fields if each.default is not dataclasses.MISSING
        )
        cls._eqxlike_converters = tuple(
            (each.name, converter)
            for each in fields
            if (converter := converter_of(each)) is not None
        )
        jtu.register_pytree_with_keys(cls, codec.flatten_with_keys, codec.unflatten, codec.flatten)
        return cls

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        self: Any = cls.__new__(cls, *args, **kwargs)  # pyright: ignore[reportArgumentType]
        if not isinstance(self, cls):
            return self
        set_kept(self, INITIALISING)
        try:
            self.__init__(*args, **kwargs)
            for name, default in cls._eqxlike_defaults:
                if name not in stored_fields(self):
                    object.__setattr__(self, name, default)
            for name, converter in cls._eqxlike_converters:
                object.__setattr__(self, name, converter(getattr(self, name)))
        finally:
            drop_kept(self)
        _check_fields(self)
        for base in cls.__mro__:
            if "__check_init__" in base.__dict__:
                base.__dict__["__check_init__"](self)
        return self

    def __getattr__(cls, name: str) -> Any:
        # `Class.field` is the default of the field, as for any dataclass.
        if not name.startswith("__") and has_default(cls, name):
            return cls.__dataclass_fields__[name].default
        raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")

    @property
    def __signature__(cls) -> inspect.Signature:
        # Without this `inspect` would show the `*args, **kwargs` of `__call__` above.
        signature = inspect.signature(cls.__init__)
        return signature.replace(parameters=list(signature.parameters.values())[1:])


_IS_GENERATED = "_eqxlike_is_generated"


def _take_defaults_off(cls: Any) -> None:
    """Takes the defaults of fields out of the class, where instances would find them.

    An unread Module has no fields in its `__dict__` yet: reading one must reach `__getattr__`.
    """
    for name in cls.__dataclass_fields__:
        value = cls.__dict__.get(name)
        is_data_descriptor = hasattr(type(value), "__set__")
        if name in cls.__dict__ and has_default(cls, name) and not is_data_descriptor:
            delattr(cls, name)


class Method:
    """A function in the body of a Module: accessed on an instance it gives a `BoundMethod`."""

    def __init__(self, function: Callable[..., Any]):
        self.__wrapped__ = function

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self.__wrapped__
        return bind(self.__wrapped__, instance)


class Module(KeepsPartition, metaclass=ModuleMeta):
    """Base of all models: subclass it, annotate fields, write methods.

    A subclass is a frozen dataclass and a pytree whose children are its fields, in the order of
    their declaration; those marked `field(static=True)` are part of the structure instead.
    `__init__` is made by `dataclasses` unless the class, or one above it, has its own; a custom
    one assigns each declared field once. `__check_init__`, if there, runs after `__init__` for
    each class of the hierarchy and may raise. Methods accessed on an instance are pytrees.

    Two Modules are equal if `tree_equal` says so; the hash is that of the leaves, so that a
    Module with arrays in it has none.

    **Raises:** `TypeError` at construction if a field was not set, or if a static field was given
    an array or something unhashable; `dataclasses.FrozenInstanceError` at assignment.

    !!! example

        >>> import eqxlike as eqx, jax.numpy as jnp
        >>> class Affine(eqx.Module):
        ...     scale: jnp.ndarray
        ...     shift: float = 0.0
        ...     def __call__(self, x):
        ...         return self.scale * x + self.shift
        >>> affine = Affine(jnp.array(2.0))
        >>> affine
        Affine(scale=weak_f32[])
        >>> print(affine(3.0))
        6.0
    """

    def __eq__(self, other: object) -> Any:
        return tree_equal(self, other)

    def __hash__(self) -> int:
        return hash(tuple(jtu.tree_leaves(self)))

    def __repr__(self) -> str:
        return tree_pformat(self)


class Wrapper(Module):
    """Base of Modules that stand for a callable, their `__wrapped__`, and show its metadata.

    The metadata is read from what is wrapped, not stored: so it is no part of the tree.
    """

    @property
    def __wrapped__(self) -> Any:
        raise AttributeError("__wrapped__")

    @property
    def __name__(self) -> str:
        return self.__wrapped__.__name__

    @property
    def __doc__(self) -> str | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.__wrapped__.__doc__


class BoundMethod(Wrapper):
    """What `module.method` gives: callable, and a pytree with the instance as its child.

    So it may be passed to a transformation, which then sees the arrays of the instance. Two are
    equal if function and instance are.
    """

    __func__: Callable[..., Any]
    __self__: Module

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self.__self__, *args, **kwargs)

    def __repr__(self) -> str:
        return f"<bound method {type(self.__self__).__name__}.{self.__name__} of {self.__self__!r}>"

    @property
    def __wrapped__(self) -> Any:
        return self.__func__

    @property
    def __signature__(self) -> inspect.Signature:
        signature = inspect.signature(self.__func__)
        return signature.replace(parameters=list(signature.parameters.values())[1:])


def bind(function: Callable[..., Any], instance: Any) -> Any:
    """`function` as a method of `instance`: a pytree if the instance is a Module."""
    if isinstance(instance, Module):
        # Without the metaclass's checks, which are for what users write.
        return BoundMethod._eqxlike_codec.unflatten((), (function, instance))
    return types.MethodType(function, instance)


def _check_fields(module: Module) -> None:
    cls = type(module)
    missing = [
        name
        for name in (*cls._eqxlike_codec.dynamic_names, *cls._eqxlike_codec.static_names)
        if not hasattr(module, name)
    ]
    if missing:
        names = ", ".join(map(repr, missing))
        plural = "s" if len(missing) > 1 else ""
        raise TypeError(f"Field{plural} {names} of {cls.__name__} not initialized by `__init__`.")
    for name in cls._eqxlike_codec.static_names:
        check_static(cls, name, getattr(module, name))
    for name in cls._eqxlike_codec.dynamic_names:
        value = getattr(module, name)
        if type(value) is BoundMethod and value.__self__ is module:
            raise ValueError(
                f"{cls.__name__}.{name} was given a method of the same instance in `__init__`. "
                "The method would hold its own copy of the instance, which later updates leave "
                f"behind. Write a method named {name!r} that calls "
                f"`self.{value.__name__}(...)` instead."
            )
