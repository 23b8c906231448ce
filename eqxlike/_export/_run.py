"""Calling a program with pytrees: a comparison made for one call is not repeated for the next."""

import collections
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._pytree import is_array, listed
from .._transforms import filter_jit
from ._file import Header
from ._form import ArrayForm, arrays_in, build, describe, describe_other, form_of_array

_MAX_PROGRAMS = 4
"""This many programs are compiled for one combination of arrays, each for other static leaves or
nodes; further ones are flattened before the call.
"""

_CALLS_APART = 100
"""After a call that only works with flattened arguments, this many further calls flatten theirs
too: trying the other way in vain takes milliseconds.
"""


_NUMBERS = {bool, int, float, complex, np.float64, np.complex128}
"""The types of Python numbers, and NumPy's that inherit from them."""


class Runner:
    """Runs a program on pytrees.

    Arguments are compared with the form of the program while `filter_jit` traces, so a warm
    call costs as much as one of `filter_jit`. But to `filter_jit` each Python number is another
    program, while here it may replace an array; so is each function, while here only its name
    counts. If these occur, arguments are flattened before the call.

    **Arguments:**

    - `header`: the inputs and outputs of the program.
    - `call`: the program, from flat arrays to flat arrays.
    """

    def __init__(self, header: Header, call: Callable[..., Sequence[Any]]):
        self._header = header

        def on_arrays(*arrays: Any) -> Any:
            return build(header.outputs, iter(call(*arrays)))

        def on_trees(*args: Any) -> Any:
            arrays = self._taken_apart(args, is_traced=True)
            self._count_program(arrays)
            return on_arrays(*arrays)

        for function in (on_arrays, on_trees):
            function.__name__ = function.__qualname__ = header.name
            # So explanations of retraces distinguish programs, and profiles do not show
            # this module.
            vars(function)["__wrapped__"] = call
            setattr(function, "__module__", None)  # noqa: B010
        if all(map(str.isidentifier, header.parameters)):
            vars(on_trees)["__signature__"] = _signature_of(header)
        self._call_arrays = filter_jit(on_arrays)
        self._call_trees = filter_jit(on_trees)
        forms = enumerate(header.inputs.children)
        self._places_of_arrays = [place for place, form in forms if isinstance(form, ArrayForm)]
        self._num_programs: collections.Counter[Any] = collections.Counter()
        self._num_calls_apart = 0

    def run(self, args: tuple[Any, ...]) -> Any:
        """The output; see `Exported.call` for errors."""
        if self._num_calls_apart == 0:
            try:
                # Most calls have none, and this finds out faster than a loop over the arguments.
                has_numbers = not _NUMBERS.isdisjoint(map(type, args))
                return self._call_trees(*(self._with_arrays(args) if has_numbers else args))
            except (TypeError, ValueError, _TakeApartError):
                # The other way either works, as for values that cannot be hashed, or raises the
                # right error for these arguments. This excludes a trace that was refused.
                pass
        else:
            self._num_calls_apart -= 1
        arrays = self._taken_apart(args)
        try:
            return self._call_arrays(*arrays)
        except ValueError as error:
            if "polymorphic shape" not in str(error):
                raise
            # JAX does not know the arguments or their paths.
            raise ValueError(
                f"The sizes do not fit: {listed(self._sizes_of(args))}. A name has any size from 1 "
                "upwards, the same wherever it stands."
            ) from error

    def _with_arrays(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments, with an array for each that is a number and should be an array."""
        if len(args) != len(self._header.parameters):
            return args
        made = list(args)
        for place in self._places_of_arrays:
            if is_number(args[place]):
                form: Any = self._header.inputs.children[place]
                made[place] = as_given(form, args[place], self._header.parameters[place], {})
        return tuple(made)

    def _taken_apart(self, args: tuple[Any, ...], *, is_traced: bool = False) -> list[Any]:
        """The flat arrays to call the program with; a number in a trace raises
        `_TakeApartError`.
        """
        header = self._header
        if len(args) != len(header.parameters):
            raise TypeError(
                f"{header.name} takes ({describe_arguments(header)}), which is "
                f"{len(header.parameters)} in all; it got {len(args)}."
            )
        sizes: dict[str, Any] = {}
        arrays = []
        for child, arg, name in zip(header.inputs.children, args, header.parameters, strict=True):
            for form, leaf, path in arrays_in(child, arg, name):
                if is_traced and is_number(leaf):
                    self._num_calls_apart = _CALLS_APART
                    raise _TakeApartError
                arrays.append(as_given(form, leaf, path, sizes))
        return arrays

    def _count_program(self, arrays: list[Any]) -> None:
        """Raises `_TakeApartError` if there are enough programs for such arrays."""
        key = (*map(jax.typeof, arrays),)
        if self._num_programs[key] >= _MAX_PROGRAMS:
            self._num_calls_apart = _CALLS_APART
            raise _TakeApartError
        self._num_programs[key] += 1

    def _sizes_of(self, args: tuple[Any, ...]) -> list[str]:
        """What each array with a named axis must be, and its actual size."""
        header = self._header
        rows = zip(header.inputs.children, args, header.parameters, strict=True)
        return [
            f"{path} must be {describe(form)} and is {describe_other(leaf)}"
            for child, arg, name in rows
            for form, leaf, path in arrays_in(child, arg, name)
            if not all(isinstance(size, int) for size in form.shape)
        ]


class _TakeApartError(Exception):
    """A call whose arguments must be flattened before it is being traced."""


def _signature_of(header: Header) -> inspect.Signature:
    kind = inspect.Parameter.POSITIONAL_ONLY
    return inspect.Signature([inspect.Parameter(name, kind) for name in header.parameters])


def arranged(header: Header, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments of a call, some of them passed by name, in order.

    **Raises:** `TypeError` for a name that is unknown, missing, or passed twice.
    """
    by_place = header.parameters[: len(args)]
    by_name = header.parameters[len(args) :]
    if len(args) + len(kwargs) != len(header.parameters) or set(kwargs) != set(by_name):
        came = ", ".join([*by_place, *kwargs])
        raise TypeError(f"{header.name} takes ({describe_arguments(header)}); it got ({came}).")
    return args + tuple(kwargs[name] for name in by_name)


def describe_arguments(header: Header) -> str:
    """The arguments of a program, such as `x: float32[batch, 64], scale: float32[]`."""
    pairs = zip(header.parameters, header.inputs.children, strict=True)
    return ", ".join(f"{name}: {describe(form)}" for name, form in pairs)


# --- The argument passed for an array: what matches, or an error that says what would ---


def as_given(form: ArrayForm, array: Any, path: str, sizes: dict[str, Any]) -> Any:
    """The array to pass to the program.

    **Arguments:**

    - `sizes`: the sizes of the named axes so far; those of this array are added.

    **Raises:** `TypeError`, with the path, for anything but an array of this dtype;
    `ValueError` for another shape.
    """
    if is_number(array):
        array = _as_scalar(array, form)
    if not (is_array(array) or isinstance(array, np.generic)):
        raise TypeError(f"{path} must be {describe(form)}; it is {describe_other(array)}.")
    came = form_of_array(array)
    if str(jax.dtypes.canonicalize_dtype(array.dtype, allow_extended_dtype=True)) != form.dtype:
        raise TypeError(f"{path} must be {describe(form)}; it is {describe(came)}.{_hint(form)}")
    is_alike = len(came.shape) == len(form.shape)
    for size, expected in zip(came.shape, form.shape, strict=False):
        if isinstance(expected, int):
            is_alike &= size == expected
        elif expected.isidentifier():
            if size == 0:
                raise ValueError(
                    f"{path} must be {describe(form)}, with {expected} of any size from 1 upwards; "
                    f"it is {describe(came)}."
                )
            if sizes.setdefault(expected, size) != size:
                raise ValueError(
                    f"{path} must be {describe(form)}; it is {describe(came)}, and {expected} is "
                    f"{sizes[expected]} in what came before it."
                )
    if not is_alike:
        raise ValueError(f"{path} must be {describe(form)}; it is {describe(came)}.")
    return array


def is_number(leaf: Any) -> bool:
    """Whether this is a Python number, which may replace an array."""
    return isinstance(leaf, bool | int | float | complex)


def _as_scalar(number: bool | int | float | complex, form: ArrayForm) -> Any:
    """A Python number as such an array, if the dtype can hold its kind of number."""
    kinds = {bool: np.bool_, int: np.number, float: np.inexact, complex: np.complexfloating}
    if form.dtype.startswith("key<"):
        return number
    dtype = jnp.dtype(form.dtype)
    if not jnp.issubdtype(dtype, next(kinds[each] for each in kinds if isinstance(number, each))):
        return number
    if isinstance(number, int) and jnp.issubdtype(dtype, np.integer):
        limits = jnp.iinfo(dtype)
        is_held = int(limits.min) <= number <= int(limits.max)
        return np.asarray(number, dtype) if is_held else number
    try:
        return np.asarray(number, dtype)
    except OverflowError:  # The largest integers exceed floating-point numbers.
        return number


def _hint(form: ArrayForm) -> str:
    is_wide = form.dtype in ("float64", "int64", "uint64", "complex128")
    is_off = not jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]
    return " Set `jax.config.update('jax_enable_x64', True)`." if is_wide and is_off else ""
