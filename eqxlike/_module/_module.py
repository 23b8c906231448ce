"""The Module: a frozen dataclass that is a pytree.

The metaclass `ModuleMeta` comes first: its `__new__` makes a class, and its `__call__` makes an
instance. The helpers of `__new__` and then of `__call__` follow, then `Module` itself, bound
methods and other wrappers, and pickling.

In short, for a class `Affine` with a field `scale` and a static field `axis`, `__new__` does this:

    Affine = dataclasses.dataclass(eq=False, repr=False)(Affine)    # _make_dataclass
    jtu.register_pytree_with_keys(                                  # _register, generate_codec
        Affine,
        lambda self: ([(GetAttrKey("scale"), self.scale)], self.axis),
        rebuild,                                                    # does not call `__init__`
    )

After `__init__`, assigning to a field raises an error (`FrozenStorage`).
"""

import abc
import copyreg
import dataclasses
import inspect
import pickle
import pkgutil
import reprlib
import sys
import types
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, dataclass_transform

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._compat import PjitFunction
from .._dtypes import explain_key
from .._pytree import tree_equal, tree_pformat
from .._traceback import explain_signature, hide_our_frames
from ._class import (
    RECORD,
    CarriedClass,
    ClassRecord,
    StoredFunction,
    Strictness,
    Traits,
    abstract_names,
    check_strict,
    explain_abstract,
    own_record,
    take_abstract,
)
from ._fields import (
    FrozenStorage,
    Initialising,
    LazyAttribute,
    check_static,
    clear_slot,
    error_of_hash,
    field,
    found_in_class,
    generate_codec,
    layout_of,
    make_init,
    set_cached,
    stored_fields,
)
from ._naming import LayerCall

_PACKAGE = __name__.partition(".")[0]


