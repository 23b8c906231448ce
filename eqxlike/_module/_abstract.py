"""Attributes that subclasses must have: `AbstractVar` and `AbstractClassVar`."""

import inspect
import re
import sys
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, TypeVar, get_origin

from ._cached import LazyAttribute
from ._class import own_record

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
    return (_look_up(cls, written[1]), bool(written[2])) if written else (None, False)


def _look_up(cls: type, dotted: str) -> Any:
    """The object that a dotted name in a string annotation refers to; `None` if not found."""
    first, *rest = dotted.split(".")
    try:
        found = vars(sys.modules[cls.__module__])[first]
        for each in rest:
            found = getattr(found, each)
        return found
    except (KeyError, AttributeError):
        # The name may be local to the function that defines the class. Then it cannot be looked up,
        # so its last part is compared with the names of the markers.
        return _MARKERS.get([first, *rest][-1])
