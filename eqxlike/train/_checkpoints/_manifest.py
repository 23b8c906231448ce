"""What a checkpoint holds: the files that Orbax wrote, and a manifest of our own.

The manifest is JSON after a line with its sha256. It describes each node and leaf of the state, and
has the sha256 of each file with arrays.
"""

import concurrent.futures
import dataclasses
import hashlib
import json
import os
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from ... import is_array
from ..._compat import Tracer
from ..._dtypes import is_key
from ...extend import is_reference

ARRAYS, MANIFEST = "arrays", "manifest"
"""The folders of a checkpoint: the arrays, as Orbax writes them, and `manifest.json`."""


class CheckpointError(ValueError):
    """A checkpoint is damaged: files are missing, cut off, changed, or no checkpoint at all.

    An older checkpoint may be whole, so it is worth a try. A whole checkpoint of another model
    raises a plain `ValueError`: older ones would not help.
    """


def seal(manifest: pathlib.Path, arrays: pathlib.Path) -> None:
    """Adds checksums to a new `manifest.json`: of the files with arrays, and of itself."""
    content = json.loads(manifest.read_bytes()) | {"files": _files_in(arrays)}
    text = json.dumps(content).encode()
    with open(manifest, "wb") as file:
        file.write(_sha256(text) + b"\n" + text)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: pathlib.Path) -> dict[str, Any]:
    """The manifest of a checkpoint: `state`, `beside`, `data` and `files`.

    **Raises:** `FileNotFoundError` if there is no such folder; `CheckpointError` if it is not a
    checkpoint, or its manifest is damaged.
    """
    if not folder.exists():
        raise FileNotFoundError(f"There is no checkpoint at {folder}.")
    path = folder / MANIFEST / "manifest.json"
    try:
        checksum, _, text = path.read_bytes().partition(b"\n")
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"{folder} is damaged or no checkpoint: there is no {path}."
        ) from None
    if checksum != _sha256(text):
        raise CheckpointError(f"{path} is damaged: its checksum does not match its content.")
    return json.loads(text)


def check_files(folder: pathlib.Path, manifest: dict[str, Any]) -> None:
    """Raises `CheckpointError`, with the path of the leaf, if a file is not as it was written."""
    found = _files_in(folder / ARRAYS)
    trees = {"state": manifest["state"]} | manifest["beside"]
    places = {each[2]: f"{tree}{each[0]}" for tree in trees for each in trees[tree]}
    for name, (size, checksum) in manifest["files"].items():
        if found.get(name) != [size, checksum]:
            problem = "is missing"
            if name in found:
                problem = f"was changed: it had {size} bytes, and has {found[name][0]}"
            raise CheckpointError(
                f"{folder} is damaged: {folder / ARRAYS / name}, with the values of "
                f"{places.get(name.partition('/')[0], 'all arrays')}, {problem}."
            )


def _files_in(folder: pathlib.Path) -> dict[str, list[Any]]:
    """Size and sha256 of each file under a folder, by its path there."""

    def describe(path: pathlib.Path) -> list[Any]:
        with open(path, "rb", buffering=0) as file:
            return [path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()]

    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    names = [path.relative_to(folder).as_posix() for path in paths]
    # Checksums and disks release Python's lock.
    with concurrent.futures.ThreadPoolExecutor(4) as executor:
        return dict(zip(names, executor.map(describe, paths), strict=True))


def _sha256(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest().encode()


# --- The description of a pytree, by which a checkpoint and a state are compared ---


NODE: Any = object()
"""The value in the `Entry` of a node."""


class Entry(NamedTuple):
    """A node or a leaf of a pytree.

    - `path`: where it is, as in `.model.layers[0].weight`.
    - `text`: the type and static fields of a node; shape and dtype of an array; the value of a
      number or a string.
    - `value`: the leaf.
    """

    path: str
    text: str
    value: Any


class Saved(NamedTuple):
    """A node or a leaf in a manifest.

    - `path`, `text`: as of an `Entry`.
    - `name`: the name of the array; `None` for what is not stored: a node, a leaf that is no array,
      an array without elements, and a frozen one that was left out.
    - `key_impl`: the implementation of a PRNG key.
    """

    path: str
    text: str
    name: str | None
    key_impl: str | None


def describe(pytree: PyTree) -> tuple[list[Entry], Any]:
    """All nodes and leaves of a pytree, from the root down, and its treedef.

    Leaves are JAX and NumPy arrays, `jax.ShapeDtypeStruct`s in their places, and others.

    **Raises:** `TypeError`, with the path, for what can be no part of a checkpoint.
    """
    entries: list[Entry] = []

    def note(path: tuple[Any, ...], value: Any) -> bool:
        place, is_leaf = jtu.keystr(path), jtu.all_leaves([value])
        text = _describe_leaf(place, value) if is_leaf else _describe_node(value)
        entries.append(Entry(place, text, value if is_leaf else NODE))
        return False

    return entries, jtu.tree_flatten_with_path(pytree, note, is_leaf_takes_path=True)[1]


def is_stored(leaf: Any) -> bool:
    """Whether a leaf is an array, which a checkpoint holds."""
    return is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


def _describe_leaf(path: str, leaf: Any) -> str:
    is_refused = isinstance(leaf, Tracer | np.ma.MaskedArray) or is_reference(leaf)
    if not is_refused and not is_stored(leaf):
        return _stable_text(leaf) or "no array"
    # Numbers are written in the byte order of the machine.
    dtype = leaf.dtype if is_key(leaf) else np.dtype(leaf.dtype).newbyteorder("=")
    # NumPy's widest floats differ between machines, and no other library knows them.
    is_numeric = is_key(leaf) or dtype.kind == "b" or jnp.issubdtype(dtype, jnp.number)
    if is_refused or not is_numeric or getattr(dtype, "char", "") in ("g", "G"):
        raise TypeError(
            "A checkpoint holds arrays of numbers and bools, and is written and read outside of "
            f"jit; state{path} is of type {type(leaf).__name__} and dtype {dtype}."
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
    """Text that is the same for the same value, today and next year; `None` if there is none."""

    def is_stable(value: Any) -> bool:
        # Not `isinstance`: NumPy's numbers and enumerations are numbers too, with another `repr`.
        if type(value) in (tuple, list):
            return all(map(is_stable, value))
        return value is None or type(value) in (bool, int, float, complex, str)

    return repr(value) if is_stable(value) else None