# With `frozen_default=True`, a type checker would reject the assignments in a custom `__init__`.
@dataclass_transform(field_specifiers=(field, dataclasses.field))
class ModuleMeta(abc.ABCMeta):
    """Makes each subclass of `Module` a frozen dataclass and registers it as a pytree."""

    _eqxlike_class: ClassRecord
    # The classes of the objects that `filter_jit` and other transformations return. These classes
    # have no public names, so `pickle` finds them in this namespace.
    eqxlike_wrappers = types.SimpleNamespace()

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
        # `namespace` may be out of date: `__init_subclass__` or `__set_name__` may change the
        # class.
        own = dict(vars(cls))
        # A subclass inherits an `__init__` that a user wrote. If the `__init__` was generated, it
        # is generated again, with the fields that the subclass adds.
        owner = next(base for base in cls.__mro__ if "__init__" in vars(base))
        owner_record = None if owner is cls else own_record(owner)
        if _traits is None:
            # The traits for frozen arrays are not inherited.
            above = (own_record(base) for base in cls.__mro__[1:])
            inherited = next((each.traits for each in above if each is not None), Traits())
            _traits = dataclasses.replace(inherited, flattening=None, frozen_fields=())
        strictness = strict if isinstance(strict, Strictness) else Strictness() if strict else None
        is_forced = is_abstract or strict is None or (strictness and strictness.force_abstract)
        record = ClassRecord(
            cls=cls,
            makes_init=owner is object or (owner_record is not None and owner_record.makes_init),
            is_forced=bool(is_forced),
            is_strict=strictness is not None,
            traits=_traits,
        )
        type.__setattr__(cls, RECORD, record)  # Read as `cls._eqxlike_class`.
        _store_methods(cls, own)
        fields = _make_dataclass(cls, record.makes_init)
        if not record.makes_init and hasattr(cls, "__post_init__"):
            warnings.warn(
                f"{cls.__module__}.{cls.__qualname__} has both an `__init__` method and a "
                "`__post_init__` method. Only the `__init__` that a dataclass generates calls "
                "`__post_init__`, so this `__post_init__` will not be called.",
                stacklevel=2,
            )
        if strictness is not None:
            check_strict(cls, strictness, own, None if record.makes_init else owner)
        _register(cls, record, fields)
        if cls.__module__.startswith(f"{_PACKAGE}._") and not record.traits.is_layer:
            # `setdefault` keeps the first class: a generated subclass has the same name, but is
            # made later.
            vars(ModuleMeta.eqxlike_wrappers).setdefault(cls.__qualname__.lstrip("_"), cls)
        return cls

    # These methods are hidden from type checkers. With `__call__`, a type checker would infer the
    # type of instances from it; with `__setattr__`, it would allow assigning to any name of a
    # class.
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
            set_cached(self, Initialising)
            try:
                if self.__init__(*args, **kwargs) is not None:
                    raise TypeError(
                        f"{cls.__name__}.__init__() should assign fields and return None."
                    )
                for name, default in cls._eqxlike_class.defaults:
                    if name not in stored_fields(self):
                        object.__setattr__(self, name, default)
                _check_all_set(self)
                for name, converter in cls._eqxlike_class.converters:
                    object.__setattr__(self, name, converter(getattr(self, name)))
            except (TypeError, ValueError) as error:
                _explain_init(cls, error, args, kwargs)
                raise
            finally:
                clear_slot(self)
            # From here on, the Module is frozen: `__check_init__` cannot assign fields.
            _check_values(self)
            if hasattr(cls, "__check_init__"):
                for base in cls.__mro__:
                    if "__check_init__" in base.__dict__:
                        base.__dict__["__check_init__"](self)
            return self

        def __setattr__(cls, name: str, value: Any) -> None:
            if isinstance(value, CarriedClass):
                return value.restore(cls)
            if _is_method(name, value):
                value = Method(value)
            elif name == "__call__" and type(value) is types.FunctionType:
                value = LayerCall(value) if cls._eqxlike_class.traits.is_layer else value
            is_for_field = type(found_in_class(cls, name)) is LazyAttribute
            if is_for_field and not hasattr(type(value), "__set__"):
                # The value is a new default. It must not hide the field of a lazy instance.
                value = value if type(value) is LazyAttribute else LazyAttribute(name, value)
            # `abc` and `dataclasses` set these two attributes when the class is made. They set them
            # again if the user decorates the class with `@dataclass`.
            if name == "__abstractmethods__":
                # If this set is not empty, Python itself refuses to make instances.
                value = value | abstract_names(cls)
            elif name == "__dataclass_fields__":
                # The first fields are kept, because the second fields lack the arguments of
                # `field`.
                value = {**value, **vars(cls).get(name, {})}
            super().__setattr__(name, value)

        def __delattr__(cls, name: str) -> None:
            found = vars(cls).get(name)
            if type(found) is not LazyAttribute:
                super().__delattr__(name)
            elif found.default is dataclasses.MISSING:
                raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")
            else:
                # Only the default is removed. The descriptor stays, since lazy instances need it.
                super().__setattr__(name, LazyAttribute(name))

    def register(cls, subclass: type) -> NoReturn:
        raise ValueError(
            f"cannot register {subclass.__name__} as a virtual subclass of {cls.__name__}: its "
            "instances would not be pytrees. Write "
            f"`class {subclass.__name__}({cls.__name__})`."
        )

    @property
    def __signature__(cls) -> inspect.Signature:
        # Without this property, `inspect` would show the `*args, **kwargs` of `__call__` above.
        signature = inspect.signature(cls.__init__)
        return signature.replace(parameters=list(signature.parameters.values())[1:])


# --- How a class is made ---


def _store_methods(cls: Any, own: dict[str, Any]) -> None:
    """Stores descriptors in `cls` for its functions.

    The functions of base classes that are not Modules get descriptors too.
    """
    for key, value in own.items():
        if key == "__call__" or _is_method(key, value):
            # `ModuleMeta.__setattr__` replaces the function by a descriptor.
            setattr(cls, key, value)
    for base in cls.__mro__[1:]:
        if isinstance(base, ModuleMeta) or base in FrozenStorage.__mro__:
            continue
        for key, value in vars(base).items():
            first = next(each for each in cls.__mro__ if key in vars(each))
            if _is_method(key, value) and first is base:
                setattr(cls, key, MixinMethod(cls, key))


def _is_method(name: str, value: Any) -> bool:
    is_magic = name.startswith("__") and name.endswith("__")
    return type(value) is types.FunctionType and not is_magic


class Method(StoredFunction):
    """Descriptor for a function of a Module class; on an instance, it returns a `BoundMethod`."""

    def __get__(self, instance: Any, owner: type) -> Any:
        return self.function if instance is None else _bind_static(self.function, instance)


