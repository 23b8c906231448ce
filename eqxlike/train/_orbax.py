"""Files of a checkpoint: the arrays, which Orbax writes and reads, and a manifest next to them.

The first line of the manifest is the sha256 of the other lines, which are JSON. The JSON describes
each node and leaf of the state, and has the size and sha256 of each file with arrays.
"""

import atexit
import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
import pathlib
import re
import threading
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from .._compat import Tracer
from .._dtypes import is_key
from ..extend import is_array_or_struct, is_reference
from ._checks import importing

ARRAYS, MANIFEST = "arrays", "manifest"
"""The two folders of a checkpoint. The first has the arrays, the second has `manifest.json`."""


class CheckpointError(ValueError):
    """Raised if a checkpoint is damaged: a file is missing, truncated or changed, or the folder is
    not a checkpoint.

    If you get this error, an older checkpoint may still be intact. If a checkpoint is intact but
    does not fit the model, a plain `ValueError` is raised instead, because older checkpoints would
    not fit either.
    """


def seal(manifest: pathlib.Path, arrays: pathlib.Path) -> None:
    """Completes a new `manifest.json`: adds checksums of the files with arrays, and puts a checksum
    of the whole text into the first line.
    """
    content = json.loads(manifest.read_bytes()) | {"files": _files_in(arrays)}
    text = json.dumps(content).encode()
    with open(manifest, "wb") as file:
        file.write(_sha256(text) + b"\n" + text)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: pathlib.Path) -> dict[str, Any]:
    """The manifest of a checkpoint: `state`, `beside`, `data` and `files`.

    **Raises:** `FileNotFoundError` if there is no such folder. `CheckpointError` if the folder is
    not a checkpoint, or its manifest is damaged.
    """
    if not folder.exists():
        raise FileNotFoundError(f"There is no checkpoint at {folder}.")
    path = folder / MANIFEST / "manifest.json"
    try:
        checksum, _, text = path.read_bytes().partition(b"\n")
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"{folder} is damaged or not a checkpoint: {path} is missing."
        ) from None
    if checksum != _sha256(text):
        raise CheckpointError(f"{path} is damaged: its checksum does not match its content.")
    return json.loads(text)


def check_files(folder: pathlib.Path, manifest: dict[str, Any]) -> None:
    """Raises `CheckpointError`, with the path of the leaf, if a file is missing or was changed."""
    found = _files_in(folder / ARRAYS)
    trees = {"state": manifest["state"]} | manifest["beside"]
    places = {each[2]: f"{tree}{each[0]}" for tree in trees for each in trees[tree]}
    for name, (size, checksum) in manifest["files"].items():
        if found.get(name) != [size, checksum]:
            problem = "is missing"
            if name in found:
                problem = f"was changed: it had {size} bytes and now has {found[name][0]}"
            raise CheckpointError(
                f"{folder} is damaged: {folder / ARRAYS / name}, with the values of "
                f"{places.get(name.partition('/')[0], 'all arrays')}, {problem}."
            )


def _files_in(folder: pathlib.Path) -> dict[str, list[Any]]:
    """Size and sha256 of each file in a folder, by relative path."""

    def describe(path: pathlib.Path) -> list[Any]:
        with open(path, "rb", buffering=0) as file:
            return [path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()]

    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    names = [path.relative_to(folder).as_posix() for path in paths]
    # Threads help, because hashing and reading release the GIL.
    with concurrent.futures.ThreadPoolExecutor(4) as executor:
        return dict(zip(names, executor.map(describe, paths), strict=True))


