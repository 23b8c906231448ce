"""The Module: a frozen dataclass that is a pytree."""

import abc
import dataclasses
import functools
import inspect
import reprlib
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, dataclass_transform

import jax.tree_util as jtu

from .._pytree import tree_equal, tree_pformat
from .._traceback import hide_our_frames
from ._abstract import abstract_names, explain_abstract
from ._cached import INITIALISING, CachesPartition, Field, drop_cached, set_cached, stored_fields
from ._carried import take_up
from ._checks import check_all_set, check_values, explain_init, warn_of_post_init
from ._class import RECORD, CarriedClass, ClassRecord, Traits, own_record
from ._codec import make_codec
from ._dataclass import amend, found_in_class, make_dataclass
from ._field import converter_of, field
from ._metadata import METADATA, is_found_by_name
from ._naming import LayerCall
from ._strict import check_strict, read_strict


# With `frozen_default=True` a type checker would refuse the assignments of a custom `__init__`.
@dataclass_transform(field_specifiers=(field, dataclasses.field))
class ModuleMeta(abc.ABCMeta):
    """Makes each subclass of `Module` a frozen dataclass and registers it as a pytree."""

    _eqxlike_class: ClassRecord

    def __new__(
        mcs,
        name: str,
        bases: tuple[type, ...],
        namespace: dict[str, Any],
        /,
        *,
        is_abstract: bool = False,
        strict: Any = False,
        _traits: Traits | None = None,
        **kwargs: Any,
    ):
        cls = super().__new__(mcs, name, bases, namespace, **kwargs)
        traits = _inherited_traits(cls) if _traits is None else _traits
        # `namespace` will not do: an `__init_subclass__` or a `__set_name__` may have replaced some
        # of what stands in the body.
        own = dict(vars(cls))
        for key, value in own.items():
            if _is_method(key, value):
                setattr(cls, key, Method(value))
        if traits.is_layer and inspect.isfunction(own.get("__call__")):
            type.__setattr__(cls, "__call__", LayerCall(own["__call__"]))
        _install_mixin_methods(cls)
        # A subclass inherits an `__init__` that somebody wrote, even one that replaced a generated
        # one. A generated one is generated anew, for the fields that were added.
        owner = next(base for base in cls.__mro__ if "__init__" in vars(base))
        of_owner = None if owner is cls else own_record(owner)
        makes_init = owner is object or (of_owner is not None and of_owner.makes_init)
        strictness = read_strict(strict)
        is_forced = is_abstract or strict is None or (strictness and strictness.force_abstract)
        record = ClassRecord(
            cls=cls,
            makes_init=makes_init,
            is_forced=bool(is_forced),
            is_strict=strictness is not None,
            traits=traits,
        )
        type.__setattr__(cls, RECORD, record)
        fields = make_dataclass(cls, makes_init)
        if not makes_init and hasattr(cls, "__post_init__"):
            warn_of_post_init(cls)
        if strictness is not None:
            check_strict(cls, strictness, own, None if makes_init else owner)
        record.codec = codec = make_codec(cls, record.traits.complete)
        record.defaults = tuple(
            (each.name, each.default) for each in fields if each.default is not dataclasses.MISSING
        )
        record.converters = tuple(
            (each.name, converter)
            for each in fields
            if (converter := converter_of(each)) is not None
        )
        flattening = record.traits.flattening
        flat: Any = codec if flattening is None else flattening(codec)
        jtu.register_pytree_with_keys(cls, flat.flatten_with_keys, flat.unflatten, flat.flatten)
        return cls

    # A type checker that saw these would take every instance for what `__call__` returns, and let
    # any name of a class be assigned.
    if not TYPE_CHECKING:

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            try:
                self: Any = cls.__new__(cls, *args, **kwargs)  # pyright: ignore[reportArgumentType]
            except TypeError:
                if abstract_names(cls):
                    raise TypeError(explain_abstract(cls)) from None
                raise
            if not isinstance(self, cls):
                return self
            set_cached(self, INITIALISING)
            try:
                if self.__init__(*args, **kwargs) is not None:
                    raise TypeError(
                        f"{cls.__name__}.__init__() should assign fields and return None."
                    )
                for name, default in cls._eqxlike_class.defaults:
                    if name not in stored_fields(self):
                        object.__setattr__(self, name, default)
                check_all_set(self)
                for name, converter in cls._eqxlike_class.converters:
                    object.__setattr__(self, name, converter(getattr(self, name)))
            except TypeError as error:
                explain_init(cls, error, args, kwargs)
                raise
            finally:
                drop_cached(self)
            check_values(self)
            if hasattr(cls, "__check_init__"):
                for base in cls.__mro__:
                    if "__check_init__" in base.__dict__:
                        base.__dict__["__check_init__"](self)
            return self

        def __setattr__(cls, name: str, value: Any) -> None:
            if isinstance(value, CarriedClass):
                return take_up(cls, value)
            if _is_method(name, value):
                value = Method(value)
            if name == "__call__" and inspect.isfunction(value):
                value = LayerCall(value) if cls._eqxlike_class.traits.is_layer else value
            is_for_field = type(found_in_class(cls, name)) is Field and type(value) is not Field
            if is_for_field and not hasattr(type(value), "__set__"):
                # A value set under the name of a field must not hide the fields of lazy instances.
                value = Field(name, value)
            super().__setattr__(name, amend(cls, name, value))

        def __delattr__(cls, name: str) -> None:
            found = vars(cls).get(name)
            if type(found) is not Field:
                super().__delattr__(name)
            elif found.default is dataclasses.MISSING:
                raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")
            else:
                # The default goes. The `Field` stays, for lazy instances need it.
                super().__setattr__(name, Field(name, dataclasses.MISSING))

    def register(cls, subclass: type) -> NoReturn:
        raise ValueError(
            f"cannot register {subclass.__name__} as a virtual subclass of {cls.__name__}: an "
            f"instance of a Module is a pytree. Write `class {subclass.__name__}({cls.__name__})`."
        )

    @property
    def __signature__(cls) -> inspect.Signature:
        # Without this `inspect` would show the `*args, **kwargs` of `__call__` above.
        signature = inspect.signature(cls.__init__)
        return signature.replace(parameters=list(signature.parameters.values())[1:])