class MixinMethod:
    """Descriptor in the Module class `cls` for a function of a base class that is not a Module.

    Each access looks for the function in the `__mro__` of the instance's class, after `cls`. The
    result may differ between subclasses of `cls`, since a subclass may have further bases.
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
        if instance is not None and type(found) is types.FunctionType:
            return _bind_static(found, instance)
        return found.__get__(instance, owner) if hasattr(found, "__get__") else found


def _make_dataclass(cls: Any, makes_init: bool) -> tuple[dataclasses.Field, ...]:
    """Makes `cls` a dataclass, with an `__init__` if `makes_init`, and returns its fields.

    `frozen=True` is not used, since `dataclasses` would then reject a user's `@dataclass` decorator
    on the class. Instead, the `__setattr__` of Modules freezes the instances.
    """
    annotations = inspect.get_annotations(cls)
    concrete = take_abstract(cls)
    if concrete is not None:
        cls.__annotations__ = concrete
    dataclasses.dataclass(init=makes_init, repr=False, eq=False)(cls)
    if concrete is not None:
        cls.__annotations__ = annotations
    # The faster `__init__` does not call `__setattr__`, so it is not used if a user wrote a
    # `__setattr__`.
    if makes_init and cls.__setattr__ is FrozenStorage.__setattr__:
        cls.__init__ = make_init(cls, cls.__init__)
    fields = dataclasses.fields(cls)
    for each in fields:
        # A method or property of this name in a base class stays, as in any dataclass.
        found = found_in_class(cls, each.name)
        is_default = each.name in vars(cls) and not hasattr(type(found), "__set__")
        if found is None or is_default or type(found) is LazyAttribute:
            type.__setattr__(cls, each.name, LazyAttribute(each.name, each.default))
    # The fields are attributes of the class now, so they override abstract attributes of its bases.
    abc.update_abstractmethods(cls)
    return fields


def _register(cls: Any, record: ClassRecord, fields: tuple[dataclasses.Field, ...]) -> None:
    """Completes the record of a dataclass, and registers the class with JAX as a pytree."""
    record.defaults = tuple(
        (each.name, each.default) for each in fields if each.default is not dataclasses.MISSING
    )
    record.converters = tuple(
        (each.name, converter)
        for each in fields
        if (converter := each.metadata.get("converter")) is not None
    )
    traits = record.traits
    record.codec = generate_codec(cls, layout_of(cls), traits.complete)
    flat: Any = record.codec if traits.flattening is None else traits.flattening(record.codec)
    jtu.register_pytree_with_keys(cls, flat.flatten_with_keys, flat.unflatten, flat.flatten)


# --- How an instance is made ---


def _check_all_set(module: Any) -> None:
    """Raises `TypeError` if a field was not set."""
    layout = type(module)._eqxlike_class.codec.layout
    fields = stored_fields(module)
    missing = [
        name
        for name in (*layout.dynamic_names, *layout.static_names)
        if name not in fields and not hasattr(module, name)
    ]
    if missing:
        names = ", ".join(map(repr, missing))
        plural = "s" if len(missing) > 1 else ""
        raise TypeError(
            f"Field{plural} {names} of {type(module).__name__} not initialized by `__init__`."
        )


def _check_values(module: Any) -> None:
    """Raises an error if a field has an invalid value; warns if a field hides arrays."""
    cls = type(module)
    layout = cls._eqxlike_class.codec.layout
    for name in layout.static_names:
        check_static(cls, name, getattr(module, name))
    for name in (*layout.dynamic_names, *layout.static_names):
        value = getattr(module, name)
        if callable(value):
            if hasattr(type(value), RECORD) and getattr(value, "__self__", None) is module:
                raise ValueError(
                    f"{cls.__name__}.{name} was given a method of the same instance in "
                    "`__init__`. The method would hold its own copy of the instance, which later "
                    f"updates would not change. Write a method named {name!r} that calls "
                    f"`self.{value.__name__}(...)` instead."
                )
            hides_arrays = _hides_arrays(value)
        elif type(value) in (list, tuple, dict):
            elements = value.values() if type(value) is dict else value
            hides_arrays = any(callable(each) and _hides_arrays(each) for each in elements)
        else:
            continue
        if hides_arrays:
            warnings.warn(
                f"{cls.__name__}.{name} was given a JAX-transformed callable around a Module. It "
                "hides the arrays of the Module: they are not leaves, and become constants. Use "
                "`eqxlike.filter_jit` and the other filtered transformations, or transform the "
                "callable where it is called.",
                stacklevel=3,
            )


def _hides_arrays(value: Any) -> bool:
    # `jax.vmap` and `jax.grad` return functions; `jax.jit` and custom derivatives return objects.
    transformed = (types.FunctionType, PjitFunction, jax.custom_jvp, jax.custom_vjp)
    if not isinstance(value, transformed):
        return False
    wrapped = getattr(value, "__wrapped__", None)
    return hasattr(type(wrapped), RECORD) and bool(jax.tree_util.tree_leaves(wrapped))


def _explain_init(cls: type, error: Exception, args: Any, kwargs: Any) -> None:
    """Explains an `error` of an `__init__` if its arguments do not fit, or `key` is wrong."""
    signature = inspect.signature(cls)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError:
        error.args = (f"{error}. {explain_signature(cls.__name__, signature, args, kwargs)}",)
        return
    if not any(words in str(error) for words in ("PRNG key", "a single key")):
        return
    bound.apply_defaults()
    if "key" in bound.arguments:
        explain_key(error, bound.arguments["key"], cls.__name__)


# --- The base of all models ---


class Module(FrozenStorage, metaclass=ModuleMeta):
    """Base class of all models. Subclass it, annotate fields, write methods.

    A subclass is a frozen dataclass and a pytree. Its children are its fields, in the order of
    declaration. Fields marked `field(static=True)` are not children, but part of the structure.

    `__init__` is generated, as for any dataclass, unless the class or a base class defines it. A
    custom `__init__` must assign each field. After `__init__`, the method `__check_init__` of the
    class and of each base class is called, if it exists; it may raise an error. A method that is
    read from an instance is a pytree.

    `abc.abstractmethod`, `AbstractVar` and `AbstractClassVar` declare what subclasses must define.
    With `class Model(eqxlike.Module, strict=True)`, a class must be either abstract or final;
    `StrictConfig` lists the rules.

    `==` compares two Modules by `tree_equal`. The hash of a Module is computed from its leaves, so
    a Module with arrays is not hashable.

    **Raises:**

    - `TypeError` at construction if a field is not set.
    - `TypeError` at construction if the value of a static field contains an array, or is
      neither hashable nor a container of parts that are.
    - `dataclasses.FrozenInstanceError` on assignment to a field.

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
        try:
            return hash(tuple(jtu.tree_leaves(self)))
        except TypeError:
            raise TypeError(_explain_hash(self)) from None

    # A field may hold a method of `self`. The `repr` of the method contains the `repr` of `self`,
    # so the recursion would not end.
    @reprlib.recursive_repr("<recursive>")
    def __repr__(self) -> str:
        return tree_pformat(self)


