"""The format of a checkpoint: a manifest, which describes all of it, and the files of its arrays.

The manifest is JSON. It lists each leaf and node of the state, and each file. Orbax writes and
reads the arrays. There are three checksums, all sha256: of the manifest, taken in `to_text` and
checked in `read_manifest`; of each file, taken in `_save.seal` and checked in
`_restore.check_files`; of each array in memory, taken in `_save._write` once Orbax has written it,
and checked in `_restore._placed`.
"""

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import math
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from ..._compat import Tracer
from ..._dtypes import is_key
from ..._pytree import flag_frozen, is_array, is_reference

NAME = "manifest.json"
_FORMAT = "eqxlike.train checkpoint"
_VERSION = 1


class CheckpointError(ValueError):
    """A checkpoint is damaged: files are missing, cut off, changed, or no checkpoint at all.

    An older checkpoint may be whole, so it is worth a try. A whole checkpoint of another model
    raises a plain `ValueError`: older ones would not help.
    """


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf of a pytree.

    - `path`: where it is, as in `.model.layers[0].weight`.
    - `kind`: an array of numbers, an array of typed PRNG keys, or something that is not stored: a
      frozen array that was left out, or no array.
    - `shape`, `dtype`: of the numbers, which of a key are its data.
    - `key`: the implementation of a PRNG key, as in `threefry2x32`.
    - `text`: a static leaf that text tells apart: a number, a string, a bool. Of a frozen array its
      shape and dtype.
    """

    path: str
    kind: Literal["array", "key", "frozen", "static"]
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    key: str | None = None
    text: str | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the numbers in memory."""
        return 0 if self.shape is None else math.prod(self.shape) * jnp.dtype(self.dtype).itemsize

    def describe(self) -> str:
        """The words for it in a message."""
        if self.shape is None:
            return self.text or "no array"
        if self.kind == "key":
            return f"a PRNG key of {self.key} and shape {self.shape[:-1]}"
        return f"an array of shape {self.shape} and dtype {self.dtype}"


@dataclasses.dataclass(frozen=True)
class StoredLeaf:
    """A leaf as it was when it was saved.

    - `leaf`: its description.
    - `name`: that of its folder among the arrays; `None` for what is not stored: a static leaf, and
      an array without elements.
    - `stored_dtype`: of the numbers in the files: another one of the same bits where tensorstore
      does not know that of the leaf.
    - `checksum`: of its bytes in memory, in C order; `None` where no process had all of them.
    - `sharding`: text for whoever reads the manifest.
    - `tree`: the name of the pytree that has the leaf, if it was saved with the state; `None` for
      the state's own.
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
        return f"{self.tree or 'state'}{self.leaf.path}"


@dataclasses.dataclass(frozen=True)
class StoredFile:
    """A file under the folder of arrays: its size in bytes, and their sha256."""

    size: int
    checksum: str


Nodes = list[list[str]]
"""Path and type of each node of a pytree, from the root down."""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a checkpoint is made of.

    - `arrays_folder`: the folder with the arrays, next to the manifest.
    - `nodes`: those of the state.
    - `leaves`: in the order of the state, and then of each other tree.
    - `files`: under `arrays_folder`, by their paths with `/`.
    - `data`: the user's own.
    - `step`: the state's, if it has one.
    - `score`: how good it is, if `save` got that.
    - `versions`: of the libraries that wrote it.
    - `beside`: the nodes of other trees that were saved with the state, by their names.
    """

    arrays_folder: str
    nodes: Nodes
    leaves: list[StoredLeaf]
    files: dict[str, StoredFile]
    data: Any
    step: int | None
    score: float | None
    versions: dict[str, str]
    beside: dict[str, Nodes] = dataclasses.field(default_factory=dict)

    def files_by_leaf(self) -> dict[str, list[StoredFile]]:
        """The files with the numbers of each stored leaf, by the leaf's name."""
        found: dict[str, list[StoredFile]] = {leaf.name: [] for leaf in self.leaves if leaf.name}
        for path, file in self.files.items():
            name, _, rest = path.partition("/")
            if name in found and not rest.startswith("."):
                found[name].append(file)
        return found


def to_text(manifest: Manifest) -> str:
    """The manifest as JSON, with a checksum of itself."""
    content = dataclasses.asdict(manifest)
    # All versions to come keep these four fields: they tell a newer version from a flipped bit.
    document = {
        "format": _FORMAT,
        "version": _VERSION,
        "checksum": _checksum(_VERSION, content),
        "content": content,
    }
    return json.dumps(document, indent=1)


