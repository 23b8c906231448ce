"""Attributes that a class asks of its subclasses, by annotation alone."""

import inspect
import re
import sys
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, TypeVar, get_origin

from ._cached import Field
from ._class import own_record

_T = TypeVar("_T")

if TYPE_CHECKING:
    # What a type checker should see: an attribute of that type, and a class variable.
    from typing import ClassVar as AbstractClassVar

    AbstractVar = Annotated[_T, "AbstractVar"]
else:

    class AbstractVar(Generic[_T]):
        """Marks an attribute that subclasses must have: `size: AbstractVar[int]`.

        A subclass overrides it with a field, a property, a class variable or a method. It is no
        field itself, so it has no place among the arguments of `__init__`. A class that has not
        overridden all of them is abstract: as with abstract methods, it may be subclassed and not
        instantiated.

        **Raises:** `TypeError` at the class statement if it is not subscripted or is given a value;
        `TypeError` when an abstract class is instantiated.

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

        As `AbstractVar`, for what should be there on the class, to be overridden by
        `order: ClassVar[int] = 2`. Type checkers want it imported in a way of its own:

            if TYPE_CHECKING:
                from typing import ClassVar as AbstractClassVar
            else:
                from eqxlike import AbstractClassVar

        **Raises:** as `AbstractVar`.

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


def take_abstract(cls: type) -> dict[str, Any] | None:
    """The annotations in the body of `cls` without the abstract ones, or `None` if there are none.

    The names that neither `cls` nor a class above it has overridden are recorded in
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
    """The names that make `cls` abstract, beside those of its abstract methods."""
    own = vars(cls)
    attributes = own.get(_VARS, frozenset()) | own.get(_CLASS_VARS, frozenset())
    record = own_record(cls)
    return attributes | {_FORCED} if record is not None and record.is_forced else attributes


def explain_abstract(cls: Any) -> str:
    """Why `cls`, which is abstract and not for its methods alone, has no instances."""
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
    """How `name` is abstract in `cls`, if the nearest class to speak of it says that it is."""
    found = None
    is_promised = False
    for base in cls.__mro__:
        marker = abstract_in(base).get(name)
        annotations = inspect.get_annotations(base)
        if marker is AbstractClassVar:
            # What is asked of the class is not taken back where it is asked of the instance.
            return None if is_promised and found is None else marker
        if marker is AbstractVar:
            found = marker
        elif name in vars(base) and type(vars(base)[name]) is not Field:
            break
        elif name in annotations:
            # A class variable without a value: it may get that later, but no instance ever will.
            is_promised = _head(base, annotations[name])[0] is ClassVar
            if not is_promised:
                break
    return found


# `AbstractVar[int]`, `eqx.AbstractVar[int]`: the dotted name, and what follows it.
_WRITTEN = re.compile(r"\s*([\w.]+)\s*(\[?)")


def _head(cls: type, annotation: Any) -> tuple[Any, bool]:
    """What an annotation in the body of `cls` is without its subscript, and whether it has one."""
    if not isinstance(annotation, str):
        origin = get_origin(annotation)
        return (annotation, False) if origin is None else (origin, True)
    written = _WRITTEN.match(annotation)
    return (_look_up(cls, written[1]), bool(written[2])) if written else (None, False)


def _look_up(cls: type, dotted: str) -> Any:
    """What a name in an annotation that was left a string stands for, as far as can be told."""
    first, *rest = dotted.split(".")
    try:
        found = vars(sys.modules[cls.__module__])[first]
        for each in rest:
            found = getattr(found, each)
        return found
    except (KeyError, AttributeError):
        # A name of the function in which the class stands: go by how it is spelled.
        return _MARKERS.get([first, *rest][-1])
