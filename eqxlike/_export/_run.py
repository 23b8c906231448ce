"""Calling a program with pytrees: a comparison made for one call is not repeated for the next."""

import collections
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._partition import ArrayForm
from .._pytree import is_array, listed
from .._transforms import filter_jit
from ._file import Header
from ._form import arrays_in, build, describe_arguments, describe_other, given_tree

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
            return build(header.outputs.node, iter(call(*arrays)))

        def on_trees(*args: Any) -> Any:
            arrays = self._taken_apart(args, is_traced=True)
            key = (*map(jax.typeof, arrays),)
            if self._num_programs[key] >= _MAX_PROGRAMS:
                self._num_calls_apart = _CALLS_APART
                raise _TakeApartError
            self._num_programs[key] += 1
            return on_arrays(*arrays)

        for function in (on_arrays, on_trees):
            function.__name__ = function.__qualname__ = header.name
            # So explanations of retraces distinguish programs, and profiles do not show
            # this module.
            vars(function)["__wrapped__"] = call
            setattr(function, "__module__", None)  # noqa: B010
        if all(map(str.isidentifier, header.parameters)):
            kind = inspect.Parameter.POSITIONAL_ONLY
            parameters = [inspect.Parameter(name, kind) for name in header.parameters]
            vars(on_trees)["__signature__"] = inspect.Signature(parameters)
        self._call_arrays = filter_jit(on_arrays)
        self._call_trees = filter_jit(on_trees)
        # The arguments that are arrays, with their places and forms.
        self._arrays = [
            (place, name, part.arrays[0])
            for place, (name, part) in enumerate(header.inputs.parts())
            if part.node.kind == "array"
        ]
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
        for place, name, form in self._arrays:
            if is_number(args[place]):
                made[place] = as_given(form, args[place], name, {})
        return tuple(made)

    def _taken_apart(self, args: tuple[Any, ...], *, is_traced: bool = False) -> list[Any]:
        """The flat arrays to call the program with; a number in a trace raises
        `_TakeApartError`.
        """
        header = self._header
        if len(args) != len(header.parameters):
            raise TypeError(
                f"{header.name} takes ({describe_arguments(header.inputs)}), which is "
                f"{len(header.parameters)} in all; it got {len(args)}."
            )
        sizes: dict[str, Any] = {}
        arrays = []
        for form, leaf, path in self._compared(args):
            if is_traced and is_number(leaf):
                self._num_calls_apart = _CALLS_APART
                raise _TakeApartError
            arrays.append(as_given(form, leaf, path, sizes))
        return arrays

    def _compared(self, args: tuple[Any, ...]) -> Iterator[tuple[ArrayForm, Any, str]]:
        """The form and the path of each array, and what was passed there."""
        for (name, form), arg in zip(self._header.inputs.parts(), args, strict=True):
            yield from arrays_in(form, given_tree(arg), name)

    def _sizes_of(self, args: tuple[Any, ...]) -> list[str]:
        """What each array with a named axis must be, and its actual size."""
        return [
            f"{path} must be {form} and is {describe_other(leaf)}"
            for form, leaf, path in self._compared(args)
            if not all(isinstance(size, int) for size in form.shape)
        ]


class _TakeApartError(Exception):
    """A call whose arguments must be flattened before it is being traced."""


def arranged(header: Header, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments of a call, some of them passed by name, in order.

    **Raises:** `TypeError` for a name that is unknown, missing, or passed twice.
    """
    by_place = header.parameters[: len(args)]
    by_name = header.parameters[len(args) :]
    if len(args) + len(kwargs) != len(header.parameters) or set(kwargs) != set(by_name):
        came = ", ".join([*by_place, *kwargs])
        raise TypeError(
            f"{header.name} takes ({describe_arguments(header.inputs)}); it got ({came})."
        )
    return args + tuple(kwargs[name] for name in by_name)


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
        raise TypeError(f"{path} must be {form}; it is {describe_other(array)}.")
    if str(jax.dtypes.canonicalize_dtype(array.dtype, allow_extended_dtype=True)) != form.dtype:
        is_wide = form.dtype in ("float64", "int64", "uint64", "complex128")
        is_off = not jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]
        hint = " Set `jax.config.update('jax_enable_x64', True)`." if is_wide and is_off else ""
        raise TypeError(f"{path} must be {form}; it is {ArrayForm.of(array)}.{hint}")
    is_alike = len(array.shape) == len(form.shape)
    for size, expected in zip(array.shape, form.shape, strict=False):
        if isinstance(expected, int):
            is_alike &= size == expected
        elif expected.isidentifier():
            if size == 0:
                must = f"{path} must be {form}, with {expected} of any size from 1 upwards"
                raise ValueError(f"{must}; it is {ArrayForm.of(array)}.")
            if sizes.setdefault(expected, str(size)) != str(size):
                before = f"{expected} is {sizes[expected]} in what came before it"
                raise ValueError(
                    f"{path} must be {form}; it is {ArrayForm.of(array)}, and {before}."
                )
    if not is_alike:
        raise ValueError(f"{path} must be {form}; it is {ArrayForm.of(array)}.")
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
