"""Calls a program with pytrees, and checks the arguments."""

import collections
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import filter_jit, is_array
from ..extend import ArrayForm, listed
from ._descriptions import arrays_in, build, describe_arguments, describe_other, given_tree
from ._file import Header

_MAX_PROGRAMS = 4
"""Maximum number of compiled programs for the same array shapes. The arguments of these programs
differ in static leaves or in types of nodes. A call that would need a further program flattens its
arguments first. All such calls share one compiled program.
"""

_NUM_FLAT_CALLS = 100
"""If a call cannot be traced without flattening its arguments, this number of later calls flatten
their arguments at once. This saves failed attempts, which take milliseconds each.
"""

_NUMBERS = {bool, int, float, complex, np.float64, np.complex128}
"""The types of Python numbers, and the NumPy types that inherit from them."""


class Runner:
    """Runs a program on pytrees.

    Arguments are checked while `filter_jit` traces, so a warm call takes as long as a warm call of
    a filtered function. But `filter_jit` compiles again for each new Python number and each new
    function. An exported program accepts a Python number in place of an array, and compares
    functions by name only. So if numbers or functions would cause many compilations, the arguments
    are flattened before the call.

    **Arguments:**

    - `header`: the inputs and outputs of the program.
    - `call`: a function that runs the program. It takes and returns flat arrays.
    """

    def __init__(self, header: Header, call: Callable[..., Sequence[Any]]):
        self._header = header

        def on_arrays(*arrays: Any) -> Any:
            return build(header.outputs.node, iter(call(*arrays)))

        def on_trees(*args: Any) -> Any:
            arrays = self._flat_arrays(args, is_traced=True)
            key = (*map(jax.typeof, arrays),)
            if self._num_programs[key] >= _MAX_PROGRAMS:
                self._num_flat_calls = _NUM_FLAT_CALLS
                raise _FlattenFirstError
            self._num_programs[key] += 1
            return on_arrays(*arrays)

        for function in (on_arrays, on_trees):
            function.__name__ = function.__qualname__ = header.name
            # `__wrapped__` lets retrace reports distinguish programs. Without a `__module__`,
            # profiles do not show this module.
            vars(function)["__wrapped__"] = call
            setattr(function, "__module__", None)  # noqa: B010
        if all(map(str.isidentifier, header.parameters)):
            kind = inspect.Parameter.POSITIONAL_ONLY
            parameters = [inspect.Parameter(name, kind) for name in header.parameters]
            vars(on_trees)["__signature__"] = inspect.Signature(parameters)
        self._call_arrays = filter_jit(on_arrays)
        self._call_trees = filter_jit(on_trees)
        # The index, name and array type of each argument that is a single array.
        self._arrays = [
            (place, name, part.arrays[0])
            for place, (name, part) in enumerate(header.inputs.parts())
            if part.node.kind == "array"
        ]
        self._num_programs: collections.Counter[Any] = collections.Counter()
        self._num_flat_calls = 0

    def run(self, args: tuple[Any, ...]) -> Any:
        """Runs the program; see `Exported.call` for errors."""
        if self._num_flat_calls == 0:
            try:
                # Most calls have no numbers, and this test is faster than a loop over the
                # arguments.
                has_numbers = not _NUMBERS.isdisjoint(map(type, args))
                return self._call_trees(*(self._with_arrays(args) if has_numbers else args))
            except (TypeError, ValueError, _FlattenFirstError):
                # If only `filter_jit` rejected the arguments, for example because they cannot be
                # hashed, `_call_arrays` works below. Otherwise `_flat_arrays` or `_call_arrays`
                # raises a better error.
                pass
        else:
            self._num_flat_calls -= 1
        arrays = self._flat_arrays(args)
        try:
            return self._call_arrays(*arrays)
        except ValueError as error:
            if "polymorphic shape" not in str(error):
                raise
            # JAX's message shows neither the arguments nor their paths.
            raise ValueError(
                f"The sizes do not match: {listed(self._sizes_of(args))}. A named axis may have "
                "any size of at least 1, which must be the same for all axes with this name."
            ) from error

    def _with_arrays(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Converts each argument that is a number but should be an array."""
        if len(args) != len(self._header.parameters):
            return args
        made = list(args)
        for place, name, expected in self._arrays:
            if is_number(args[place]):
                made[place] = as_given(expected, args[place], name, {})
        return tuple(made)

    def _flat_arrays(self, args: tuple[Any, ...], *, is_traced: bool = False) -> list[Any]:
        """Checks and flattens the arguments.

        **Raises:** `_FlattenFirstError` if `is_traced` is set and a number replaces an array.
        """
        header = self._header
        if len(args) != len(header.parameters):
            raise TypeError(
                f"{header.name} takes {len(header.parameters)} arguments, "
                f"({describe_arguments(header.inputs)}); it got {len(args)}."
            )
        sizes: dict[str, Any] = {}
        arrays = []
        for expected, leaf, path in self._compared(args):
            if is_traced and is_number(leaf):
                self._num_flat_calls = _NUM_FLAT_CALLS
                raise _FlattenFirstError
            arrays.append(as_given(expected, leaf, path, sizes))
        return arrays

    def _compared(self, args: tuple[Any, ...]) -> Iterator[tuple[ArrayForm, Any, str]]:
        """The expected type, the passed value and the path of each array."""
        for (name, expected), arg in zip(self._header.inputs.parts(), args, strict=True):
            yield from arrays_in(expected, given_tree(arg), name)

    def _sizes_of(self, args: tuple[Any, ...]) -> list[str]:
        """The expected and actual shape of each array with a named axis."""
        return [
            f"{path} must be {expected} and is {describe_other(leaf)}"
            for expected, leaf, path in self._compared(args)
            if not all(isinstance(size, int) for size in expected.shape)
        ]


class _FlattenFirstError(Exception):
    """The arguments of a call that is being traced must be flattened before tracing."""


def arranged(header: Header, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Orders the arguments of a call, including arguments that are passed by name.

    **Raises:** `TypeError` if a name is unknown, or if an argument is missing or passed twice.
    """
    by_place = header.parameters[: len(args)]
    by_name = header.parameters[len(args) :]
    if len(args) + len(kwargs) != len(header.parameters) or set(kwargs) != set(by_name):
        came = ", ".join([*by_place, *kwargs])
        raise TypeError(
            f"{header.name} takes ({describe_arguments(header.inputs)}); it got ({came})."
        )
    return args + tuple(kwargs[name] for name in by_name)


# --- Checks of one array ---


def as_given(expected: ArrayForm, array: Any, path: str, sizes: dict[str, Any]) -> Any:
    """Checks one array, and converts a Python number.

    **Arguments:**

    - `expected`: the expected dtype and shape.
    - `sizes`: the sizes of the named axes of earlier arrays. New names are added in place.

    **Raises:**

    - `TypeError`, with the path, if `array` is not an array or has another dtype.
    - `ValueError`, with the path, if `array` has another shape.
    """
    if is_number(array):
        array = _as_scalar(array, expected)
    if not (is_array(array) or isinstance(array, np.generic)):
        raise TypeError(f"{path} must be {expected}; it is {describe_other(array)}.")
    if str(jax.dtypes.canonicalize_dtype(array.dtype, allow_extended_dtype=True)) != expected.dtype:
        is_wide = expected.dtype in ("float64", "int64", "uint64", "complex128")
        is_off = not jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]
        hint = " Set `jax.config.update('jax_enable_x64', True)`." if is_wide and is_off else ""
        raise TypeError(f"{path} must be {expected}; it is {ArrayForm.of(array)}.{hint}")
    is_alike = len(array.shape) == len(expected.shape)
    for size, wanted in zip(array.shape, expected.shape, strict=False):
        if isinstance(wanted, int):
            is_alike &= size == wanted
        elif wanted.isidentifier():
            if size == 0:
                must = f"{path} must be {expected}, where {wanted} is at least 1"
                raise ValueError(f"{must}; it is {ArrayForm.of(array)}.")
            if sizes.setdefault(wanted, str(size)) != str(size):
                before = f"{wanted} is {sizes[wanted]} in an earlier array"
                raise ValueError(
                    f"{path} must be {expected}; it is {ArrayForm.of(array)}, but {before}."
                )
    if not is_alike:
        raise ValueError(f"{path} must be {expected}; it is {ArrayForm.of(array)}.")
    return array


def is_number(leaf: Any) -> bool:
    """Whether a leaf is a Python number, which may replace an array."""
    return isinstance(leaf, bool | int | float | complex)


def _as_scalar(number: bool | int | float | complex, expected: ArrayForm) -> Any:
    """Converts a Python number to the expected dtype. Returns it unchanged if it does not fit."""
    kinds = {bool: np.bool_, int: np.number, float: np.inexact, complex: np.complexfloating}
    if expected.dtype.startswith("key<"):
        return number
    dtype = jnp.dtype(expected.dtype)
    if not jnp.issubdtype(dtype, next(kinds[each] for each in kinds if isinstance(number, each))):
        return number
    if isinstance(number, int) and jnp.issubdtype(dtype, np.integer):
        limits = jnp.iinfo(dtype)
        is_held = int(limits.min) <= number <= int(limits.max)
        return np.asarray(number, dtype) if is_held else number
    try:
        return np.asarray(number, dtype)
    except OverflowError:  # Python integers may exceed the range of floating-point numbers.
        return number