def _inherited_traits(cls: type) -> Traits:
    """The traits of the class above, but for `flattening`: frozen arrays are of one class alone."""
    above = (own_record(base) for base in cls.__mro__[1:])
    traits = next((record.traits for record in above if record is not None), Traits())
    return dataclasses.replace(traits, flattening=None)


def _is_method(name: str, value: Any) -> bool:
    is_magic = name.startswith("__") and name.endswith("__")
    return inspect.isfunction(value) and not is_magic


class Method:
    """A function in a Module class; accessed on an instance, it gives a `BoundMethod`.

    Taken from `vars` of the class, it is called as the function itself.
    """

    __wrapped__: Callable[..., Any]

    def __init__(self, function: Callable[..., Any]):
        functools.update_wrapper(self, function)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)

    @property
    def __isabstractmethod__(self) -> bool:
        return getattr(self.__wrapped__, "__isabstractmethod__", False)

    def __get__(self, instance: Any, owner: type) -> Any:
        return self.__wrapped__ if instance is None else _bind_static(self.__wrapped__, instance)


class MixinMethod:
    """A stand-in, in a Module class, for the function of that name in a plain class above it.

    The function is looked up at each access, in the classes that follow in the `__mro__` of the
    instance's class: with several bases, another class may have come in between.
    """

    def __init__(self, cls: type, name: str):
        self.cls = cls
        self.name = name

    @property
    def __isabstractmethod__(self) -> bool:
        return getattr(self._find(self.cls), "__isabstractmethod__", False)

    def _find(self, owner: type) -> Any:
        mro = owner.__mro__
        later = mro[mro.index(self.cls) + 1 :]
        return next(vars(base)[self.name] for base in later if self.name in vars(base))

    def __get__(self, instance: Any, owner: type) -> Any:
        found = self._find(owner)
        if instance is not None and inspect.isfunction(found):
            return _bind_static(found, instance)
        return found.__get__(instance, owner) if hasattr(found, "__get__") else found


