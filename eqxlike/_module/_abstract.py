"""Attributes that a class requires of its subclasses, and strict classes: abstract or final."""

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, TypeVar, get_origin

from ._cached import CachesPartition, Field
from ._class import own_record

_T = TypeVar("_T")

if TYPE_CHECKING:
    # A type checker sees an attribute of that type, and a class variable.
    from typing import ClassVar as AbstractClassVar

    AbstractVar = Annotated[_T, "AbstractVar"]
else:

    class AbstractVar(Generic[_T]):
        """Marks an attribute that subclasses must have: `size: AbstractVar[int]`.

        A subclass overrides it with a field, a property, a class variable or a method. An abstract
        attribute is not a field itself, so `__init__` has no argument for it. A class that has not
        overridden all of them is abstract: it can be subclassed but not instantiated, as with
        abstract methods.

        **Raises:** `TypeError` at the class statement if the marker is not subscripted or the
        attribute is given a value; `TypeError` when an abstract class is instantiated.

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

        It is `AbstractVar` for class variables. A subclass overrides it with
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
"""The option that declares a class abstract; the spelling is Equinox's."""


def take_abstract(cls: type) -> dict[str, Any] | None:
    """The annotations in the body of `cls` that are not abstract; `None` if none is abstract.

    Also records the names that neither `cls` nor a class above it has overridden, in
    `__abstractvars__` and `__abstractclassvars__`.
    """
    annotations = inspect.get_annotations(cls)
    own = abstract_in(cls)
    for name, marker in own.items():
        if name in vars(cls):
            raise TypeError(
                f"{cls.__name__}.{name} is an abstract {_CALLED[marker]} and cannot have a value: "
                "subclasses give it one."
            )
    unresolved = _unresolved(cls)
    for recorded, marker in ((_VARS, AbstractVar), (_CLASS_VARS, AbstractClassVar)):
        names = frozenset(name for name, each in unresolved.items() if each is marker)
        type.__setattr__(cls, recorded, names)
    return {name: each for name, each in annotations.items() if name not in own} if own else None


def abstract_names(cls: Any) -> frozenset[str]:
    """The names that make `cls` abstract, apart from its abstract methods."""
    own = vars(cls)
    attributes = own.get(_VARS, frozenset()) | own.get(_CLASS_VARS, frozenset())
    record = own_record(cls)
    return attributes | {_FORCED} if record is not None and record.is_forced else attributes


def explain_abstract(cls: Any) -> str:
    """The message on why `cls`, abstract for more than its methods, has no instances."""
    names = {
        "attributes": vars(cls)[_VARS],
        "class attributes": vars(cls)[_CLASS_VARS],
        "methods": cls.__abstractmethods__ - abstract_names(cls),
    }
    missing = [f"abstract {what} {', '.join(sorted(names[what]))}" for what in names if names[what]]
    if not missing:
        return (
            f"Can't instantiate abstract class {cls.__name__}: it was declared with "
            f"`StrictConfig({_FORCED}=True)`. Make an instance of a subclass."
        )
    return (
        f"Can't instantiate abstract class {cls.__name__} with {' and '.join(missing)}. A subclass "
        "overrides an attribute by a field, a property or a value, and a class attribute by a "
        "`ClassVar` with a value."
    )


def abstract_in(cls: type) -> dict[str, Any]:
    """The abstract attributes declared in the body of `cls`, each with its marker."""
    found = {}
    for name, annotation in inspect.get_annotations(cls).items():
        head, is_subscripted = _head(cls, annotation)
        if head is AbstractVar or head is AbstractClassVar:
            if not is_subscripted:
                raise TypeError(
                    f"{cls.__name__}.{name} is annotated with `{head.__name__}` alone. Say which "
                    f"type is expected, as in `{name}: {head.__name__}[int]`."
                )
            found[name] = head
    return found


def _unresolved(cls: type) -> dict[str, Any]:
    """The abstract attributes that `cls` has, inherited ones too, with their markers."""
    names = {name for base in cls.__mro__ for name in abstract_in(base)}
    found = {name: _marker_of(cls, name) for name in names}
    return {name: marker for name, marker in found.items() if marker is not None}


def _marker_of(cls: type, name: str) -> Any:
    """The marker of `name` in `cls`; `None` if the nearest class that mentions it overrides it."""
    found = None
    is_promised = False
    for base in cls.__mro__:
        marker = abstract_in(base).get(name)
        annotations = inspect.get_annotations(base)
        if marker is AbstractClassVar:
            # An `AbstractVar` in a nearer class does not override an `AbstractClassVar`.
            return None if is_promised and found is None else marker
        if marker is AbstractVar:
            found = marker
        elif name in vars(base) and type(vars(base)[name]) is not Field:
            break
        elif name in annotations:
            # A class variable without a value may get one later, but no instance ever will.
            is_promised = _head(base, annotations[name])[0] is ClassVar
            if not is_promised:
                break
    return found


_WRITTEN = re.compile(r"\s*([\w.]+)\s*(\[?)")
"""Matches the dotted name of an annotation such as `eqx.AbstractVar[int]`, and its bracket."""


def _head(cls: type, annotation: Any) -> tuple[Any, bool]:
    """An annotation in the body of `cls` without its subscript, and whether it has one."""
    if not isinstance(annotation, str):
        origin = get_origin(annotation)
        return (annotation, False) if origin is None else (origin, True)
    written = _WRITTEN.match(annotation)
    return (_look_up(cls, written[1]), bool(written[2])) if written else (None, False)


