"""The types that `filter_jit` and `filter_pmap` return, as type checkers are told.

They return a `Lowerable`, which is called as the function is and has `.lower`. But a function in
the body of a class stays a function: to a type checker, functions become methods and may override
methods, and objects do neither.
"""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, overload

from .._signatures import Output
from ._lowered import Lowered
from ._traces import Trace

Output_co = TypeVar("Output_co", covariant=True)
Function = TypeVar("Function", bound=Callable[..., Any])


class Lowerable(Protocol[Function]):
    """A compiled function."""

    # A method with a `ParamSpec` would keep only one signature of an overloaded function.
    __call__: Function

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Traces and lowers the function for these arguments, without running it."""
        ...

    @property
    def traces(self) -> tuple[Trace, ...]:
        """The traces of the function so far, the latest 32 of them."""
        ...


class _NamesSelf(Protocol):
    def __call__(_protocol, self: Any, *args: Any, **kwargs: Any) -> Any: ...


class _NamesCls(Protocol):
    def __call__(_protocol, cls: Any, *args: Any, **kwargs: Any) -> Any: ...


Method = TypeVar("Method", bound=_NamesSelf | _NamesCls)
"""A function in the body of a class; type checkers know it by the name of its first parameter."""


class AnyArguments(Protocol[Output_co]):
    """A function that takes any arguments, as far as a type checker knows: `Callable[..., T]`.

    It would pass for a `Method`, and so comes first among overloads.
    """

    def __call__(self, *, _no_parameter_of_yours: "AnyArguments[Any]") -> Output_co: ...


class CompilingDecorator(Protocol):
    """`filter_jit` or `filter_pmap` with options, which still waits for the function."""

    @overload
    def __call__(self, fun: AnyArguments[Output], /) -> Lowerable[Callable[..., Output]]: ...
    @overload
    def __call__(self, fun: Method, /) -> Method: ...
    @overload
    def __call__(self, fun: Function, /) -> Lowerable[Function]: ...