def _explain_hash(module: Any) -> str:
    """The error message that says why a Module has no hash."""
    is_method = isinstance(module, BoundMethod)
    name = type(module.__self__ if is_method else module).__name__.lstrip("_")
    leaves = jtu.tree_leaves_with_path(module)
    path, leaf = next(each for each in leaves if error_of_hash(each[1]) is not None)
    return (
        f"{f'the method {name}.{module.__name__}' if is_method else f'a {name}'} is not hashable: "
        f"its leaf {jtu.keystr(path).removeprefix('.__self__')} is {tree_pformat(leaf)}. A Module "
        "with arrays has no hash, but JAX hashes functions and static arguments, and a dict hashes "
        "its keys. Instead of `jax.jit`, use `eqxlike.filter_jit`; instead of `jax.checkpoint`, "
        "`eqxlike.filter_checkpoint`; instead of `jax.lax.scan`, `eqxlike.loops.scan`. To other "
        "functions, such as `jax.lax.cond`, pass a lambda: `lambda *args: f(*args)`."
    )


# --- Methods of an instance, which are pytrees, and other wrappers of callables ---


METADATA = frozenset({"__name__", "__qualname__", "__doc__", "__module__", "__annotations__"})
"""The attributes by which Python describes a callable."""


class Wrapper(Module, _traits=Traits(is_layer=False)):
    """Base class of Modules that wrap a callable. `__wrapped__` returns the callable.

    A wrapper shows the name and documentation of the callable. It reads both from the callable and
    stores neither. So neither is part of the tree, unless `module_update_wrapper` has stored other
    metadata in the wrapper.
    """

    @property
    def __wrapped__(self) -> Any:
        raise AttributeError("__wrapped__")

    def __getattribute__(self, name: str) -> Any:
        # These attributes cannot be properties, since the class stores its own metadata under the
        # same names.
        if name in METADATA:
            # `module_update_wrapper` may have stored other metadata in the instance.
            if name in (fields := stored_fields(self)):
                return fields[name]
            return getattr(object.__getattribute__(self, "__wrapped__"), name)
        return object.__getattribute__(self, name)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else bind(self, instance)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A decorated function is pickled by name, like any function. Pickling its parts would fail,
        # because the name of the wrapped function now refers to the wrapper. The object that is
        # found by name may be another, equal wrapper, since a map over a tree makes a new wrapper.
        found = _found_by_name(self)
        if type(found) is type(self) and (found is self or found == self):
            return pkgutil.resolve_name, (f"{self.__module__}:{self.__qualname__}",)
        return super().__reduce_ex__(protocol)