def _sha256(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest().encode()


# --- The description of a pytree, used to compare a checkpoint with a state ---


NODE: Any = object()
"""The `value` of an `Entry` that describes a node."""


class Entry(NamedTuple):
    """A description of a node or a leaf of a pytree.

    - `path`: its path, such as `.model.layers[0].weight`.
    - `text`: for a node, its type and static fields; for an array, its shape and dtype; for a
      number or a string, its value.
    - `value`: the leaf, or `NODE` for a node.
    """

    path: str
    text: str
    value: Any


class Saved(NamedTuple):
    """A description of a node or a leaf in a manifest.

    - `path`, `text`: as in `Entry`.
    - `name`: the name of the stored array. It is `None` if no array is stored. No array is stored
      for nodes, leaves that are not arrays, arrays without elements, and frozen arrays that were
      left out.
    - `key_impl`: the implementation of a PRNG key; `None` for other leaves and for nodes.
    """

    path: str
    text: str
    name: str | None
    key_impl: str | None


def describe(pytree: PyTree) -> tuple[list[Entry], Any]:
    """Describes all nodes and leaves of a pytree, from the root down.

    **Returns:** the descriptions, and the treedef of the pytree.

    **Raises:** `TypeError`, with the path, for a leaf that a checkpoint cannot store.
    """
    entries: list[Entry] = []

    def note(path: tuple[Any, ...], value: Any) -> bool:
        place, is_leaf = jtu.keystr(path), jtu.all_leaves([value])
        text = _describe_leaf(place, value) if is_leaf else _describe_node(value)
        entries.append(Entry(place, text, value if is_leaf else NODE))
        return False

    return entries, jtu.tree_flatten_with_path(pytree, note, is_leaf_takes_path=True)[1]


def _describe_leaf(path: str, leaf: Any) -> str:
    is_refused = isinstance(leaf, Tracer | np.ma.MaskedArray) or is_reference(leaf)
    if not is_refused and not is_array_or_struct(leaf):
        return _stable_text(leaf) or "no array"
    is_typed_key = is_key(leaf)
    # Arrays are written in native byte order.
    dtype = leaf.dtype if is_typed_key else np.dtype(leaf.dtype).newbyteorder("=")
    # `longdouble` ("g", "G") is rejected, because it differs between machines, and other libraries
    # do not support it.
    is_numeric = is_typed_key or dtype.kind == "b" or jnp.issubdtype(dtype, jnp.number)
    if is_refused or not is_numeric or getattr(dtype, "char", "") in ("g", "G"):
        raise TypeError(
            "A checkpoint can hold only arrays of numbers and bools, and must be written and read "
            f"outside jit; state{path} has type {type(leaf).__name__} and dtype {dtype}."
        )
    return f"an array of shape {tuple(leaf.shape)} and dtype {dtype}"


def _describe_node(node: Any) -> str:
    name = type(node).__qualname__
    fields = dataclasses.fields(node) if dataclasses.is_dataclass(node) else ()
    statics = {
        field.name: _stable_text(getattr(node, field.name, None))
        for field in fields
        if field.metadata.get("static")
    }
    texts = [f"{field}={text}" for field, text in statics.items() if text is not None]
    return f"{name}({', '.join(texts)})" if texts else name


def _stable_text(value: Any) -> str | None:
    """A text that is the same for equal values in all versions and on all machines.

    Returns `None` if there is no such text.
    """

    def is_stable(value: Any) -> bool:
        # Compare types, because `isinstance` is also true for some NumPy scalars and enums. Their
        # `repr` differs from the `repr` of an equal Python number.
        if type(value) in (tuple, list):
            return all(map(is_stable, value))
        return value is None or type(value) in (bool, int, float, complex, str)

    return repr(value) if is_stable(value) else None


# --- Writing and reading with Orbax ---


def orbax() -> ModuleType:
    """Imports Orbax. Raises `ImportError` if it is missing."""
    with importing("Checkpoints need Orbax", "train"):
        import orbax.checkpoint
    return orbax.checkpoint


def write(
    path: pathlib.Path,
    step: int,
    manifest: dict[str, Any],
    arrays: dict[str, Any],
    score: float | None,
    **kept: Any,
) -> "Saving":
    """Starts to write a checkpoint. Orbax then deletes checkpoints that need not be kept."""
    args, is_score = orbax().args, score is not None and math.isfinite(score)
    _join_at_exit()
    # Orbax does not write an empty tree.
    arrays = arrays or {"none": np.zeros(1)}
    items = {MANIFEST: args.JsonSave(manifest), ARRAYS: args.PyTreeSave(arrays)}
    metrics = {"score": float(score or 0) if is_score else None}
    # The user's `jax.transfer_guard` should stop accidental transfers. The transfers here are
    # intended, so allow them.
    with _with_path_in_errors(path), jax.transfer_guard("allow"):
        path.parent.mkdir(parents=True, exist_ok=True)
        manager = open_manager(path.parent, writes=True, **kept)
        manager.save(step, args=args.Composite(**items), metrics=metrics, force=True)
    return Saving(path, manager)


def open_manager(
    folder: pathlib.Path, *, keep_last: int, keep_best: int | None, mode: str, writes: bool
) -> Any:
    """Orbax's manager of the checkpoints in a folder.

    **Arguments:**

    - `keep_last`, `keep_best`, `mode`: see `CheckpointFolder`.
    - `writes`: whether to delete temporary folders that killed processes left behind.
    """
    ocp, sign = orbax(), 1 if mode == "max" else -1

    def quality(metrics: dict[str, Any]) -> float:
        return -math.inf if metrics["score"] is None else sign * metrics["score"]

    managers, registry = ocp.checkpoint_managers, ocp.DefaultCheckpointHandlerRegistry()
    best = managers.BestN(get_metric_fn=quality, n=keep_best or 0)
    # The order of the items matters, because Orbax finalises them in this order.
    handler = ocp.JsonCheckpointHandler(filename="manifest.json")
    registry.add(MANIFEST, ocp.args.JsonSave, handler)
    registry.add(ARRAYS, ocp.args.PyTreeSave, _array_handler())
    options = ocp.CheckpointManagerOptions(
        best_fn=quality,
        preservation_policy=managers.AnyPreservationPolicy([managers.LatestN(keep_last), best]),
        step_prefix="step",
        step_format_fixed_length=9,
        create=False,
        cleanup_tmp_directories=writes,
        # If a folder cannot be created, asynchronous creation would make the writing threads wait
        # for minutes.
        async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
    )
    try:
        return ocp.CheckpointManager(folder, options=options, handler_registry=registry)
    except ValueError as error:
        raise CheckpointError(
            f"One of the files {folder}/step_*/metrics/metrics is damaged."
        ) from error


def _array_handler() -> Any:
    class Arrays(orbax().PyTreeCheckpointHandler):
        # Orbax calls `finalize` when all files are written, before it renames the folder.
        def finalize(self, directory: Any) -> None:
            arrays = pathlib.Path(directory)
            seal(arrays.parent / MANIFEST / "manifest.json", arrays)

    # OCDBT is off, so that each array has its own folder, and the path of a damaged file shows the
    # name of the array. Compression is off, because it hardly shrinks weights.
    return Arrays(use_ocdbt=False, use_zarr3=False, use_compression=False)


def read_arrays(
    folder: pathlib.Path, shardings: dict[str, jax.sharding.Sharding | None]
) -> dict[str, Any]:
    """Reads arrays of a checkpoint by name.

    An array with a sharding becomes a JAX array, and each device reads its part. An array without a
    sharding becomes a NumPy array.
    """
    if not shardings:
        return {}
    # To read JAX arrays, Orbax needs a path object of `etils`, one of its dependencies.
    from etils import epath

    ocp = orbax()
    restore_args = {
        name: ocp.ArrayRestoreArgs(restore_type=jax.Array, sharding=sharding)
        if sharding is not None
        else ocp.RestoreArgs(restore_type=np.ndarray)
        for name, sharding in shardings.items()
    }
    names = dict.fromkeys(shardings, 0)
    args = ocp.args.PyTreeRestore(names, restore_args=restore_args, partial_restore=True)
    with contextlib.closing(_array_handler()) as handler:
        return handler.restore(epath.Path(folder / ARRAYS), args=args)


class Saving:
    """A save that is in progress or finished.

    - `path`: the folder of the checkpoint.
    """

    def __init__(self, path: pathlib.Path, manager: Any) -> None:
        self.path, self._manager = str(path), manager
        self._is_over, self._error, self._lock = False, None, threading.Lock()
        _under_way.append(self)

    @property
    def is_done(self) -> bool:
        """True if the checkpoint is complete, or writing has failed."""
        return self._is_over or not self._manager.is_saving_in_progress()

    def wait(self) -> None:
        """Waits until the checkpoint is complete.

        **Raises:** the error, such as `OSError`, if writing failed. Earlier checkpoints stay.
        """
        error = self.join()
        _under_way[:] = [each for each in _under_way if each is not self]
        if error is not None:
            raise error

    def join(self) -> Exception | None:
        """Waits until the checkpoint is complete or has failed, and returns the error."""
        # Poll instead of waiting in Orbax. Up to Python 3.12, Ctrl-C during Orbax's wait would mark
        # Orbax's thread as finished.
        while not self.is_done:
            time.sleep(0.002)
        with self._lock:
            if not self._is_over:
                self._error, self._is_over = self._close(), True
        return self._error

    def _close(self) -> Exception | None:
        """Closes Orbax's manager and returns the first error.

        If a part of a save fails, `close` raises an error while threads may still write the other
        parts. Each further call waits for another part. In Python 3.11, a manager with an
        unfinished thread can also deadlock when the garbage collector deletes it.
        """
        first = None
        for _ in range(100):
            try:
                with _with_path_in_errors(self.path):
                    self._manager.close()
                break
            except Exception as error:
                first = first or error
        return first


_under_way: list[Saving] = []
"""Saves for which `wait` or `join` was not called."""


def join_all(raises_in: pathlib.Path | None = None) -> None:
    """Waits for all saves. Raises an error only if a save in the folder `raises_in` failed.

    If a save in another folder failed, only the method `wait` of its `Saving` raises the error.
    """
    for each in list(_under_way):
        if each.join() is None or pathlib.Path(each.path).parent == raises_in:
            each.wait()


@functools.cache
def _join_at_exit() -> None:
    """Makes the interpreter wait for all saves before it exits. Orbax prints errors."""
    # `atexit` runs too late: by then, the thread pools that Orbax uses no longer accept work.
    # Python 3.9 to 3.14 has an earlier hook, but only as this private function.
    getattr(threading, "_register_atexit", atexit.register)(join_all)


@contextlib.contextmanager
def _with_path_in_errors(path: pathlib.Path | str) -> Iterator[None]:
    """Context manager that raises system errors as `OSError` with the path of the checkpoint.

    System errors that tensorstore reports only as text are converted too.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        hidden = re.search(r"os_error_code='(\d+)'", str(error))
        number = int(hidden[1]) if hidden else getattr(error, "errno", None)
        if number is None:
            raise
        # `OSError(errno, ...)` creates the subclass for this `errno`, such as `PermissionError`.
        reason = f"{os.strerror(number)}, while writing a checkpoint"
        raise OSError(number, reason, str(path)) from error
