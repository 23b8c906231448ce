"""Saving a state."""

import contextlib
import copy
import dataclasses
import errno
import functools
import importlib.metadata
import os
import pathlib
import platform
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..._dtypes import is_key
from ..._pytree import is_array
from ..._version import __version__
from .._checks import check_not_deleted
from ._background import Saving, in_first, lock, save_in_turn, together
from ._format import (
    NAME,
    Description,
    Manifest,
    StoredFile,
    StoredLeaf,
    checksum_of,
    checksum_of_file,
    describe,
    in_threads,
    open_arrays,
    orbax,
    to_text,
)


def save(
    path: str | os.PathLike[str],
    state: PyTree,
    data: Any = None,
    *,
    background: bool = False,
    with_frozen: bool = True,
) -> Saving:
    """Writes a state to a folder of files, from which `restore` reads it.

    The folder is put in place by one rename, once all of it is on the disk: whatever happens
    before, a kill or a full disk, what was at `path` stays. A checkpoint already there
    is replaced; at every moment one of the two is complete.

    **Arguments:**

    - `path`: the folder to make, or a checkpoint to replace. Folders above it are made.
    - `state`: a `TrainState`, or any pytree. JAX and NumPy arrays of numbers and bools, and PRNG
      keys, are written. Other leaves are not: `restore` takes them from `like`. Numbers, strings
      and bools are noted, so that `restore` refuses a `like` with others.
    - `data`: what is to be kept along, such as where a stream of batches stands: of `None`, bools,
      numbers, strings, lists and dicts, as in JSON.
    - `background`: copy the arrays to the host and return; a thread writes them. The state may be
      donated or changed at once. The interpreter waits for it as it exits, and the next save before
      it begins. In a run of several processes it is written before this returns.
    - `with_frozen`: whether to write arrays that `nn.freeze` has marked. Without them a checkpoint
      of an adapted model is small, and `restore` takes them from `like`: load the pretrained
      weights into it first. Their shapes and dtypes are checked, their values are not.

    **Returns:** a `Saving`; its `wait()` returns when the checkpoint is in place, and raises what
    went wrong. An error for which nobody waits is raised by the next save, or printed at exit.

    **Raises:** `TypeError` for an array that does not hold numbers, for a `jax.Ref`, and for `data`
    that is not JSON; `RuntimeError` if an array was donated; `FileExistsError` if something else is
    at `path`; `BlockingIOError` if another process is writing there; another `OSError` if it cannot
    be written; `ImportError` without Orbax, which `pip install 'eqxlike[train]'` brings.

    >>> import pathlib, tempfile, jax.numpy as jnp
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "checkpoint"
    >>> saving = save(path, {"weight": jnp.ones(2), "rate": 0.1}, {"epoch": 3}, background=True)
    >>> saving.wait()
    >>> sorted(each.name.split("-")[0] for each in path.iterdir())
    ['arrays', 'manifest.json']
    """
    return write_checkpoint(path, state, data, background=background, with_frozen=with_frozen)


def write_checkpoint(
    path: str | os.PathLike[str],
    state: PyTree,
    data: Any,
    *,
    background: bool,
    with_frozen: bool = True,
    score: float | None = None,
    beside: Mapping[str, PyTree] | None = None,
    then: Callable[[], object] = lambda: None,
) -> Saving:
    """Writes a state like `save`, and the trees in `beside` by their names; calls `then`, in the
    same thread, once the checkpoint is in place.
    """
    orbax()
    _check_user_data(data, "data")
    trees: dict[str | None, PyTree] = {None: state} | dict(beside or {})
    described: dict[str | None, Description] = {}
    for name, tree in trees.items():
        check_not_deleted(tree, name or "state", "train.save")
        described[name] = describe(tree, with_frozen=with_frozen)
    target = pathlib.Path(os.path.realpath(path))
    # Several processes wait for each other in a save: not in threads, next to their steps.
    background = background and jax.process_count() == 1

    # `save_in_turn` waits for an earlier save, has `begin` copy the arrays, and then what that
    # returns write them.
    def begin() -> Callable[[], None]:
        # `jax.transfer_guard` is for accidental transfers; this one is asked for.
        with jax.transfer_guard("allow"):
            stored, arrays = _take(described, copies=background)
            step = _step_of(state)
        manifest_of = functools.partial(
            Manifest,
            nodes=described[None].nodes,
            beside={name: described[name].nodes for name in beside or {}},
            data=copy.deepcopy(data),
            step=step,
            score=score,
            versions=_versions(),
        )
        return lambda: _write(target, manifest_of, stored, arrays, then)

    return save_in_turn(str(target), begin, background)


