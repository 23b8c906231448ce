"""Filtered functions that are lowered and compiled ahead of time."""

from collections.abc import Callable
from typing import Any, Protocol, overload

import jax

from .._checks import ERRORS_OF_JAX, claim_failure
from .._signatures import AnyArguments, Function, Method, Output
from ._dispatch import CompiledFunction, Dispatcher
from ._traces import Trace

_Call = tuple[Dispatcher, CompiledFunction, tuple[Any, ...], dict[str, Any]]
"""The dispatcher of a function, the `CompiledFunction` for the arguments of `lower`, and the bound
positional and keyword arguments.
"""


class Lowered:
    """A lowered function, like `jax.stages.Lowered`."""

    def __init__(self, lowered: jax.stages.Lowered, call: _Call):
        self._lowered = lowered
        self._call = call

    def compile(self, compiler_options: dict[str, Any] | None = None) -> "Compiled":
        return Compiled(self._lowered.compile(compiler_options), self._call)

    def as_text(self, dialect: str | None = None, **kwargs: Any) -> str:
        return self._lowered.as_text(dialect, **kwargs)

    def cost_analysis(self) -> Any:
        return self._lowered.cost_analysis()


class Compiled:
    """A compiled function, like `jax.stages.Compiled`. It takes the same arguments as `lower`."""

    def __init__(self, executable: jax.stages.Compiled, call: _Call):
        self._executable = executable
        self._call = call

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        dispatcher, compiled, bound, bound_kwargs = self._call
        ordered, names = dispatcher.order.arrange(bound + args, {**bound_kwargs, **kwargs})
        arrays, found = dispatcher.find(ordered, names)
        # Compare the keys, not the functions, because `compiled` may no longer be in the table.
        if found.key != compiled.key:
            raise TypeError(
                f"{dispatcher.order.function_name} was compiled for arguments of another "
                "structure, or with other static values: compile it again for these arguments."
            )
        try:
            return compiled.finish(self._executable(*arrays))
        except ERRORS_OF_JAX as error:
            failure = claim_failure(error)
            if failure is None:
                raise
        raise failure

    def as_text(self) -> str | None:
        return self._executable.as_text()

    def cost_analysis(self) -> Any:
        return self._executable.cost_analysis()

    def memory_analysis(self) -> Any:
        return self._executable.memory_analysis()


# --- The types of `filter_jit` and `filter_pmap`, for type checkers: see `_signatures` ---


class Lowerable(Protocol[Function]):
    """A compiled function."""

    # An annotation with a `ParamSpec` would keep only one signature of an overloaded function.
    __call__: Function

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Traces and lowers the function for these arguments, without running it."""
        ...

    @property
    def traces(self) -> tuple[Trace, ...]:
        """The latest 32 traces of the function."""
        ...


class CompilingDecorator(Protocol):
    """The decorator that `filter_jit` or `filter_pmap` returns if called with options alone."""

    @overload
    def __call__(self, fun: AnyArguments[Output], /) -> Lowerable[Callable[..., Output]]: ...
    @overload
    def __call__(self, fun: Method, /) -> Method: ...
    @overload
    def __call__(self, fun: Function, /) -> Lowerable[Function]: ...
