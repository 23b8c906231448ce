"""The parts of a Module class that other dataclasses lack.

The metaclass stores a record in the class, and descriptors for its functions. The class may have
abstract attributes, and may be strict.
"""

import dataclasses
import functools
import inspect
import pickle
import re
import sys
import types
from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, TypeVar, get_origin

from .._traceback import replace_body
from ._fields import Codec, FrozenStorage, Layout, LazyAttribute, generate_codec

RECORD = "_eqxlike_class"
"""The name of the attribute in which a Module class stores its record."""


@dataclasses.dataclass(frozen=True, slots=True)
class Traits:
    """Options that only Module classes of this package have.

    A class statement sets them: `class State(Module, _traits=Traits(is_immutable=False))`.
    Subclasses inherit all but `flattening` and `frozen_fields`.

    - `is_immutable`: `True` if instances never change. The partition of a mutable instance is not
      cached.
    - `complete`: a function that is called with the `__dict__` of each unflattened instance, and
      adds values that are derived from the fields.
    - `flattening`: a function that takes the codec of the class and returns an object with the
      methods by which JAX flattens instances.
    - `frozen_fields`: the names of the fields in which arrays are frozen.
    - `unfrozen`: the same class without frozen arrays, if this class has frozen arrays.
    - `is_layer`: `True` if a call gets a name in a traced program; `False` for wrappers.
    """

    is_immutable: bool = True
    complete: Callable[[dict[str, Any]], None] | None = None
    flattening: Callable[[Codec], Any] | None = None
    frozen_fields: tuple[str, ...] = ()
    unfrozen: type | None = None
    is_layer: bool = True


@dataclasses.dataclass(slots=True)
class ClassRecord:
    """The metaclass's record of one class. It is complete once the class is a dataclass.

    - `cls`: the class.
    - `makes_init`: whether the `__init__` of the class is generated.
    - `is_forced`: whether the class statement declares the class abstract.
    - `is_strict`: whether the class must follow the rules of strict classes.
    - `traits`: the options of the class, if it is a class of this package.
    - `derived`: the generated subclasses of the class, which freeze arrays or report calls.
    - `codec`: the functions that flatten and unflatten instances.
    - `defaults`: for each field with a default, a pair of the field's name and the default.
    - `converters`: for each field with a converter, a pair of the field's name and the converter.
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
    """The record of `cls` itself; `None` if `cls` is not a Module class, or not complete yet."""
    return vars(cls).get(RECORD)


class StoredFunction:
    """Base class of descriptors for a function of a Module class.

    A descriptor is callable, and `isinstance(descriptor, types.FunctionType)` is true. Class
    decorators such as `beartype` and `typeguard` need this, because they look for functions in
    `vars(cls)` and replace them.
    """

    __class__ = property(lambda self: types.FunctionType)  # pyright: ignore

    def __init__(self, function: Callable[..., Any]):
        wrapper: Any = self
        functools.update_wrapper(wrapper, function)
        # The descriptor should look like a plain function, which has no `__wrapped__`.
        del wrapper.__wrapped__
        self.function = function

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # Python calls this method for `__code__`, `__defaults__` and so on. While a descriptor is
        # being copied, its `__dict__` is still empty.
        if "function" not in vars(self):
            raise AttributeError(name)
        return getattr(self.function, name)


# Module classes that are pickled by value, as cloudpickle does for classes of `__main__`.
#
# Unpickling first makes an empty class with the same name and bases, and then sets its attributes.
# The empty class has no fields, but the metaclass has already generated code for this class and
# registered the code with JAX. So the record of a class is pickled as a `CarriedClass`. When
# unpickling sets this `CarriedClass` as an attribute of the empty class, the metaclass instead
# calls `CarriedClass.restore`, which completes the class.


_KEPT = ("makes_init", "is_forced", "is_strict", "traits", "defaults", "converters")
"""The attributes of a `ClassRecord` that are pickled unchanged."""


class CarriedClass:
    """A pickled record, with the parts of the class that pickling by value leaves out."""

    layout: Layout
    fields: dict[str, dataclasses.Field]
    abstract: frozenset[str]

    def restore(self, cls: Any) -> None:
        """Gives an empty class the fields, codec and record of the pickled class."""
        for each in self.fields.values():
            for name in ("default", "default_factory"):
                # Unpickling makes a new object instead of `MISSING`, so the types are compared.
                if isinstance(getattr(each, name), type(dataclasses.MISSING)):
                    setattr(each, name, dataclasses.MISSING)
        # `type.__setattr__` bypasses the `__setattr__` of the metaclass, which would replace the
        # restored fields and abstract names.
        type.__setattr__(cls, "__dataclass_fields__", self.fields)
        type.__setattr__(cls, "__abstractmethods__", self.abstract)
        record: ClassRecord = cls._eqxlike_class
        for name in _KEPT:
            setattr(record, name, getattr(self, name))
        codec = generate_codec(cls, self.layout, record.traits.complete)
        # JAX keeps the functions with which the class was registered, so new code is put into them.
        functions = {
            name: replace_body(getattr(record.codec, name), getattr(codec, name))
            for name in ("flatten", "flatten_with_keys", "unflatten")
        }
        record.codec = dataclasses.replace(codec, **functions)


# --- Attributes that subclasses must have: `AbstractVar` and `AbstractClassVar` ---


_T = TypeVar("_T")

if TYPE_CHECKING:
    # A type checker sees an ordinary attribute and an ordinary class variable.
    from typing import ClassVar as AbstractClassVar

    AbstractVar = Annotated[_T, "AbstractVar"]
else:

    class AbstractVar(Generic[_T]):
        """Marks an attribute that subclasses must have: `size: AbstractVar[int]`.

        A subclass overrides it with a field, a property, a class variable or a method. An abstract
        attribute is not a field itself, so `__init__` has no argument for it. A class is abstract
        until all its abstract attributes are overridden: like a class with abstract methods, it can
        be subclassed but not instantiated.

        **Raises:**

        - `TypeError` at the class statement if `AbstractVar` has no subscript, or if the attribute
          has a value.
        - `TypeError` when an abstract class is instantiated.

        !!! example

            >>> import eqxlike as eqx
            >>> class AbstractLayer(eqx.Module):
            ...     size: eqx.AbstractVar[int]
            ...     def describe(self):
            ...         return f"a layer of size {self.size}"
            >>> class Layer(AbstractLayer):
            ...     size: int
            >>> Layer(3).describe()
            'a layer of size 3'
        """

    class AbstractClassVar(Generic[_T]):
        """Marks a class variable that subclasses must have: `order: AbstractClassVar[int]`.

        The equivalent of `AbstractVar` for class variables. A subclass overrides it with
        `order: ClassVar[int] = 2`. Type checkers need this import:

            if TYPE_CHECKING:
                from typing import ClassVar as AbstractClassVar
            else:
                from eqxlike import AbstractClassVar

        **Raises:** the same errors as `AbstractVar`.

        !!! example

            >>> import eqxlike as eqx
            >>> from typing import ClassVar
            >>> class AbstractSolver(eqx.Module):
            ...     order: eqx.AbstractClassVar[int]
            >>> class Euler(AbstractSolver):
            ...     order: ClassVar[int] = 1
            >>> Euler.order, Euler()
            (1, Euler())
        """


_MARKERS = {"AbstractVar": AbstractVar, "AbstractClassVar": AbstractClassVar, "ClassVar": ClassVar}
_CALLED = {AbstractVar: "attribute", AbstractClassVar: "class attribute"}

_VARS = "__abstractvars__"
_CLASS_VARS = "__abstractclassvars__"

_FORCED = "force_abstact"
"""The option of `StrictConfig` that declares a class abstract, with Equinox's spelling."""


