"""What type checkers are told that `filter_jit` and `filter_pmap` return.

A `Lowerable`, which can be called and has `.lower`. But a function in the body of a class stays a
function: to a type checker, functions become methods and may override methods, and objects do not.
"""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, overload

from ._lowered import Lowered
from ._signatures import Output, Params

Output_co = TypeVar("Output_co", covariant=True)


class _NamesSelf(Protocol):
    def __call__(_protocol, self: Any, *args: Any, **kwargs: Any) -> Any: ...


class _NamesCls(Protocol):
    def __call__(_protocol, cls: Any, *args: Any, **kwargs: Any) -> Any: ...


Method = TypeVar("Method", bound=_NamesSelf | _NamesCls)
"""A function in the body of a class: type checkers know it by the name of its first parameter."""


class AnyArguments(Protocol[Output_co]):
    """A function that takes any arguments, as far as a type checker knows: `Callable[..., T]`.

    It would pass for a `Method`.
    """

    def __call__(self, *, _no_parameter_has_this_name: "AnyArguments[Any]") -> Output_co: ...


class Lowerable(Protocol[Params, Output_co]):
    """A compiled function."""

    def __call__(self, *args: Params.args, **kwargs: Params.kwargs) -> Output_co: ...

    def lower(self, *args: Params.args, **kwargs: Params.kwargs) -> Lowered:
        """Traces and lowers the function for these arguments, without running it."""
        ...


class CompilingDecorator(Protocol):
    """`filter_jit` or `filter_pmap` with arguments, and the function to come."""

    @overload
    def __call__(self, fun: AnyArguments[Output], /) -> Lowerable[..., Output]: ...
    @overload
    def __call__(self, fun: Method, /) -> Method: ...
    @overload
    def __call__(self, fun: Callable[Params, Output], /) -> Lowerable[Params, Output]: ...