def read_manifest(folder: pathlib.Path) -> Manifest:
    """The manifest in a folder.

    **Raises:** `FileNotFoundError` if there is no such folder; `CheckpointError` if it is not a
    checkpoint, or its manifest is damaged; `ValueError` if it is from a newer version.
    """
    path = folder / NAME
    try:
        text = path.read_bytes()
    except NotADirectoryError:
        raise CheckpointError(f"{folder} is not a checkpoint: that is a folder.") from None
    except FileNotFoundError:
        if not folder.exists():
            raise FileNotFoundError(f"There is no checkpoint at {folder}.") from None
        raise CheckpointError(
            f"{folder} is not a checkpoint, or one that was not written to its end: it has no "
            f"{NAME}."
        ) from None
    try:
        document = json.loads(text)
        version, content = document["version"], document["content"]
        if document["format"] != _FORMAT or type(version) is not int:
            raise ValueError(document["format"])
        is_whole = document["checksum"] == _checksum(version, content)
        manifest = _from_content(content) if is_whole and version <= _VERSION else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{path} is damaged, or no manifest of a checkpoint.") from None
    if not is_whole:
        raise CheckpointError(f"{path} is damaged: its checksum is not that of what it says.")
    if manifest is None:
        raise ValueError(
            f"{folder} was written by a newer version of eqxlike, in format {version}; this one "
            f"reads formats up to {_VERSION}. Update eqxlike, or give another folder."
        )
    return manifest