def _install_mixin_methods(cls: Any) -> None:
    for base in cls.__mro__[1:]:
        if isinstance(base, ModuleMeta) or base in CachesPartition.__mro__:
            continue
        for name, value in vars(base).items():
            first = next(each for each in cls.__mro__ if name in vars(each))
            if _is_method(name, value) and first is base:
                setattr(cls, name, MixinMethod(cls, name))


class Module(CachesPartition, metaclass=ModuleMeta):
    """The base of all models: subclass it, annotate fields, write methods.

    A subclass is a frozen dataclass and a pytree whose children are its fields, in the order of
    their declaration; those marked `field(static=True)` are part of the structure instead.
    `__init__` is made as for any dataclass unless the class, or one above it, has its own; a
    custom one assigns each declared field once. `__check_init__`, if defined, runs after `__init__`
    for each class of the hierarchy and may raise. Methods accessed on an instance are pytrees.

    `abc.abstractmethod`, `AbstractVar` and `AbstractClassVar` say what subclasses must have.
    `class Model(eqxlike.Module, strict=True)` makes classes either abstract or final;
    `StrictConfig` lists the rules.

    Two Modules are equal if `tree_equal` says so. The hash is that of the leaves, so a Module with
    arrays in it has none.

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

    # A field may hold a method of `self`, whose repr shows `self`.
    @reprlib.recursive_repr("<recursive>")
    def __repr__(self) -> str:
        return tree_pformat(self)


class Wrapper(Module, _traits=Traits(is_layer=False)):
    """The base of Modules that stand for a callable, their `__wrapped__`, and show its metadata.

    The metadata is read from the callable, not stored. So it is no part of the tree, unless
    `module_update_wrapper` has stored what to show.
    """

    @property
    def __wrapped__(self) -> Any:
        raise AttributeError("__wrapped__")

    def __getattribute__(self, name: str) -> Any:
        # Properties will not do: under these names a class holds its own metadata.
        if name in METADATA:
            # `module_update_wrapper` may have put something else in the instance.
            if name in (fields := stored_fields(self)):
                return fields[name]
            return getattr(object.__getattribute__(self, "__wrapped__"), name)
        return object.__getattribute__(self, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A decorated function is pickled by its name, as functions are. It cannot be pickled by its
        # parts: under the name of the function that it wraps stands the wrapper.
        if is_found_by_name(self):
            return self.__qualname__
        return super().__reduce_ex__(protocol)


class BoundMethod(Wrapper):
    """A method bound to a Module, as `module.method` gives it: a pytree around the instance.

    So it may be passed to a transformation, which then sees the arrays of the instance. Two bound
    methods are equal if their functions and instances are.
    """

    __func__: Callable[..., Any] = field(static=True)
    __self__: Module

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.__func__(self.__self__, *args, **kwargs)
        except Exception as error:
            hide_our_frames(error)
            raise

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        # Python's own methods have one too: `help` knows by it that this is a method.
        return self

    def __repr__(self) -> str:
        return f"<bound method {type(self.__self__).__name__}.{self.__name__} of {self.__self__!r}>"

    @property
    def __wrapped__(self) -> Any:
        return self.__func__

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(types.MethodType(self.__func__, self.__self__))


class BoundWrapper(BoundMethod):
    """A bound method whose function is a child too, being a Module, as `filter_jit` returns it."""

    __func__: Callable[..., Any] = field()


def bind(function: Any, instance: Any) -> Any:
    """`function` bound to `instance`: a pytree if the instance is a Module."""
    if isinstance(function, Module) and isinstance(instance, Module):
        return BoundWrapper._eqxlike_class.codec.unflatten((), (function, instance))
    return _bind_static(function, instance)


def _bind_static(function: Any, instance: Any) -> Any:
    """`bind`, where function and instance are not both Modules."""
    if isinstance(instance, Module):
        # This leaves out the metaclass's checks, which are for what users write.
        return BoundMethod._eqxlike_class.codec.unflatten((function,), (instance,))
    return types.MethodType(function, instance)
