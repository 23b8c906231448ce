"""Filtered functions that are lowered and compiled ahead of time, for arguments of one form."""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, overload

import jax

from ..._transfers import is_any_exclusive
from .._checks import ERRORS_OF_JAX, claim_failure
from .._signatures import Output
from ._dispatch import CompiledFunction, Dispatcher
from ._traces import Trace


class Lowered:
    """A lowered function, as `jax.stages.Lowered`."""

    def __init__(
        self,
        lowered: jax.stages.Lowered,
        dispatcher: Dispatcher,
        function: CompiledFunction,
        bound: tuple[Any, ...],
        bound_kwargs: dict[str, Any],
    ):
        self._lowered = lowered
        self._call = (dispatcher, function, bound, bound_kwargs)

    def compile(self, compiler_options: dict[str, Any] | None = None) -> "Compiled":
        return Compiled(self._lowered.compile(compiler_options), *self._call)

    def as_text(self, dialect: str | None = None, **kwargs: Any) -> str:
        return self._lowered.as_text(dialect, **kwargs)

    def cost_analysis(self) -> Any:
        return self._lowered.cost_analysis()


class Compiled:
    """A compiled function, as `jax.stages.Compiled`, for arguments like those of `lower`."""

    def __init__(
        self,
        compiled: jax.stages.Compiled,
        dispatcher: Dispatcher,
        function: CompiledFunction,
        bound: tuple[Any, ...],
        bound_kwargs: dict[str, Any],
    ):
        self._compiled = compiled
        self._dispatcher = dispatcher
        self._function = function
        self._bound = bound
        self._bound_kwargs = bound_kwargs

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        ordered, names = self._dispatcher.order.arrange(
            self._bound + args, {**self._bound_kwargs, **kwargs}
        )
        arrays, function = self._dispatcher.find(ordered, names)
        # The parts are compared: the compiled function itself may have been dropped since.
        if (function.structures, function.names) != (
            self._function.structures,
            self._function.names,
        ):
            raise TypeError(
                f"{self._dispatcher.order.function_name} was compiled for arguments of another "
                "structure, or with other static values: compile it again for these."
            )
        if is_any_exclusive():
            self._dispatcher.refuse_leaving(ordered, names, arrays, function)
        try:
            return self._function.finish(self._compiled(*arrays))
        except ERRORS_OF_JAX as error:
            failure = claim_failure(error)
            if failure is None:
                raise
        raise failure

    def as_text(self) -> str | None:
        return self._compiled.as_text()

    def cost_analysis(self) -> Any:
        return self._compiled.cost_analysis()

    def memory_analysis(self) -> Any:
        return self._compiled.memory_analysis()


# The types that `filter_jit` and `filter_pmap` return, for type checkers.
#
# They return a `Lowerable`, which is called as the function is and has `.lower`. But a function in
# the body of a class stays a function: to a type checker, functions become methods and may override
# methods, and objects do neither.


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
