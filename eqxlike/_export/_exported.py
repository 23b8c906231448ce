"""`Exported`, a program that runs without the source of its function, and `load_exported`."""

import collections
import importlib.util
import inspect
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from .. import filter_jit, is_array
from .._traceback import hide_our_frames
from ..extend import ArrayForm, listed
from ._file import Header, arrays_in, build, describe_arguments, describe_other, given_tree, read


class Exported:
    """A program that `export` made, with its weights and the structure of its inputs and outputs.

    - `name`: name of the function.
    - `platforms`: platforms on which the program runs, such as `("cpu", "cuda")`.
    - `vjp_order`: how many times the program can be differentiated.
    - `versions`: maps the names of the libraries that exported the program to their versions.
    """

    def __init__(self, header: Header, program: bytes, read_as: jax.export.Exported):
        self.name = header.name
        self.platforms = header.platforms
        self.vjp_order = header.vjp_order
        self.versions = dict(header.versions)
        self._header = header
        self._program = program
        self._read_as = read_as
        self._runner = Runner(header, self._call_flat())

    @property
    def stablehlo(self) -> str:
        """The program as StableHLO text."""
        return self._read_as.mlir_module()

    def call(self, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Calls the program. The first call with new shapes or new node types compiles it.

        **Arguments:**

        - `*args`, `**kwargs`: arguments by position or by name. They must have the structure for
          which the function was exported, that is, the same tuples, lists, dictionaries and named
          tuples of arrays. A node with the same fields, or a dictionary of these fields, may
          replace a Module or other custom node. The dictionary may omit fields without arrays.
          Leaves that are not arrays are part of the program and must be the same.

        **Returns:** the output, with dictionaries in place of Modules and other custom nodes.

        **Raises:**

        - `TypeError` or `ValueError`, with the path, if an argument has another structure, shape or
          dtype.
        - `ValueError` if the program was not exported for this platform.
        - `ValueError` if the program is differentiated more than `vjp_order` times.
        """
        try:
            return self._runner.run(arranged(self._header, args, kwargs) if kwargs else args)
        except Exception as error:
            if isinstance(error, NotImplementedError) and "Batching rule" in str(error):
                error.add_note(
                    f"The program of {self.name} has no batching rule: export a function of "
                    "batches, such as `jax.vmap(model)`, instead of mapping `.call`."
                )
            if isinstance(error, TypeError) and "forward-mode" in str(error):
                error.add_note(
                    f"The program of {self.name} can only be differentiated in reverse mode, with "
                    f"`vjp_order={self.vjp_order}`. For forward mode, export the derivative as a "
                    "separate function."
                )
            hide_our_frames(error)
            raise

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the program to a file. An existing file is replaced atomically.

        **Raises:** `OSError` if the file cannot be written.
        """
        self._header.write(pathlib.Path(path), self._program)

    def __repr__(self) -> str:
        header = self._header
        versions = ", ".join(f"{name} {version}" for name, version in header.versions.items())
        return (
            f"Exported: {header.name}({describe_arguments(header.inputs)}) -> {header.outputs}\n"
            f"  platforms  {', '.join(header.platforms)}\n"
            f"  gradients  {('none', 'once', f'{self.vjp_order} times')[min(self.vjp_order, 2)]}\n"
            f"  program    {len(self._program):,} bytes\n"
            f"  made by    {versions}"
        )

    def __reduce__(self) -> Any:
        return from_parts, (self._header, self._program, self.name)

    def _call_flat(self) -> Callable[..., Any]:
        """Makes a function of flat arrays that runs the program.

        If the program has no gradient, differentiating the function raises an error.
        """
        name, call = self.name, self._read_as.call
        if self.vjp_order:
            return call

        # JAX's caches keep `refuse` alive, so it does not close over `self`.
        def refuse(*_: Any) -> Any:
            raise ValueError(
                f"{name} was exported without gradients: export it again with `vjp_order=1`."
            )

        with_rule = jax.custom_vjp(call)
        with_rule.defvjp(lambda *arrays: (call(*arrays), None), refuse)
        return with_rule


def load_exported(path: str | os.PathLike[str]) -> Exported:
    """Reads a program that `Exported.save` wrote. The source of the function is not needed.

    The file contains JSON and StableHLO. Reading it executes no code.

    **Arguments:**

    - `path`: path of the file.

    **Returns:** the program; see `Exported`.

    **Raises:**

    - `OSError` if the file cannot be read.
    - `ValueError`, with the path, if the file is truncated, damaged or not an exported program.
    - `ValueError`, with the path, if a newer version of eqxlike or jax wrote the file, and the
      installed version cannot read it.
    - `ImportError` if flatbuffers is not installed.

    !!! example

        >>> import eqxlike as eqx, jax, jax.numpy as jnp, pathlib, tempfile
        >>> def double(x):
        ...     return 2 * x
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = pathlib.Path(folder.name, "double.eqxport")
        >>> eqx.export(double, jnp.ones(3)).save(path)
        >>> print(eqx.load_exported(path).call(jnp.arange(2.0)))
        [0. 2.]
        >>> folder.cleanup()
    """
    place = pathlib.Path(path)
    return from_parts(*read(place), str(place))


def from_parts(header: Header, program: bytes, where: str) -> Exported:
    """Deserialises a program.

    **Arguments:**

    - `where`: the path or name of the program in error messages.

    **Raises:** `ValueError` if this version of jax cannot read the program.
    """
    need_flatbuffers("load_exported")
    versions = range(
        jax.export.minimum_supported_calling_convention_version,
        jax.export.maximum_supported_calling_convention_version + 1,
    )
    made_by = header.versions.get("jax")
    if header.calling_convention_version not in versions:
        raise ValueError(
            f"{where} was exported by jax {made_by}, with calling convention "
            f"{header.calling_convention_version}; jax {jax.__version__} reads {versions[0]} to "
            f"{versions[-1]}: use a jax nearer to {made_by}, or export again."
        )
    is_newer = made_by is not None and _numbers_in(made_by) > _numbers_in(jax.__version__)
    try:
        read_as = jax.export.deserialize(bytearray(program))
        if is_newer:
            # If the program has operations that this jax does not know, raise an error now and not
            # in the first call.
            read_as.mlir_module()
    except Exception as error:  # JAX raises errors of many types.
        first_line = str(error).partition("\n")[0]
        raise ValueError(
            f"{where} was exported by jax {made_by}, and jax {jax.__version__} cannot read it "
            f"({first_line}): update jax, or export again."
        ) from error
    dtypes = [each.dtype for each in (*header.inputs.arrays, *header.outputs.arrays)]
    avals = (*read_as.in_avals, *read_as.out_avals)
    if dtypes != [str(aval.dtype) for aval in avals]:
        raise ValueError(f"{where} is damaged: its header describes another program.")
    return Exported(header, program, read_as)


def need_flatbuffers(caller: str) -> None:
    """Raises `ImportError` if flatbuffers is not installed. The message names `caller`."""
    if importlib.util.find_spec("flatbuffers") is None:
        raise ImportError(f"{caller} needs flatbuffers: `pip install 'eqxlike[export]'`.")


def _numbers_in(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


# --- Calls of a program with pytrees, and checks of the arguments ---


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
