"""Restoring a state."""

import collections
import functools
import os
import pathlib
import re
from collections.abc import Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..._compat import Tracer
from ..._dtypes import is_key
from ._background import wait_for_newest
from ._leaves import Leaf, describe_leaves, describe_nodes, read_arrays, stored_shapes
from ._manifest import (
    NAME,
    CheckpointError,
    Manifest,
    StoredLeaf,
    check_files,
    checksum_of,
    read_manifest,
)

State = TypeVar("State")


class Restored(NamedTuple, Generic[State]):
    """What a checkpoint holds.

    - `state`: of the structure of `like`.
    - `data`: what was given to `save` along.
    """

    state: State
    data: Any


def restore(path: str | os.PathLike[str], like: State) -> Restored[State]:
    """Reads a state that `save` has written.

    Structure, shapes, dtypes and checksums are looked at before any array is allocated. Nothing in
    a checkpoint is run: it is JSON and numbers.

    **Arguments:**

    - `path`: the folder that was given to `save`.
    - `like`: a state of the structure that was saved, such as a new one; it may have
      `jax.ShapeDtypeStruct`s for arrays, as of `filter_eval_shape`, and then takes no memory.
      Arrays come back with the sharding of those in `like`, where those were put somewhere on
      purpose, whatever the sharding was when they were saved; as NumPy arrays where `like` has
      such. Functions, strings and Python numbers are those of `like`.

    **Returns:** a `Restored`, of `state` and `data`.

    **Raises:** `CheckpointError` if the checkpoint is damaged; it names the file and the leaf, and
    the newest whole one in the folder. A `ValueError` that is none, with all differences, if it is
    whole and `like` has another structure, shape or dtype, or if a newer version of eqxlike wrote
    it. `FileNotFoundError` if there is none.

    >>> import pathlib, tempfile, jax.numpy as jnp
    >>> from eqxlike import train
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "checkpoint"
    >>> _ = train.save(path, {"weight": jnp.ones(2)}, {"epoch": 3})
    >>> restore(path, like={"weight": jnp.zeros(2)})
    Restored(state={'weight': Array([1., 1.], dtype=float32)}, data={'epoch': 3})
    """
    wait_for_newest()
    folder = pathlib.Path(os.path.realpath(path))
    try:
        return read_one(folder, like)
    except CheckpointError as error:
        other = newest_whole_near(folder)
        if other is None:
            raise
        raise CheckpointError(f"{error} The newest whole one here is {other}.") from error


def read_one(folder: pathlib.Path, like: State, tree: str | None = None) -> Restored[State]:
    """As `restore`; where the checkpoint is damaged, no others are looked at.

    **Arguments:**

    - `tree`: the name of one beside the state, to be read in its place.
    """
    leaves, treedef = describe_leaves(like)
    while True:
        manifest = read_manifest(folder)
        try:
            # Somebody who forbids transfers means those that nobody asked for.
            with jax.transfer_guard("allow"):
                found = _read(folder, manifest, like, leaves, tree)
        except Exception:
            # Another process may have put a newer one in its place meanwhile, and half-read arrays
            # fail in many ways: as missing files, wrong sums, or whatever Orbax raises. An error
            # that is not of that is raised here, or by the next reading.
            if _arrays_folder_of(folder) in (manifest.arrays_folder, None):
                raise
        else:
            return Restored(treedef.unflatten(found), manifest.data)


def _arrays_folder_of(folder: pathlib.Path) -> str | None:
    try:
        return read_manifest(folder).arrays_folder
    except (ValueError, OSError):
        return None


