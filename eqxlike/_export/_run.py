"""Calling a program with pytrees: what was compared for one call is not compared for the next."""

from collections.abc import Callable, Sequence
from typing import Any

from .._transforms import filter_jit
from ._file import Header
from ._form import ArrayForm, NodeForm, arrays_in, build, describe
from ._given import as_given, is_number


class Runner:
    """Runs a program on pytrees.

    Arguments are compared with the form of the program while `filter_jit` traces, so that a warm
    call costs what it costs there. But to `filter_jit` each Python number is another program, and
    here one may stand for an array: where one did, arguments are taken apart before the call.

    **Arguments:**

    - `header`: what the program takes and returns.
    - `call`: the program, from flat arrays to flat arrays.
    """

    def __init__(self, header: Header, call: Callable[..., Sequence[Any]]):
        self._header = header

        def on_arrays(*arrays: Any) -> Any:
            return build(header.outputs, iter(call(*arrays)))

        def on_trees(*args: Any) -> Any:
            return on_arrays(*self._taken_apart(args, note_numbers=True))

        for function in (on_arrays, on_trees):
            function.__name__ = function.__qualname__ = header.name
        self._call_arrays = filter_jit(on_arrays)
        self._call_trees = filter_jit(on_trees)
        # The arguments that were numbers for arrays, and whether there were such inside of others.
        self._numbers: frozenset[int] = frozenset()
        self._are_numbers_inside = False

    def run(self, args: tuple[Any, ...]) -> Any:
        """The output; raises as `Exported.call` says."""
        if not self._are_numbers_inside:
            try:
                return self._call_trees(*self._with_arrays(args))
            except Exception:
                # The other way either works, as with what cannot be hashed, or says what is wrong
                # in the words for these very arguments.
                pass
        return self._call_arrays(*self._taken_apart(args))

    def _with_arrays(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments, with arrays for the numbers among them."""
        if not self._numbers or len(args) != len(self._header.parameters):
            return args
        inputs: Any = self._header.inputs
        made = list(args)
        for index in self._numbers:
            if is_number(args[index]):
                name = self._header.parameters[index]
                made[index] = as_given(inputs.children[index], args[index], name, {})
        return tuple(made)

    def _taken_apart(self, args: tuple[Any, ...], *, note_numbers: bool = False) -> list[Any]:
        """The flat arrays to call the program with."""
        header = self._header
        inputs: Any = header.inputs
        if len(args) != len(header.parameters):
            raise TypeError(
                f"{header.name} takes ({describe_arguments(header)}), which is "
                f"{len(header.parameters)} in all; it got {len(args)}."
            )
        sizes: dict[str, Any] = {}
        arrays = []
        for index, (child, arg) in enumerate(zip(inputs.children, args, strict=True)):
            for form, leaf, path in arrays_in(child, arg, header.parameters[index]):
                if note_numbers and is_number(leaf):
                    self._note_number(index, child)
                arrays.append(as_given(form, leaf, path, sizes))
        return arrays

    def _note_number(self, index: int, form: Any) -> None:
        """Notes that a number came for an array; raises `_NumberForArrayError`."""
        if isinstance(form, ArrayForm):
            self._numbers |= {index}
        else:
            self._are_numbers_inside = True
        raise _NumberForArrayError


class _NumberForArrayError(Exception):
    """A number stands for an array in a call that is traced."""


def arranged(header: Header, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments of a call, some of which are passed by name, in order.

    **Raises:** `TypeError` for a name that is not known, missing, or given twice.
    """
    by_place = header.parameters[: len(args)]
    by_name = header.parameters[len(args) :]
    if len(args) + len(kwargs) != len(header.parameters) or set(kwargs) != set(by_name):
        came = ", ".join([*by_place, *kwargs])
        raise TypeError(f"{header.name} takes ({describe_arguments(header)}); it got ({came}).")
    return args + tuple(kwargs[name] for name in by_name)


def describe_arguments(header: Header) -> str:
    """The arguments of a program, as in `x: float32[batch, 64], scale: float32[]`."""
    inputs = header.inputs
    forms = inputs.children if isinstance(inputs, NodeForm) else ()
    return ", ".join(
        f"{name}: {describe(form)}" for name, form in zip(header.parameters, forms, strict=True)
    )