def _checksum(version: int, content: Any) -> str:
    text = json.dumps([version, content], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _from_content(content: dict[str, Any]) -> Manifest:
    """The manifest that JSON describes; raises an error of any type if it describes none."""
    leaves = [_leaf_from(each) for each in content["leaves"]]
    files = {name: StoredFile(**each) for name, each in content["files"].items()}
    manifest = Manifest(**content | {"leaves": leaves, "files": files})
    folders = [manifest.arrays_folder, *(each.name for each in leaves if each.name is not None)]
    if len(set(folders)) < len(folders):
        raise ValueError(folders)
    for is_folder, names in ((True, folders), (False, files)):
        for parts in (pathlib.PurePosixPath(name).parts for name in names):
            # Nothing outside the checkpoint is read.
            if not parts or "/" in parts or ".." in parts or (is_folder and len(parts) > 1):
                raise ValueError(parts)
    for file in files.values():
        if type(file.size) is not int or file.size < 0 or type(file.checksum) is not str:
            raise ValueError(file)
    for nodes in (manifest.nodes, *manifest.beside.values()):
        dict(nodes)  # Raises an error unless they are pairs.
    if not isinstance(manifest.score, int | float | None):
        raise TypeError(manifest.score)
    return manifest


def _leaf_from(stored: dict[str, Any]) -> StoredLeaf:
    shape = stored["leaf"]["shape"]
    if shape is not None:
        if not all(type(length) is int and length >= 0 for length in shape):
            raise ValueError(shape)
        shape = tuple(shape)
    leaf: Any = Leaf(**stored["leaf"] | {"shape": shape})
    made = StoredLeaf(**stored | {"leaf": leaf})
    # An array without a name would come back as zeros.
    if (made.name is not None) != (made.leaf.num_bytes > 0):
        raise ValueError(made)
    return made


# --- The description of a pytree, by which a checkpoint and a state are compared ---


class Description(NamedTuple):
    """What a pytree consists of.

    - `leaves`: each with its description.
    - `nodes`: with the static fields of each that text tells apart.
    - `treedef`: that of the pytree.
    """

    leaves: list[tuple[Leaf, Any]]
    nodes: Nodes
    treedef: Any


def describe(pytree: PyTree, *, with_frozen: bool = True) -> Description:
    """Describes a pytree of JAX and NumPy arrays, `jax.ShapeDtypeStruct`s in their places, and
    other leaves; without `with_frozen` frozen arrays are not to be stored.

    **Raises:** `TypeError`, with the path, for what can be no part of a checkpoint.
    """
    nodes: Nodes = []

    def note(path: tuple[Any, ...], node: Any) -> bool:
        if not jtu.all_leaves([node]):
            nodes.append([jtu.keystr(path), _describe_node(node)])
        return False

    found, treedef = jtu.tree_flatten_with_path(pytree, note, is_leaf_takes_path=True)
    leaves = [(_describe_leaf(jtu.keystr(path), leaf), leaf) for path, leaf in found]
    if not with_frozen:
        leaves = [
            (Leaf(each.path, "frozen", text=each.describe()), leaf)
            if is_frozen and each.kind == "array"
            else (each, leaf)
            for (each, leaf), is_frozen in zip(leaves, flag_frozen(pytree), strict=True)
        ]
    return Description(leaves, nodes, treedef)


def _describe_leaf(path: str, leaf: Any) -> Leaf:
    if isinstance(leaf, Tracer):
        raise TypeError(
            f"A checkpoint expected an array at state{path}, and got one that is being traced: "
            "save and restore outside of jit, grad and vmap."
        )
    if is_reference(leaf):
        raise TypeError(
            f"A checkpoint holds values, and state{path} is a jax.Ref: put its value `ref[...]` in "
            "its place."
        )
    if isinstance(leaf, np.ma.MaskedArray):
        raise TypeError(
            f"A checkpoint has no masks, and state{path} is a masked array: put its numbers, and "
            "`numpy.ma.getmaskarray(array)`, in its place."
        )
    if not is_array(leaf) and not isinstance(leaf, jax.ShapeDtypeStruct):
        return Leaf(path, "static", text=_stable_text(leaf))
    if is_key(leaf):
        data, name = _key_data_of(leaf)
        return Leaf(path, "key", data.shape, str(data.dtype), name)
    dtype = np.dtype(leaf.dtype)
    if not _is_numeric(dtype):
        raise TypeError(
            f"A checkpoint holds numbers and bools alone, and state{path} is an array of dtype "
            f"{dtype}: store it apart, or pass it as `data` if it is JSON."
        )
    # Numbers are written in the byte order of the machine.
    return Leaf(path, "array", tuple(leaf.shape), str(dtype.newbyteorder("=")))


def _key_data_of(key: Any) -> tuple[jax.ShapeDtypeStruct, str]:
    # Traced, since a `jax.ShapeDtypeStruct` has no implementation that one could ask for.
    names = []

    def read(key: Any) -> Any:
        names.append(str(jax.random.key_impl(key)))
        return jax.random.key_data(key)

    data = jax.eval_shape(read, jax.ShapeDtypeStruct(key.shape, key.dtype))
    return data, names[0]


def _is_numeric(dtype: np.dtype) -> bool:
    if dtype.isbuiltin == 2:  # added to NumPy by another package
        return jnp.issubdtype(dtype, jnp.number)
    # NumPy's widest floats differ between machines, and no other library knows them.
    return dtype.kind in "biufc" and dtype.char not in "gG"


def _describe_node(node: Any) -> str:
    name = type(node).__qualname__
    if not dataclasses.is_dataclass(node):
        return name
    statics = {
        field.name: _stable_text(getattr(node, field.name, None))
        for field in dataclasses.fields(node)
        if field.metadata.get("static")
    }
    texts = [f"{field}={text}" for field, text in statics.items() if text is not None]
    return f"{name}({', '.join(texts)})" if texts else name


def _stable_text(value: Any) -> str | None:
    """Text that is the same for the same value, today and next year; `None` if there is none."""
    # Not `isinstance`: NumPy's numbers and enumerations are numbers too, with another `repr`.
    if value is None or type(value) in (bool, int, float, complex, str):
        return repr(value)
    if type(value) in (tuple, list):
        texts = [_stable_text(each) for each in value]
        opening, closing = "()" if type(value) is tuple else "[]"
        return None if None in texts else f"{opening}{', '.join(map(str, texts))}{closing}"
    return None


# --- The checkpoints in a folder, each named by its step ---


STEP_NAME = re.compile(r"step_(\d+)")


def name_of(step: int) -> str:
    """The name of the checkpoint of a step; names sort as their steps do."""
    return f"step_{step:09d}"


def steps_in(folder: pathlib.Path) -> dict[int, pathlib.Path]:
    """The checkpoints in a folder by their steps, newest first, whole or not."""
    if not folder.is_dir():
        return {}
    matches = {entry: STEP_NAME.fullmatch(entry.name) for entry in folder.iterdir()}
    found = [(int(match[1]), path) for path, match in matches.items() if match and path.is_dir()]
    return dict(sorted(found, reverse=True))


# --- The files of arrays: Orbax, which writes and reads them, and their checksums ---


def orbax() -> ModuleType:
    """Orbax, imported on first use.

    **Raises:** `ImportError`, with what to install.
    """
    try:
        import orbax.checkpoint
    except ImportError as error:
        message = "Checkpoints are written by Orbax: `pip install 'eqxlike[train]'`."
        raise ImportError(message) from error
    return orbax.checkpoint


@contextlib.contextmanager
def open_arrays(folder: pathlib.Path) -> Iterator[tuple[Any, Any]]:
    """Orbax's handler of arrays, and the folder as the path that it takes."""
    # `etils` is a dependency of Orbax, which accepts only its paths for JAX arrays.
    from etils import epath

    # A folder for each array, so that a damaged file tells which array it was part of; and no
    # compression, since weights hardly shrink.
    handler = orbax().PyTreeCheckpointHandler(
        use_ocdbt=False, use_zarr3=False, use_compression=False
    )
    with contextlib.closing(handler):
        yield handler, epath.Path(folder)


Item = TypeVar("Item")
Result = TypeVar("Result")

_THREADS = 4


def in_threads(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """`function` of each item, in threads: checksums and disks release Python's lock."""
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as executor:
        return list(executor.map(function, items))


def checksum_of(array: np.ndarray) -> str:
    """The sha256 of the bytes of an array, in C order."""
    in_order = np.asarray(array, order="C")
    return hashlib.sha256(in_order.reshape(-1).view(np.uint8).data).hexdigest()


def checksum_of_file(path: pathlib.Path) -> str:
    """The sha256 of a file, read block by block, so that nothing of its size is allocated."""
    with open(path, "rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