def _read(
    folder: pathlib.Path,
    whole: Manifest,
    like: Any,
    leaves: list[tuple[Leaf, Any]],
    tree: str | None,
) -> list[Any]:
    if tree is not None and tree not in whole.beside:
        raise KeyError(
            f"{folder} has nothing named {tree!r} beside its state, but "
            f"{', '.join(map(repr, whole.beside)) or 'no other tree'}."
        )
    manifest = whole.of_tree(tree)
    check_fits(folder, manifest, like, leaves)
    check_files(folder, whole)
    arrays = folder / manifest.arrays_folder
    stored = {each.name: each for each in manifest.leaves if each.name is not None}
    values: dict[str, Any] = {}
    if stored:
        _check_shapes(folder, arrays, stored)
        values = read_arrays(
            arrays,
            {
                each.name: _sharding_to_read(each, leaf)
                for each, (_, leaf) in zip(manifest.leaves, leaves, strict=True)
                if each.name is not None
            },
        )
    return [
        # Each is let go of once it is placed.
        _placed(folder, each, leaf, values.pop(each.name) if each.name is not None else None)
        for each, (_, leaf) in zip(manifest.leaves, leaves, strict=True)
    ]


def _check_shapes(
    folder: pathlib.Path, arrays: pathlib.Path, stored: dict[str, StoredLeaf]
) -> None:
    """Raises `CheckpointError` if the arrays in the files are not those in the manifest."""
    try:
        shapes = stored_shapes(arrays)
    except (ValueError, KeyError, TypeError, FileNotFoundError) as error:
        raise CheckpointError(f"{folder} is damaged: Orbax cannot read it: {error}") from error
    for name, each in stored.items():
        promised = (each.leaf.shape, each.stored_dtype)
        if name not in shapes or shapes[name] != promised:
            raise CheckpointError(
                f"{folder} is damaged: its manifest promises {each.leaf.describe()} as "
                f"{each.place}, and the files hold {shapes.get(name, 'none')}."
            )


def _sharding_to_read(stored: StoredLeaf, like: Any) -> jax.sharding.Sharding | None:
    """The sharding with which each device reads its part alone; `None` to read all on the host."""
    is_as_stored = stored.leaf.kind == "array" and stored.stored_dtype == stored.leaf.dtype
    return sharding_on_purpose(like) if is_as_stored else None


def _placed(folder: pathlib.Path, stored: StoredLeaf, like: Any, value: Any) -> Any:
    """The value in the place of `like`, and of its type."""
    leaf = stored.leaf
    if leaf.kind == "static":
        return like
    if value is None:
        value = np.zeros(leaf.shape or (), leaf.dtype)
    is_here = isinstance(value, np.ndarray) or value.is_fully_addressable
    if stored.checksum is not None and is_here and checksum_of(value) != stored.checksum:
        raise CheckpointError(
            f"{folder} is damaged: the values of {stored.place} are not those that were saved; "
            "their checksum differs."
        )
    if stored.stored_dtype not in (None, leaf.dtype):
        value = value.view(jnp.dtype(leaf.dtype))
    if not isinstance(like, jax.Array | jax.ShapeDtypeStruct) or not is_key(like):
        return place_like(value, like)
    sharding = sharding_on_purpose(like)
    # Compiled, since a transfer of keys reaches no devices of other processes.
    wrap: Any = functools.partial(jax.random.wrap_key_data, impl=leaf.key)
    return wrap(value) if sharding is None else jax.jit(wrap, out_shardings=sharding)(value)


# --- Whether a checkpoint fits what it is to be restored into ---


_MOST_LISTED = 8
"""At most this many differences are listed."""


def check_fits(
    folder: pathlib.Path, manifest: Manifest, like: PyTree, leaves: list[tuple[Leaf, Any]]
) -> None:
    """Raises `ValueError` with all differences if a checkpoint is of another structure than `like`.

    **Arguments:**

    - `leaves`: those of `like`.
    """
    found = list(_differences(manifest, like, leaves))
    if not found:
        return
    listed = "; ".join(found[:_MOST_LISTED])
    more = f"; and {len(found) - _MOST_LISTED} more" if len(found) > _MOST_LISTED else ""
    raise ValueError(
        f"The checkpoint {folder} is whole, and does not fit `like`: {listed}{more}. Build `like` "
        "as the state was built that was saved, or give the folder of another checkpoint."
    )


