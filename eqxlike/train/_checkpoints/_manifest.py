"""The manifest: a JSON file that says what a checkpoint is made of, down to its last byte."""

import concurrent.futures
import dataclasses
import errno
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np

from ._leaves import Leaf

# --- What is raised for a checkpoint that is damaged ---


class CheckpointError(ValueError):
    """A checkpoint is damaged: files are missing, cut off, changed, or no checkpoint at all.

    An older checkpoint may be whole, so it is worth a try. For one that is whole, but of another
    model than is asked for, a `ValueError` that is no `CheckpointError` is raised: there older ones
    help no more.
    """


NAME = "manifest.json"
_FORMAT = "eqxlike.train checkpoint"
_VERSION = 1


@dataclasses.dataclass(frozen=True)
class StoredLeaf:
    """A leaf as it was when it was saved.

    - `leaf`: what it was.
    - `name`: that of its folder among the arrays; `None` for what is not stored: a static leaf, and
      an array without elements.
    - `stored_dtype`: of the numbers in the files, which are the bits of others where tensorstore
      does not know them.
    - `checksum`: of its bytes in memory, in C order; `None` where no process had all of them.
    - `sharding`: text for whoever reads the manifest.
    - `tree`: the name of the pytree beside the state whose leaf it is; `None` for the state's own.
    """

    leaf: Leaf
    name: str | None = None
    stored_dtype: str | None = None
    checksum: str | None = None
    sharding: str | None = None
    tree: str | None = None

    @property
    def place(self) -> str:
        """Where it was, as a message says it."""
        return f"state{self.leaf.path}" if self.tree is None else f"{self.tree}{self.leaf.path}"


@dataclasses.dataclass(frozen=True)
class StoredFile:
    """A file under the folder of arrays: bytes, and the sha256 of them."""

    size: int
    checksum: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a checkpoint is made of.

    - `arrays_folder`: the folder beside the manifest with the arrays.
    - `nodes`: path and type of each node of the state.
    - `leaves`: in the order of the state, and then of each tree beside it.
    - `files`: under `arrays_folder`, by their paths with `/`.
    - `data`: the user's own.
    - `step`: the state's, if it has one.
    - `score`: how good it is, if somebody said.
    - `versions`: of the libraries that wrote it.
    - `beside`: the nodes of other trees that were saved along, by the names of these.
    """

    arrays_folder: str
    nodes: list[list[str]]
    leaves: list[StoredLeaf]
    files: dict[str, StoredFile]
    data: Any
    step: int | None
    score: float | None
    versions: dict[str, str]
    beside: dict[str, list[list[str]]] = dataclasses.field(default_factory=dict)

    def of_tree(self, name: str | None) -> "Manifest":
        """The same with the nodes and leaves of one tree alone: the state's, `None`, or another."""
        leaves = [each for each in self.leaves if each.tree == name]
        nodes = self.nodes if name is None else self.beside[name]
        return dataclasses.replace(self, nodes=nodes, leaves=leaves)


def to_text(manifest: Manifest) -> str:
    """The manifest as JSON, with a checksum of itself."""
    content = dataclasses.asdict(manifest)
    # `format`, `version`, `checksum` and `content` are for all versions to come: so a newer version
    # is told from one that a flipped bit made.
    document = {
        "format": _FORMAT,
        "version": _VERSION,
        "checksum": _checksum(_VERSION, content),
        "content": content,
    }
    return json.dumps(document, indent=1)


def read_manifest(folder: pathlib.Path) -> Manifest:
    """The manifest in a folder.

    **Raises:** `FileNotFoundError` if there is no such folder; `CheckpointError` if it is no
    checkpoint, or its manifest is damaged; `ValueError` if it is from a newer version.
    """
    path = folder / NAME
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        if not folder.exists():
            raise FileNotFoundError(f"There is no checkpoint at {folder}.") from None
        raise CheckpointError(
            f"{folder} is no checkpoint, or one that was not written to its end: it has no {NAME}."
        ) from None
    except NotADirectoryError:
        raise CheckpointError(f"{folder} is no checkpoint: that is a folder.") from None
    try:
        document = json.loads(text)
        version, content = document["version"], document["content"]
        is_ours = document["format"] == _FORMAT and type(version) is int
        is_whole = is_ours and document["checksum"] == _checksum(version, content)
    except (ValueError, KeyError, TypeError, RecursionError):
        raise _no_manifest(path) from None
    if not is_ours:
        raise _no_manifest(path)
    if not is_whole:
        raise CheckpointError(f"{path} is damaged: its checksum is not that of what it says.")
    if version > _VERSION:
        raise ValueError(
            f"{folder} was written by a newer version of eqxlike, in format {version}; this one "
            f"reads formats up to {_VERSION}. Update eqxlike, or give another folder."
        )
    try:
        return _from_content(content)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise _no_manifest(path) from None


def _no_manifest(path: pathlib.Path) -> CheckpointError:
    return CheckpointError(f"{path} is damaged, or no manifest of a checkpoint.")


def _checksum(version: int, content: Any) -> str:
    text = json.dumps([version, content], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _from_content(content: dict[str, Any]) -> Manifest:
    """The manifest that JSON tells of; whatever is raised if it tells of none."""
    leaves = [_leaf_from(each) for each in content["leaves"]]
    files = {str(name): StoredFile(**each) for name, each in content["files"].items()}
    nodes = _nodes_from(content["nodes"])
    beside = {str(name): _nodes_from(each) for name, each in content.get("beside", {}).items()}
    rest = {"leaves": leaves, "files": files, "nodes": nodes, "beside": beside}
    manifest = Manifest(**content | rest)
    names = [manifest.arrays_folder, *(each.name for each in leaves if each.name is not None)]
    if len(set(names)) < len(names):
        raise ValueError(names)
    for name in [*names, *files]:
        parts = pathlib.PurePosixPath(name).parts
        # Nothing outside the checkpoint is read.
        if not parts or "/" in parts or ".." in parts or (name in names and len(parts) > 1):
            raise ValueError(name)
    if not isinstance(manifest.score, int | float | None):
        raise ValueError(manifest.score)
    for file in files.values():
        if type(file.size) is not int or file.size < 0 or type(file.checksum) is not str:
            raise ValueError(file)
    return manifest


def _nodes_from(stored: list[Any]) -> list[list[str]]:
    return [[str(path), str(text)] for path, text in stored]


def _leaf_from(stored: dict[str, Any]) -> StoredLeaf:
    shape = stored["leaf"]["shape"]
    if shape is not None:
        if not all(type(length) is int and length >= 0 for length in shape):
            raise ValueError(shape)
        shape = tuple(shape)
    leaf: Any = Leaf(**stored["leaf"] | {"shape": shape})
    made = StoredLeaf(**stored | {"leaf": leaf})
    # An array without a name would come back as zeros.
    if (made.name is not None) != (leaf.num_bytes > 0):
        raise ValueError(made)
    return made


# --- The files of arrays: their checksums, and that they are on the disk ---


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