def _look_up(cls: type, dotted: str) -> Any:
    """The object that a dotted name in a string annotation refers to, as far as is known."""
    first, *rest = dotted.split(".")
    try:
        found = vars(sys.modules[cls.__module__])[first]
        for each in rest:
            found = getattr(found, each)
        return found
    except (KeyError, AttributeError):
        # The name is local to the function that defines the class: compare its spelling.
        return _MARKERS.get([first, *rest][-1])


# The rules of strict classes, `class Model(eqxlike.Module, strict=True)`: abstract or final.
#
# A class is either abstract, and cannot be instantiated, or final, and cannot be subclassed. So a
# reader of a method knows that no subclass overrides it, and a reader of `__init__` knows that it
# sets all fields.
#
# The pattern is described in https://docs.kidger.site/equinox/pattern/.


@dataclasses.dataclass(frozen=True)
class Strictness:
    """The options of a strict class; each lifts or adds a rule."""

    force_abstract: bool = False
    allow_abstract_name: bool = False
    allow_method_override: bool = False


def StrictConfig(force_abstact: bool = False, **kwargs: Any) -> Any:
    """Options for a strict class: `class Model(eqxlike.Module, strict=StrictConfig(...))`.

    **Arguments:**

    - `force_abstact`: whether the class is abstract even though nothing in it is. The name is
      Equinox's; `force_abstract` is the same.
    - `allow_abstract_name`: whether the name of a final class may start with `Abstract`.
    - `allow_method_override`: whether the class may override methods that are not abstract.

    **Returns:** a value for `strict=`. It lifts some of the rules of `strict=True`:

    - A class is abstract, with an abstract method or attribute, or it is final, and no strict
      class subclasses it.
    - A strict Module inherits from no Module that is not strict.
    - The names of abstract classes, and of no others, start with `Abstract` or `_Abstract`.
    - A method that is not abstract is not overridden.
    - The class whose body has an `__init__`, if any, declares all fields.

    **Raises:** `TypeError` for an unknown option; at the class statement, `TypeError` for a class
    that breaks a rule.

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


def read_strict(strict: Any) -> Strictness | None:
    """The options of `strict=` in a class statement; `None` for no rules at all."""
    if isinstance(strict, Strictness):
        return strict
    return Strictness() if strict else None


_are_checked = True


def ignore_strict_rules() -> None:
    """Turns the checks of strict classes off in this process, as in Equinox 0.13.8."""
    global _are_checked
    _are_checked = False


def check_strict(
    cls: Any, strictness: Strictness, own: Iterable[str], written_init: type | None
) -> None:
    """Raises `TypeError` if `cls` breaks a rule.

    **Arguments:**

    - `own`: the names in the class itself, before anything was generated for it.
    - `written_init`: the class whose `__init__` makes the instances, if it is user code.
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
        if CachesPartition not in base.__mro__ or CachesPartition in base.__bases__:
            # No Module, or `Module` itself.
            continue
        record = own_record(base)
        if record is None or not record.is_strict:
            raise TypeError(
                f"{cls.__name__} is strict and subclasses {base.__name__}, which is not. A strict "
                f"Module inherits from strict ones only: write `class {base.__name__}(..., "
                "strict=True)`."
            )
        if not inspect.isabstract(base):
            raise TypeError(
                f"{cls.__name__} subclasses {base.__name__}, which is a strict class that is not "
                "abstract, and so is final. Move what both share into an abstract class above the "
                "two, or hold one as a field of the other."
            )


def _check_name(cls: Any, strictness: Strictness) -> None:
    is_called_abstract = cls.__name__.startswith(("Abstract", "_Abstract"))
    if inspect.isabstract(cls) and not is_called_abstract:
        names = ", ".join(sorted(cls.__abstractmethods__))
        raise TypeError(
            f"{cls.__name__} is a strict class and abstract, for {names}, so its name should start "
            f"with `Abstract`: `Abstract{cls.__name__}`. If it was not meant to be abstract, "
            "override them."
        )
    if is_called_abstract and not inspect.isabstract(cls) and not strictness.allow_abstract_name:
        raise TypeError(
            f"{cls.__name__} is a strict class and has nothing abstract, so its name should not "
            "start with `Abstract`. If it was meant to be abstract, write "
            "`strict=StrictConfig(force_abstact=True)`."
        )


def _check_overrides(cls: Any, own: Iterable[str]) -> None:
    for name in {*own, *inspect.get_annotations(cls)}:
        if name.startswith("__") and name != "__call__":
            continue
        for base in cls.__mro__[1:]:
            found = vars(base).get(name)
            is_method = hasattr(type(found), "__get__") and type(found) is not Field
            if is_method and not getattr(found, "__isabstractmethod__", False):
                raise TypeError(
                    f"{cls.__name__}.{name} overrides a method of {base.__name__} that is not "
                    "abstract. A method of a strict class is abstract or final: let "
                    f"`{base.__name__}.{name}` call an abstract method for what differs, or lift "
                    "the rule by `strict=StrictConfig(allow_method_override=True)`."
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
                f"declares the field {outside[0]!r}. In a strict class `__init__` and all fields "
                f"stand in one place: declare {outside[0]!r} in {written_init.__name__}, and leave "
                f"`{outside[0]}: AbstractVar[...]` above it where the name is needed."
            )
