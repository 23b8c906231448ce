"""Putting a checkpoint in its place: by one rename, after all of it is on the disk."""

import contextlib
import errno
import os
import pathlib
import shutil
from collections.abc import Iterator

from ._files import sync_folder
from ._locks import lock, unlock
from ._manifest import NAME, Manifest, to_text

ARRAYS = "arrays-"
"""How the folders of arrays in a checkpoint begin."""


@contextlib.contextmanager
def folder_beside(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """An empty folder beside `path`, on the same disk, which nobody else has.

    It is gone when the `with` block is left. Where the process is killed it stays, unlocked, and
    the next one that writes to `path` takes it.

    **Raises:** `BlockingIOError` if another process is writing to `path`; `FileExistsError` if
    something else than a checkpoint is there; `OSError` if the folder cannot be made.
    """
    _check_replaceable(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_of(path)
    descriptor = _claim(temporary, path)
    try:
        for entry in os.scandir(temporary):
            _remove(pathlib.Path(entry))
        yield temporary
    finally:
        # What was renamed is there no longer. The lock holds until all is gone.
        shutil.rmtree(temporary, ignore_errors=True)
        unlock(descriptor)


def put_in_place(temporary: pathlib.Path, path: pathlib.Path, manifest: Manifest) -> None:
    """Makes the folder `temporary`, with the arrays, the checkpoint at `path`.

    Where there is none, the whole folder is renamed. No rename puts a folder in the place of one
    that holds something. So where there is one, the new arrays are moved into it, beside the old
    ones, and then the manifest is replaced, by one rename, which names either the old or the new
    ones: at no moment is there none. The old arrays are deleted after that.
    """
    text = to_text(manifest).encode()
    with open(temporary / NAME, "xb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(temporary)
    if (path / NAME).exists():
        os.rename(temporary / manifest.arrays_folder, path / manifest.arrays_folder)
        sync_folder(path)
        os.replace(temporary / NAME, path / NAME)
        sync_folder(path)
        _remove_other_arrays(path, manifest.arrays_folder)
        return
    if path.exists():
        # Arrays whose manifest is lost, or nothing.
        _remove_other_arrays(path, keep="")
    os.rename(temporary, path)
    sync_folder(path.parent)


def temporary_of(path: pathlib.Path) -> pathlib.Path:
    """The folder in which the checkpoint at `path` is made."""
    return path.with_name(f".{path.name}.tmp")


def _check_replaceable(path: pathlib.Path) -> None:
    if not os.path.lexists(path):
        return
    if path.is_dir():
        names = os.listdir(path)
        if NAME in names or all(name.startswith(ARRAYS) for name in names):
            return
    raise FileExistsError(
        errno.EEXIST,
        "something else than a checkpoint is there, which is not overwritten: give another path",
        str(path),
    )


def _claim(temporary: pathlib.Path, path: pathlib.Path) -> int | None:
    """Makes the folder and locks it."""
    while True:
        temporary.mkdir(exist_ok=True)
        try:
            descriptor = lock(temporary)
        except FileNotFoundError:
            continue
        except BlockingIOError:
            raise BlockingIOError(
                errno.EWOULDBLOCK, "another process is writing a checkpoint there", str(path)
            ) from None
        if descriptor is None or _is_at(descriptor, temporary):
            return descriptor
        # Who had it has put it in place, or removed it.
        unlock(descriptor)


def _is_at(descriptor: int, path: pathlib.Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _remove_other_arrays(path: pathlib.Path, keep: str) -> None:
    for entry in os.scandir(path):
        if entry.name.startswith(ARRAYS) and entry.name != keep:
            _remove(pathlib.Path(entry))


def _remove(path: pathlib.Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