def take_abstract(cls: type) -> dict[str, Any] | None:
    """Records the abstract attributes of `cls`, and returns its other annotations.

    The result is `None` if no annotation in the body of `cls` is abstract. The records are the sets
    `__abstractvars__` and `__abstractclassvars__`. The sets contain the abstract attributes of
    `cls` and its base classes, except attributes that one of these classes overrides.
    """
    annotations = inspect.get_annotations(cls)
    own = abstract_in(cls)
    for name, marker in own.items():
        if name in vars(cls):
            raise TypeError(
                f"{cls.__name__}.{name} is an abstract {_CALLED[marker]} and cannot have a value: "
                "subclasses define it."
            )
    declared = {name for base in cls.__mro__ for name in abstract_in(base)}
    markers = {name: _marker_of(cls, name) for name in declared}
    for recorded, marker in ((_VARS, AbstractVar), (_CLASS_VARS, AbstractClassVar)):
        names = frozenset(name for name, each in markers.items() if each is marker)
        type.__setattr__(cls, recorded, names)
    return {name: each for name, each in annotations.items() if name not in own} if own else None


def abstract_names(cls: Any) -> frozenset[str]:
    """The names of everything that makes `cls` abstract, except its abstract methods."""
    own = vars(cls)
    attributes = own.get(_VARS, frozenset()) | own.get(_CLASS_VARS, frozenset())
    record = own_record(cls)
    return attributes | {_FORCED} if record is not None and record.is_forced else attributes


