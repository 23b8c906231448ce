"""Restoring a state."""

import functools
import os
import pathlib
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ..._dtypes import is_key
from ._background import wait_for_newest
from ._compare import check_fits
from ._error import CheckpointError
from ._files import check_files, checksum_of
from ._leaves import Leaf, describe_leaves
from ._manifest import Manifest, StoredLeaf, read_manifest
from ._orbax import read_arrays, stored_shapes
from ._placing import place_like, sharding_on_purpose
from ._steps import newest_whole_near

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
