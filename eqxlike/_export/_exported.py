"""`Exported`, a program that runs without the source of its function, and `load_exported`."""

import importlib.util
import os
import pathlib
import re
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.export
from jaxtyping import PyTree

from .._traceback import hide_our_frames
from ._descriptions import describe_arguments
from ._file import Header, read, write
from ._run import Runner, arranged


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
        self._runner: Runner | None = None
        self._lock = threading.Lock()

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
        runner = self._runner
        if runner is None:
            # All calls share one Runner, since JAX would compile the program again for a second
            # Runner.
            with self._lock:
                runner = self._runner = self._runner or Runner(self._header, self._call_flat())
        try:
            return runner.run(arranged(self._header, args, kwargs) if kwargs else args)
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
        write(pathlib.Path(path), self._header, self._program)

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
        call = self._read_as.call
        if self.vjp_order:
            return call

        def refuse(*_: Any) -> Any:
            raise ValueError(
                f"{self.name} was exported without gradients: export it again with `vjp_order=1`."
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