def explain_abstract(cls: Any) -> str:
    """The error message for instantiating a class that is abstract not only because of methods."""
    names = {
        "attributes": vars(cls)[_VARS],
        "class attributes": vars(cls)[_CLASS_VARS],
        "methods": cls.__abstractmethods__ - abstract_names(cls),
    }
    missing = [f"abstract {what} {', '.join(sorted(names[what]))}" for what in names if names[what]]
    if not missing:
        return (
            f"Can't instantiate abstract class {cls.__name__}: it was declared with "
            f"`StrictConfig({_FORCED}=True)`. Instantiate a subclass."
        )
    return (
        f"Can't instantiate abstract class {cls.__name__} with {' and '.join(missing)}. In a "
        "subclass, override an attribute by a field, a property or a value, and a class attribute "
        "by a `ClassVar` with a value."
    )


def abstract_in(cls: type) -> dict[str, Any]:
    """Maps each abstract attribute in the body of `cls` to `AbstractVar` or `AbstractClassVar`."""
    found = {}
    for name, annotation in inspect.get_annotations(cls).items():
        head, is_subscripted = _head(cls, annotation)
        if head is AbstractVar or head is AbstractClassVar:
            if not is_subscripted:
                raise TypeError(
                    f"{cls.__name__}.{name} is annotated with `{head.__name__}` without a type. "
                    f"Add the type, as in `{name}: {head.__name__}[int]`."
                )
            found[name] = head
    return found


def _marker_of(cls: type, name: str) -> Any:
    """`AbstractVar` or `AbstractClassVar`, if the attribute `name` is still abstract in `cls`.

    `None` if `cls` or a base class overrides the attribute.
    """
    found = None
    is_promised = False
    for base in cls.__mro__:
        marker = abstract_in(base).get(name)
        annotations = inspect.get_annotations(base)
        if marker is AbstractClassVar:
            # An `AbstractVar` in a subclass of `base` does not override this `AbstractClassVar`.
            return None if is_promised and found is None else marker
        if marker is AbstractVar:
            found = marker
        elif name in vars(base) and type(vars(base)[name]) is not LazyAttribute:
            break
        elif name in annotations:
            # A `ClassVar` without a value overrides an `AbstractClassVar`, since its value may be
            # assigned later. Such a `ClassVar` does not override an `AbstractVar`.
            is_promised = _head(base, annotations[name])[0] is ClassVar
            if not is_promised:
                break
    return found


_WRITTEN = re.compile(r"\s*([\w.]+)\s*(\[?)")
"""Matches the start of an annotation such as `eqx.AbstractVar[int]`, up to the bracket."""


def _head(cls: type, annotation: Any) -> tuple[Any, bool]:
    """Returns an annotation without its subscript, and whether it has a subscript.

    For `AbstractVar[int]` the result is `(AbstractVar, True)`. The annotation is from the body of
    `cls`; names in a string annotation are looked up in the module of `cls`.
    """
    if not isinstance(annotation, str):
        origin = get_origin(annotation)
        return (annotation, False) if origin is None else (origin, True)
    written = _WRITTEN.match(annotation)
    if written is None:
        return None, False
    first, *rest = written[1].split(".")
    try:
        # `vars` does not call the `__getattr__` of a module, which may import other modules.
        found = functools.reduce(getattr, rest, vars(sys.modules[cls.__module__])[first])
    except (KeyError, AttributeError):
        # The name may be local to the function that defines the class. Then it cannot be looked up,
        # so its last part is compared with the names of the markers.
        found = _MARKERS.get([first, *rest][-1])
    return found, bool(written[2])


# --- The rules of strict classes, `class Model(eqxlike.Module, strict=True)` ---
#
# A class is either abstract, so that it cannot be instantiated, or final, so that it cannot be
# subclassed. So a reader of a method knows that no subclass overrides the method, and a reader of
# `__init__` knows that `__init__` sets all fields.
#
# The pattern is described in https://docs.kidger.site/equinox/pattern/.


@dataclasses.dataclass(frozen=True)
class Strictness:
    """The options of a strict class; see `StrictConfig`."""

    force_abstract: bool = False
    allow_abstract_name: bool = False
    allow_method_override: bool = False


def StrictConfig(force_abstact: bool = False, **kwargs: Any) -> Any:
    """Options for a strict class: `class Model(eqxlike.Module, strict=StrictConfig(...))`.

    **Arguments:**

    - `force_abstact`: if `True`, the class is abstract even without an abstract method or
      attribute. `force_abstact` is Equinox's spelling; `force_abstract` is accepted too.
    - `allow_abstract_name`: if `True`, the name of a final class may start with `Abstract`.
    - `allow_method_override`: if `True`, the class may override methods that are not abstract.

    **Returns:** a value for `strict=` that lifts some of the rules of `strict=True`. The rules are:

    - A class is either abstract or final. An abstract class has an abstract method or attribute. No
      strict class subclasses a final class.
    - A strict Module inherits from strict Modules only.
    - The name of an abstract class starts with `Abstract` or `_Abstract`; other names do not.
    - A method that is not abstract is not overridden.
    - If a class defines `__init__`, the same class declares all fields.

    **Raises:** `TypeError` if an option is unknown. A class statement raises `TypeError` if the
    class breaks a rule.

    !!! example

        >>> import abc, eqxlike as eqx
        >>> class AbstractLayer(eqx.Module, strict=True):
        ...     @abc.abstractmethod
        ...     def size(self): ...
        >>> class Layer(AbstractLayer, strict=True):
        ...     def size(self):
        ...         return 3
        >>> class Wider(Layer, strict=True):
        ...     pass
        Traceback (most recent call last):
        TypeError: Wider subclasses Layer, which is a strict class that is not abstract...
    """
    known = {field.name for field in dataclasses.fields(Strictness)}
    for name in kwargs:
        if name not in known:
            options = ", ".join(sorted({"force_abstact", *known}))
            raise TypeError(f"`StrictConfig` got an unknown option {name!r}; it takes {options}.")
    return Strictness(**{**kwargs, "force_abstract": force_abstact or kwargs.get("force_abstract")})


