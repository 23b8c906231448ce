"""The rules of strict classes, `class Model(eqxlike.Module, strict=True)`: abstract or final.

A class is either abstract, so that it cannot be instantiated, or final, so that it cannot be
subclassed. So a reader of a method knows that no subclass overrides the method, and a reader of
`__init__` knows that `__init__` sets all fields.

The pattern is described in https://docs.kidger.site/equinox/pattern/.
"""

import dataclasses
import inspect
from collections.abc import Iterable
from typing import Any

from ._abstract import abstract_in
from ._cached import FrozenStorage, LazyAttribute
from ._class import own_record


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
