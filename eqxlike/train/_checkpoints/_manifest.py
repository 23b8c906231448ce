"""The manifest of a checkpoint, a file next to the arrays that Orbax writes.

The first line is the sha256 of the other lines, which are JSON. The JSON describes each node and
leaf of the state, and has the size and sha256 of each file with arrays.
"""

import concurrent.futures
import dataclasses
import hashlib
import json
import os
import pathlib
from typing import Any, NamedTuple

import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from ..._compat import Tracer
from ..._dtypes import is_key
from ...extend import is_array_or_struct, is_reference

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
    # Arrays are written in native byte order.
    dtype = leaf.dtype if is_key(leaf) else np.dtype(leaf.dtype).newbyteorder("=")
    # `longdouble` ("g", "G") is rejected, because it differs between machines, and other libraries
    # do not support it.
    is_numeric = is_key(leaf) or dtype.kind == "b" or jnp.issubdtype(dtype, jnp.number)
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