def _take(
    described: dict[str | None, Description], copies: bool
) -> tuple[list[StoredLeaf], dict[str, Any]]:
    """What to write of each leaf, and the arrays by the names that they get.

    **Arguments:**

    - `copies`: copy the numbers, so that the arrays may change at once.
    """
    leaves = [(tree, *each) for tree in described for each in described[tree].leaves]
    for _, leaf, value in leaves:
        is_jax_array = leaf.kind == "array" and isinstance(value, jax.Array)
        if is_jax_array and value.is_fully_addressable:
            # All transfers are begun before the first is waited for.
            value.copy_to_host_async()
    stored, arrays = [], {}
    for index, (tree, leaf, value) in enumerate(leaves):
        if leaf.num_bytes == 0:
            stored.append(StoredLeaf(leaf, tree=tree))
            continue
        # The number makes the name unique; the path, in characters of all systems, readable.
        readable = re.sub(r"[^A-Za-z0-9_]+", ".", leaf.path).rstrip(".")[:80]
        name = f"{index:05d}{readable}"
        sharding = str(value.sharding) if isinstance(value, jax.Array) else None
        arrays[name] = array = _numbers(value, copies)
        stored.append(StoredLeaf(leaf, name, str(array.dtype), None, sharding, tree))
    return stored, arrays


def _numbers(value: Any, copies: bool) -> Any:
    """The numbers to write: a NumPy array, unless only a part of the array is in this process."""
    if isinstance(value, jax.Array):
        if is_key(value):
            value = jax.random.key_data(value)
        if not (value.is_fully_addressable or value.is_fully_replicated):
            return value
    # On a CPU, what JAX hands to NumPy is the memory of the array itself.
    numbers = np.array(value, order="C", copy=True if copies else None)
    numbers = numbers.astype(numbers.dtype.newbyteorder("="), copy=False)
    # Tensorstore does not know all floats and integers of a byte or less that were added to NumPy.
    is_added = numbers.dtype.isbuiltin == 2 and numbers.dtype.itemsize == 1
    return numbers.view(np.uint8) if is_added else numbers


def _step_of(state: Any) -> int | None:
    step: Any = getattr(state, "step", None)
    is_scalar = is_array(step) and step.shape == () and jnp.issubdtype(step.dtype, jnp.integer)
    return int(np.asarray(step)) if is_scalar or isinstance(step, int) else None


@functools.cache
def _versions() -> dict[str, str]:
    libraries = ("jax", "jaxlib", "numpy", "orbax-checkpoint", "tensorstore")
    found = {"eqxlike": __version__, "python": platform.python_version()}
    return found | {name: importlib.metadata.version(name) for name in libraries}


def _check_user_data(value: Any, path: str) -> None:
    """Raises `TypeError`, with the path, for what JSON does not have or would change."""
    if value is None or isinstance(value, bool | int | float | str):
        return
    if isinstance(value, list | dict):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(value, dict) and not isinstance(key, str):
                raise TypeError(
                    f"train.save expected strings as keys of `{path}`, and got {key!r}: JSON has "
                    "no others."
                )
            _check_user_data(each, f"{path}[{key!r}]")
    else:
        hint = ": make it a list" if isinstance(value, tuple) else ""
        raise TypeError(
            "train.save expected `data` of JSON (None, bool, int, float, str, list, dict), and got "
            f"{type(value).__name__} at {path}{hint}. Arrays belong in `state`."
        )


# --- Writing: into a temporary folder, which one rename puts in its place ---


_ARRAYS = "arrays-"
"""How the folders of arrays in a checkpoint begin."""


def _write(
    path: pathlib.Path,
    manifest_of: Callable[..., Manifest],
    stored: list[StoredLeaf],
    arrays: dict[str, Any],
    then: Callable[[], object],
) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    folder = temporary / "arrays"
    with _naming(path), contextlib.ExitStack() as stack:

        def begin() -> None:
            stack.enter_context(_claimed(temporary, path))
            folder.mkdir()

        def with_checksum(leaf: StoredLeaf) -> StoredLeaf:
            array = arrays.get(leaf.name or "")
            checksum = checksum_of(array) if isinstance(array, np.ndarray) else None
            return dataclasses.replace(leaf, checksum=checksum)

        def end() -> None:
            name = f"{_ARRAYS}{secrets.token_hex(4)}"
            manifest = manifest_of(
                arrays_folder=name, leaves=in_threads(with_checksum, stored), files=seal(folder)
            )
            _check_written(path, manifest)
            os.rename(folder, temporary / name)
            _put_in_place(temporary, path, manifest)

        in_first(begin)
        if arrays:
            together(lambda: write_arrays(folder, arrays))
        in_first(end)
    then()


