"""Filtered functions that are lowered and compiled ahead of time, for arguments of one form."""

from typing import Any

import jax

from ..._transfers import is_any_exclusive
from .._checks import ERRORS_OF_JAX, claim_failure
from ._compiled import CompiledFunction
from ._dispatcher import Dispatcher
from ._exclusive import refuse_leaving


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
            refuse_leaving(self._dispatcher.order, ordered, names, arrays, function)
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