class BoundMethod(Wrapper):
    """A method bound to a Module, such as `module.method`: a pytree with the instance as its child.

    A transformation of a bound method, or of a function with a bound method as an argument, sees
    the arrays of the instance. Two bound methods are equal if their functions and instances are
    equal.
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
        # This method does nothing, but `help` recognises a method by its `__get__`.
        return self

    def __repr__(self) -> str:
        return f"<bound method {type(self.__self__).__name__}.{self.__name__} of {self.__self__!r}>"

    @property
    def __wrapped__(self) -> Any:
        return types.MethodType(self.__func__, self.__self__)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(types.MethodType(self.__func__, self.__self__))


class BoundWrapper(BoundMethod):
    """A bound method whose function is a Module, such as a result of `filter_jit`.

    Both the function and the instance are children.
    """

    __func__: Callable[..., Any] = field()

    @property
    def __wrapped__(self) -> Any:
        return self.__func__


def bind(function: Any, instance: Any) -> Any:
    """Binds `function` to `instance`. The result is a pytree if the instance is a Module."""
    if isinstance(function, Module) and isinstance(instance, Module):
        return BoundWrapper._eqxlike_class.codec.unflatten((), (function, instance))
    return _bind_static(function, instance)


def _bind_static(function: Any, instance: Any) -> Any:
    """Does the same as `bind` if `function` is not a Module."""
    if isinstance(instance, Module):
        # `unflatten` is faster than a call of the class: it skips the checks of the metaclass.
        return BoundMethod._eqxlike_class.codec.unflatten((function,), (instance,))
    return types.MethodType(function, instance)


# --- Pickling of classes, functions and wrappers by name ---


def _by_public_name(cls: type) -> Any:
    """The `__reduce__` of a Module class.

    A class of this package is pickled by its public name, so that pickles stay valid if the class
    moves to another file.
    """
    home, is_private, _ = cls.__module__.partition("._")
    is_ours = bool(is_private) and home.partition(".")[0] == _PACKAGE
    if is_ours and vars(sys.modules[home]).get(cls.__qualname__) is cls:
        return pkgutil.resolve_name, (f"{home}:{cls.__qualname__}",)
    wrapper = cls.__qualname__.lstrip("_")
    if vars(ModuleMeta.eqxlike_wrappers).get(wrapper) is cls:
        return pkgutil.resolve_name, (f"{_PACKAGE}:Module.eqxlike_wrappers.{wrapper}",)
    return cls.__qualname__


copyreg.pickle(ModuleMeta, _by_public_name)  # pyright: ignore[reportArgumentType]


def _by_name(function: Any) -> Any:
    """The `__reduce__` of functions such as `jax.nn.relu`, which a model may hold as activations.

    The functions are copied and pickled by name, like plain functions. JAX's own `__reduce__`
    returns the wrapped function. Pickle refuses this function, because the name of the function
    refers to the wrapper.
    """
    name = getattr(function, "__name__", "")
    for home in (jax.nn, jnp, jax.lax):
        if vars(home).get(name) is function:
            return pkgutil.resolve_name, (f"{home.__name__}:{name}",)
    if _found_by_name(function) is function:
        return pkgutil.resolve_name, (f"{function.__module__}:{function.__qualname__}",)
    return function.__reduce_ex__(pickle.DEFAULT_PROTOCOL)


copyreg.pickle(jax.custom_jvp, _by_name)
copyreg.pickle(PjitFunction, _by_name)


def _found_by_name(described: Any) -> Any:
    """The object that has the `__module__` and `__qualname__` of `described`, or `None`.

    The result is `None` for the module `__main__`, which is another module in another process.
    """
    module = getattr(described, "__module__", None)
    found = None if module == "__main__" else sys.modules.get(module or "")
    for name in getattr(described, "__qualname__", "").split("."):
        found = getattr(found, name, None)
    return found
