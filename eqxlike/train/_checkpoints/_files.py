"""The files of arrays: their checksums, and that they are on the disk."""

import concurrent.futures
import errno
import hashlib
import os
import pathlib
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np

from ._error import CheckpointError
from ._manifest import Manifest, StoredFile

Item = TypeVar("Item")
Result = TypeVar("Result")

_THREADS = 4
_BLOCK = 1 << 20


def in_threads(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """`function` of each item; checksums and disks do not hold Python's lock."""
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as executor:
        return list(executor.map(function, items))


def checksum_of(array: np.ndarray) -> str:
    """The sha256 of the bytes of an array, in C order."""
    in_order = np.asarray(array, order="C")
    return hashlib.sha256(in_order.reshape(-1).view(np.uint8).data).hexdigest()


def seal(folder: pathlib.Path) -> dict[str, StoredFile]:
    """Sees to it that all under `folder` is on the disk, and takes the checksum of each file.

    **Returns:** the files by their paths in `folder`, with `/`.
    """
    entries = sorted(folder.rglob("*"))
    files = [path for path in entries if path.is_file()]
    sealed = in_threads(_seal_file, files)
    for path in [*(path for path in entries if path.is_dir()), folder]:
        sync_folder(path)
    names = [path.relative_to(folder).as_posix() for path in files]
    return dict(zip(names, sealed, strict=True))


def sync_folder(folder: pathlib.Path) -> None:
    """Sees to it that the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_files(folder: pathlib.Path, manifest: Manifest) -> None:
    """Raises `CheckpointError`, with the path of the leaf, if a file is not as it was written.

    Files are read block by block, so that nothing of their size is allocated.
    """
    arrays = folder / manifest.arrays_folder
    places = {each.name: each.place for each in manifest.leaves if each.name is not None}
    held = dict.fromkeys(places, 0)
    for name, file in manifest.files.items():
        place = arrays / name
        whose = _whose(places, name)
        try:
            size = os.stat(place).st_size
        except (FileNotFoundError, NotADirectoryError):
            raise CheckpointError(f"{folder} is damaged: {place}{whose} is missing.") from None
        if size != file.size:
            how = "cut off" if size < file.size else "longer than it was"
            raise CheckpointError(
                f"{folder} is damaged: {place}{whose} is {how}. It should have {file.size} bytes, "
                f"and has {size}."
            )
        top, _, rest = name.partition("/")
        if top in held and not rest.startswith("."):
            held[top] += size
    for stored in manifest.leaves:
        if stored.name is not None and held[stored.name] < stored.leaf.num_bytes:
            raise CheckpointError(
                f"{folder} is damaged: its manifest promises {stored.leaf.num_bytes} bytes of "
                f"{stored.place}, and its files hold {held[stored.name]}."
            )

    def check(entry: tuple[str, StoredFile]) -> None:
        name, file = entry
        if _checksum_of_file(arrays / name) != file.checksum:
            raise CheckpointError(
                f"{folder} is damaged: {arrays / name}{_whose(places, name)} was changed after it "
                "was written; its checksum differs."
            )

    in_threads(check, manifest.files.items())


def _whose(places: dict[Any, str], file: str) -> str:
    """Of which leaf a file is, in words."""
    place = places.get(file.partition("/")[0])
    return "" if place is None else f", with the values of {place},"


def _seal_file(path: pathlib.Path) -> StoredFile:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        return StoredFile(os.fstat(file.fileno()).st_size, _checksum_of_file(path))


def _checksum_of_file(path: pathlib.Path) -> str:
    checksum = hashlib.sha256()
    try:
        with open(path, "rb", buffering=0) as file:
            while block := file.read(_BLOCK):
                checksum.update(block)
    except OSError as error:
        if error.errno not in (errno.EIO, errno.ENOENT):
            raise
        raise CheckpointError(f"{path} is damaged: it cannot be read: {error.strerror}.") from error
    return checksum.hexdigest()