_are_checked = True


def ignore_strict_rules() -> None:
    """Turns off the checks of strict classes in this process, as in Equinox 0.13.8."""
    global _are_checked
    _are_checked = False


def check_strict(
    cls: Any, strictness: Strictness, own: Iterable[str], written_init: type | None
) -> None:
    """Raises `TypeError` if `cls` breaks a rule.

    **Arguments:**

    - `own`: the names in the body of the class, without the names of generated methods.
    - `written_init`: the class that defines the `__init__`; `None` if the `__init__` is generated.
    """
    if not _are_checked:
        return
    _check_bases(cls)
    _check_name(cls, strictness)
    if not strictness.allow_method_override:
        _check_overrides(cls, own)
    if written_init is not None:
        _check_fields(cls, written_init)


def _check_bases(cls: Any) -> None:
    for base in cls.__bases__:
        if FrozenStorage not in base.__mro__ or FrozenStorage in base.__bases__:
            # The base is not a Module, or it is `Module` itself.
            continue
        record = own_record(base)
        if record is None or not record.is_strict:
            raise TypeError(
                f"{cls.__name__} is strict and subclasses {base.__name__}, which is not strict. A "
                "strict Module inherits from strict Modules only: write "
                f"`class {base.__name__}(..., strict=True)`."
            )
        if not inspect.isabstract(base):
            raise TypeError(
                f"{cls.__name__} subclasses {base.__name__}, which is a strict class that is not "
                "abstract, and so is final. Move shared code to an abstract base class of both, or "
                "make one a field of the other."
            )


def _check_name(cls: Any, strictness: Strictness) -> None:
    is_called_abstract = cls.__name__.startswith(("Abstract", "_Abstract"))
    if inspect.isabstract(cls) and not is_called_abstract:
        names = ", ".join(sorted(cls.__abstractmethods__))
        raise TypeError(
            f"{cls.__name__} is a strict class and abstract, because of {names}, so its name "
            f"should start with `Abstract`: `Abstract{cls.__name__}`. If it should not be "
            f"abstract, override {names}."
        )
    if is_called_abstract and not inspect.isabstract(cls) and not strictness.allow_abstract_name:
        raise TypeError(
            f"{cls.__name__} is a strict class and has nothing abstract, so its name should not "
            "start with `Abstract`. If it should be abstract, write "
            "`strict=StrictConfig(force_abstact=True)`."
        )


def _check_overrides(cls: Any, own: Iterable[str]) -> None:
    for name in {*own, *inspect.get_annotations(cls)}:
        if name.startswith("__") and name != "__call__":
            continue
        for base in cls.__mro__[1:]:
            found = vars(base).get(name)
            is_method = hasattr(type(found), "__get__") and type(found) is not LazyAttribute
            if is_method and not getattr(found, "__isabstractmethod__", False):
                raise TypeError(
                    f"{cls.__name__}.{name} overrides a method of {base.__name__} that is not "
                    "abstract. A method of a strict class is abstract or final: let "
                    f"`{base.__name__}.{name}` call an abstract method for the part that differs, "
                    "or lift the rule by `strict=StrictConfig(allow_method_override=True)`."
                )
            if found is not None:
                break


def _check_fields(cls: Any, written_init: type) -> None:
    fields = {field.name for field in dataclasses.fields(cls)}
    for base in cls.__mro__:
        declared = inspect.get_annotations(base).keys() - abstract_in(base).keys()
        outside = sorted(declared & fields)
        if outside and base is not written_init:
            raise TypeError(
                f"{written_init.__name__} has an `__init__` of its own, and {base.__name__} "
                f"declares the field {outside[0]!r}. In a strict class, `__init__` and all fields "
                f"are in one class: declare {outside[0]!r} in {written_init.__name__}, and write "
                f"`{outside[0]}: AbstractVar[...]` in a base class that needs the name."
            )