@contextlib.contextmanager
def _naming(path: pathlib.Path) -> Iterator[None]:
    """Names the checkpoint in errors of the system, also where tensorstore has them as a text."""
    try:
        yield
    except (OSError, ValueError) as error:
        hidden = re.search(r"os_error_code='(\d+)'", str(error))
        number = int(hidden[1]) if hidden else getattr(error, "errno", None)
        if number is None or getattr(error, "filename", None) == str(path):
            raise
        # Python finds the subclass by the number.
        reason = f"{os.strerror(number)}, in writing a checkpoint there"
        raise OSError(number, reason, str(path)) from error


@contextlib.contextmanager
def _claimed(temporary: pathlib.Path, path: pathlib.Path) -> Iterator[None]:
    """Makes the empty folder `temporary`, on the disk of `path`, and locks it.

    It is deleted when the `with` block ends. If the process is killed it stays, unlocked, and the
    next process that writes to `path` takes it.

    **Raises:** `BlockingIOError` if another process is writing to `path`; `FileExistsError` if
    something else than a checkpoint is there; `OSError` if the folder cannot be made.
    """
    _check_replaceable(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        temporary.mkdir(exist_ok=True)
        # Another process may rename or remove the folder before we lock it; then try again.
        with contextlib.suppress(FileNotFoundError):
            descriptor = lock(temporary, "another process is writing a checkpoint there", path)
            break
    try:
        for entry in temporary.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        yield
    finally:
        # Where ours was renamed, another process may have made one since. The lock holds until all
        # is deleted.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(temporary)):
                shutil.rmtree(temporary, ignore_errors=True)
        os.close(descriptor)


def _check_replaceable(path: pathlib.Path) -> None:
    is_checkpoint = path.is_dir() and (
        (path / NAME).exists() or all(name.startswith(_ARRAYS) for name in os.listdir(path))
    )
    if os.path.lexists(path) and not is_checkpoint:
        raise FileExistsError(
            errno.EEXIST,
            "something else than a checkpoint is there, which is not overwritten: give another "
            "path",
            str(path),
        )


def write_arrays(folder: pathlib.Path, arrays: dict[str, Any]) -> None:
    """Writes each array into a folder of its own name; `folder` must exist.

    Where arrays span several processes, each of them calls this and writes its part.
    """
    with open_arrays(folder) as (handler, path):
        handler.save(path, args=orbax().args.PyTreeSave(arrays))


def seal(folder: pathlib.Path) -> dict[str, StoredFile]:
    """Syncs all under `folder` to the disk, and computes the checksum of each file.

    **Returns:** the files by their paths in `folder`, with `/`.
    """
    paths = sorted([folder, *folder.rglob("*")])
    files = {path.relative_to(folder).as_posix(): path for path in paths if path.is_file()}
    sealed = in_threads(_seal_file, files.values())
    for path in paths:
        if path.is_dir():
            _sync(path)
    return dict(zip(files, sealed, strict=True))


def _seal_file(path: pathlib.Path) -> StoredFile:
    _sync(path)
    return StoredFile(path.stat().st_size, checksum_of_file(path))


def _sync(path: pathlib.Path) -> None:
    """Syncs a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_written(path: pathlib.Path, manifest: Manifest) -> None:
    """Raises `OSError` if a file does not read as what was in memory: the old checkpoint is deleted
    after this.
    """
    files = manifest.files_by_leaf()
    for stored in manifest.leaves:
        checksums = [file.checksum for file in files.get(stored.name or "", [])]
        # An array that was written whole is one file, of its bytes alone.
        if stored.checksum is not None and len(checksums) == 1 and checksums != [stored.checksum]:
            reason = f"{stored.place} reads otherwise than it was written"
            raise OSError(errno.EIO, reason, str(path))


def _put_in_place(temporary: pathlib.Path, path: pathlib.Path, manifest: Manifest) -> None:
    """Makes the folder `temporary`, with the arrays, the checkpoint at `path`.

    Where there is none, the whole folder is renamed. No rename replaces a folder that is not empty.
    So where there is a checkpoint, the new arrays are moved into it, next to the old ones, and then
    one rename replaces the manifest: at every moment it names either the old arrays or the new
    ones. The old arrays are deleted after that.
    """
    (temporary / NAME).write_text(to_text(manifest))
    _sync(temporary / NAME)
    _sync(temporary)
    if (path / NAME).exists():
        os.rename(temporary / manifest.arrays_folder, path / manifest.arrays_folder)
        _sync(path)
        os.replace(temporary / NAME, path / NAME)
        _sync(path)
        _remove_other_arrays(path, keep=manifest.arrays_folder)
        return
    if path.exists():
        # An empty folder, or arrays whose manifest is lost.
        _remove_other_arrays(path, keep="")
    os.rename(temporary, path)
    _sync(path.parent)


def _remove_other_arrays(path: pathlib.Path, keep: str) -> None:
    for entry in path.glob(f"{_ARRAYS}*"):
        if entry.name != keep:
            shutil.rmtree(entry)