def _differences(manifest: Manifest, like: PyTree, leaves: list[tuple[Leaf, Any]]) -> Iterator[str]:
    stored = [each.leaf for each in manifest.leaves]
    expected = [leaf for leaf, _ in leaves]
    there = collections.Counter(leaf.path for leaf in stored)
    here = collections.Counter(leaf.path for leaf in expected)
    if there != here:
        for path in (here - there).elements():
            yield f"like{path} is missing in the checkpoint"
        for path in (there - here).elements():
            yield f"the checkpoint has {_root(path)}, which `like` has not"
        return
    yield from _nodes_that_differ(manifest.nodes, describe_nodes(like))
    for found, (wanted, leaf) in zip(stored, leaves, strict=True):
        # Of what has no stable text, such as functions, nothing is compared.
        if found.path != wanted.path:
            yield f"{_root(found.path)} comes where `like` has like{wanted.path}"
        elif found.kind == wanted.kind == "static" and None in (found.text, wanted.text):
            continue
        elif found != wanted:
            yield f"like{wanted.path} is {wanted.describe()}, and was {found.describe()}"
        elif wanted.kind != "static" and isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            yield from _narrowed(wanted)


def _nodes_that_differ(stored: list[list[str]], expected: list[list[str]]) -> Iterator[str]:
    """The nodes of two trees whose leaves have the same paths."""
    there, here = dict(stored), dict(expected)
    for path in here.keys() | there.keys():
        found, wanted = there.get(path, "no node"), here.get(path, "no node")
        if found != wanted:
            yield f"like{path} is {wanted}, and was {found}"


def _narrowed(leaf: Leaf) -> Iterator[str]:
    if leaf.dtype in ("float64", "int64", "uint64", "complex128") and not jax.config.jax_enable_x64:  # pyright: ignore
        yield (
            f"like{leaf.path} is of dtype {leaf.dtype}, which JAX has only with "
            "`jax.config.update('jax_enable_x64', True)`"
        )


def _root(path: str) -> str:
    return f"state{path}"


# --- Numbers from a file in the place of a leaf: of its type, and where it was ---


def sharding_on_purpose(like: Any) -> jax.sharding.Sharding | None:
    """Where somebody has put `like`; `None` if JAX has."""
    if isinstance(like, jax.ShapeDtypeStruct):
        return like.sharding
    is_placed = isinstance(like, jax.Array) and not isinstance(like, Tracer) and like.committed
    return like.sharding if is_placed else None


def place_like(value: Any, like: Any) -> Any:
    """The numbers in `value`, an array of JAX's or NumPy's, as what `like` is.

    Nobody else may have `value`: on a CPU JAX takes over the memory of NumPy's arrays.
    """
    if isinstance(like, np.ndarray | np.generic):
        array = np.asarray(value).astype(like.dtype, copy=False)
        return array if isinstance(like, np.ndarray) else array[()]
    return jax.device_put(value, sharding_on_purpose(like))


# --- Checkpoints beside each other in a folder, each named by its step ---


_PATTERN = re.compile(r"step_(\d+)")


def name_of(step: int) -> str:
    """The name of the checkpoint of a step: in the order of the names is that of the steps."""
    return f"step_{step:09d}"


def steps_in(folder: pathlib.Path) -> dict[int, pathlib.Path]:
    """The checkpoints in a folder by their steps, newest first, whole or not."""
    try:
        entries = os.listdir(folder)
    except FileNotFoundError:
        return {}
    matches = [match for match in map(_PATTERN.fullmatch, entries) if match]
    found = {int(match[1]): folder / match[0] for match in matches if (folder / match[0]).is_dir()}
    return {step: found[step] for step in sorted(found, reverse=True)}


def newest_whole_near(path: pathlib.Path) -> pathlib.Path | None:
    """The newest checkpoint whose files are all as they were written: beside a checkpoint in its
    folder, or in a folder that is none.
    """
    folder = path.parent if _PATTERN.fullmatch(path.name) else path
    if not folder.is_dir():
        return None
    others = [other for other in steps_in(folder).values() if other != path]
    return next((other for other in others if _is_whole(other)), None)


def _is_whole(path: pathlib.Path) -> bool:
    try:
        check_files(path, read_manifest(path))
    except (ValueError, OSError):
        return False
    return (path / NAME).exists()
